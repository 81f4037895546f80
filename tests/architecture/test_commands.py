"""What every command has: machines can read what it answers, and every page has it right."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fcil_client.cli.main
import fcil_server.cli.main

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
