"""What every command has: machines can read what it answers, and every page has it right."""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fcil_client.cli.main
import fcil_server.cli.main
from fcil_protocol.process.terminal import run_app

# They run until they are stopped; their words are a log, which has a form of its own.
DAEMONS = {"fcil-server serve", "fcil-server relay"}


APPS = {"fcil-server": fcil_server.cli.main.app, "fcil-client": fcil_client.cli.main.app}


@cache
def whole(name):
    return typer.main.get_command(APPS[name])


def commands(command, path):
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), {o for p in command.params for o in p.opts}
        return
    for name, sub in below.items():
        yield from commands(sub, [*path, name])


def all_commands():
    for name in APPS:
        yield from commands(whole(name), [name])


def test_every_command_answers_in_json_if_asked():
    without = {path for path, options in all_commands() if not {"--json", "--format"} <= options}
    assert without == DAEMONS


def test_the_list_of_commands_is_not_empty():
    assert len(list(all_commands())) > 25


@pytest.mark.parametrize("name", APPS)
def test_every_command_has_help(name):
    for path, _ in commands(whole(name), []):
        done = CliRunner().invoke(APPS[name], [*path.split(), "--help"])
        assert done.exit_code == 0, path
        assert "Usage:" in done.output


# --- the commands that pages print ------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *(ROOT / "deploy").rglob("*.md"),
]
# Up to a comment, or to what a shell does with the output.
PRINTED = re.compile(r"(?:^|[\s`;|])(fcil-(?:server|client) [^`|;#&\n]*)", re.MULTILINE)


def printed():
    for page in PAGES:
        fences = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for block in fences:
            for text in PRINTED.findall(block.replace("\\\n", " ")):
                yield pytest.param(text.strip(), id=f"{page.name}: {text.strip()}")


def leaf(command, words):
    """Return the innermost command that words name, and its arguments."""
    while (below := getattr(command, "commands", None)) is not None and words:
        name, *rest = words
        if name.startswith("-"):
            break
        assert name in below, f"there is no command {name}"
        command, words = below[name], rest
    return command, words


@pytest.mark.parametrize("text", list(dict.fromkeys(printed())))
def test_every_printed_command_takes_these_arguments(text):
    name, *words = shlex.split(re.sub(r"\$\([^)]*\)", "TEXT", text).replace("$k", "1"))
    command, arguments = leaf(whole(name), words)
    with command.make_context(name, arguments):
        pass


def test_the_list_of_printed_commands_is_not_empty():
    assert len(list(printed())) > 60


# --- help in groups ---------------------------------------------------------------------------

VERBS = {"fcil-server": fcil_server.cli.main.VERBS, "fcil-client": fcil_client.cli.main.VERBS}
LONG = {
    "fcil-server": ("serve", "Dashboard, API and metrics"),
    "fcil-client": ("join", "When to work"),
}


@pytest.mark.parametrize("name", APPS)
def test_every_verb_is_in_one_group_of_the_help(name):
    shown = {verb for verb, command in whole(name).commands.items() if not command.hidden}
    assert sorted(verb for group in VERBS[name].values() for verb in group) == sorted(shown)


@pytest.mark.parametrize("name", APPS)
def test_help_has_panels_on_a_terminal_and_none_in_a_pipe(name, monkeypatch, capsys):
    verb, group = LONG[name]
    for arguments, wanted in ((), VERBS[name]), ((verb,), [group]):
        panels = CliRunner().invoke(APPS[name], [*arguments, "--help"]).output
        places = [panels.index(f"╭─ {title} ─") for title in wanted]
        assert places == sorted(places)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [name, *arguments, "--help"])
            patch.setattr(APPS[name], "rich_markup_mode", "rich")
            with pytest.raises(SystemExit) as stop:
                run_app(APPS[name], name)
        plain = capsys.readouterr().out
        assert stop.value.code == 0
        assert plain.isascii()
        if not arguments:
            assert "...\n" not in plain.partition("--help")[2]
            places = [plain.index(f"\n{title}:\n") for title in wanted]
            assert places == sorted(places)
