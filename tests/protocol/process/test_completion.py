"""Words as bash splits them, and the answer of a command line to a shell that completes."""

from __future__ import annotations

import sys
from typing import Annotated

import pytest
import typer

from fcil_protocol.process.completion import join_words
from fcil_protocol.process.terminal import run_app


@pytest.mark.parametrize(
    ("words", "typed", "kept"),
    [
        (["p", "revoke", "vm", ":", "ca"], ["p", "revoke", "vm:ca"], "vm:"),
        (["p", "revoke", "vm", ":"], ["p", "revoke", "vm:"], "vm:"),
        (["p", "revoke", "vm", ":", ""], ["p", "revoke", "vm:", ""], ""),
        (["p", "-c", "a.b", "=", "c", "-c", "d"], ["p", "-c", "a.b=c", "-c", "d"], ""),
        (["p", "-c", "a.b", "="], ["p", "-c", "a.b="], "a.b="),
        (["p", "--dir", "=", "/x", ":", "y"], ["p", "--dir", "/x:y"], "/x:"),
        (["p", "--dir", "="], ["p", "--dir", ""], ""),
        (["p", r"my\ vm", ":", "c"], ["p", r"my\ vm:c"], "my vm:"),
        (["p", "revoke", ""], ["p", "revoke", ""], ""),
        (["p", "'vm:ca"], ["p", "'vm:ca"], ""),
    ],
)
def test_words_are_joined_as_they_were_typed(words: list[str], typed: list[str], kept: str) -> None:
    assert join_words([*words, "later", "words"], len(words) - 1) == (typed, kept)


def names(incomplete: str) -> list[str]:
    if incomplete == "fail":
        raise PermissionError(13, "Permission denied")
    return ["vm:camera 1", "vm:camera 2", "plain"]


app = typer.Typer()


@app.command()
def show(name: Annotated[str, typer.Argument(autocompletion=names)]) -> None:
    print(name)


def tab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[str]:
    """Return the completions of the last word in bash."""
    monkeypatch.setattr(sys, "argv", ["fcil-test"])
    monkeypatch.setenv("_FCIL_TEST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as end:
        run_app(app, "fcil-test")
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["fcil-test", "vm", ":", "cam"], [r"camera\ 1", r"camera\ 2"]),
        (["fcil-test", "vm", ":"], [r"camera\ 1", r"camera\ 2"]),
        (["fcil-test", '"vm:cam'], ["vm:camera 1", "vm:camera 2"]),
        (["fcil-test", "p"], ["plain"]),
        (["fcil-test", "fail"], []),
        (["fcil-test", "'"], ["vm:camera 1", "vm:camera 2", "plain"]),
    ],
)
def test_bash_gets_the_part_of_a_word_that_it_replaces(
    words: list[str],
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tab(monkeypatch, capsys, *words) == found


def test_a_command_that_no_shell_asks_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fcil-test", "a\\b c"])
    monkeypatch.setenv("_FCIL_TEST_COMPLETE", "")
    with pytest.raises(SystemExit):
        run_app(app, "fcil-test")
    assert capsys.readouterr().out == "a\\b c\n"
