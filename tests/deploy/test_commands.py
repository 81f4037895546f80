"""What deploy/ starts and what it tells people to type, the two command lines know."""

from pathlib import Path

import pytest

from deploy.kit import APPS, DEPLOY, command_lines, unknown_options


def test_every_command_and_option_in_deploy_exists():
    found = list(command_lines())
    faults = {f.where: unknown for f in found if (unknown := unknown_options(f.words))}
    assert faults == {}
    assert len(found) > 35


def test_what_is_started_is_parsed_whole():
    """A value that is missing or of the wrong type is refused, too."""
    started = [f for f in command_lines() if ":" not in f.where]
    for found in started:
        name = Path(found.words[0]).name
        with APPS[name].make_context(name, list(found.words[1:])) as context:
            verb, command, rest = APPS[name].resolve_command(context, list(found.words[1:]))
            command.make_context(verb, rest).close()
    assert len(started) > 20


def test_commands_of_every_place_are_looked_at():
    places = {f.where.split(":")[0] for f in command_lines()}
    assert {"README.md", "fcil-server.service", "edge.Dockerfile", "daemonset.yaml"} <= places
    assert {"compose server", "compose client-1"} <= places


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("/opt/fcil/bin/fcil-server serve --dir x", []),
        ("fcil-server serve --no-new-run", []),
        ("fcil-server serve --directory x", ["--directory"]),
        ("fcil-client join --data x --tickets y", ["--tickets"]),
        ("fcil-client joins --data x", ["joins"]),
        ("fcil-server run ls --verbose", ["--verbose"]),
    ],
)
def test_a_command_or_option_that_does_not_exist_is_found(line, unknown):
    assert unknown_options(tuple(line.split())) == unknown


def test_no_ticket_or_key_stands_in_an_argument_or_the_environment():
    for found in command_lines():
        for option, value in zip(found.words, found.words[1:], strict=False):
            if option == "--ticket":
                assert value == "-" or value.endswith((".ticket", "/ticket")), found.where
    texts = [
        p.read_text(encoding="utf-8")
        for p in DEPLOY.rglob("*")
        if p.suffix != ".md" and p.is_file()
    ]
    assert not [t for t in texts if "PASSPHRASE" in t.upper() or "BEGIN PRIVATE" in t]
