"""What both command lines print: data on stdout, words on stderr, stable codes."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import pytest
import typer

from fcil_protocol.errors import DataError, FcilError, PortInUse, Unreachable, all_errors
from fcil_protocol.process import defects
from fcil_protocol.process.terminal import (
    Format,
    Lines,
    chosen,
    command,
    emit,
    errors,
    printable,
    run_app,
)


def shown() -> None:
    print("for people")


class TestEmit:
    def test_text_is_for_people(self, capsys: pytest.CaptureFixture[str]) -> None:
        emit({"a": 1}, Format.TEXT, shown)
        assert capsys.readouterr() == ("for people\n", "")

    def test_json_is_one_envelope(self, capsys: pytest.CaptureFixture[str]) -> None:
        emit({"a": "ä"}, Format.JSON, shown, rows=[1, 2])
        out, err = capsys.readouterr()
        assert json.loads(out) == {"schema_version": 2, "status": "ok", "data": {"a": "ä"}}
        assert err == ""

    def test_jsonl_is_one_line_for_each_row(self, capsys: pytest.CaptureFixture[str]) -> None:
        emit({"rows": 2}, Format.JSONL, shown, rows=[{"n": 1}, {"n": 2}])
        assert [json.loads(x) for x in capsys.readouterr().out.splitlines()] == [
            {"n": 1},
            {"n": 2},
        ]

    def test_jsonl_without_rows_is_the_data_in_one_line(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        emit({"a": "x\ny"}, Format.JSONL, shown)
        assert json.loads(capsys.readouterr().out) == {"a": "x\ny"}

    @pytest.mark.parametrize("form", [Format.JSON, Format.JSONL])
    def test_moments_are_iso_8601_and_other_numbers_stay(
        self, form: Format, capsys: pytest.CaptureFixture[str]
    ) -> None:
        row = {"last_seen": 1_700_000_000.9, "closed_at": None, "rounds": 3, "that": 7}
        known = {"sent_at": ["2026-01-01T00:00:00Z"], "at": 0, "seat": [(1, {"not_after": 60})]}
        emit([row, known], form, shown)
        told = json.loads(capsys.readouterr().out)
        assert (told["data"] if form is Format.JSON else told) == [
            {"last_seen": "2023-11-14T22:13:20Z", "closed_at": None, "rounds": 3, "that": 7},
            {
                "sent_at": ["2026-01-01T00:00:00Z"],
                "at": "1970-01-01T00:00:00Z",
                "seat": [[1, {"not_after": "1970-01-01T00:01:00Z"}]],
            },
        ]

    def test_jsonl_of_nothing_is_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        emit({"rows": []}, Format.JSONL, shown, rows=[])
        assert capsys.readouterr().out == ""

    def test_json_for_short_wins(self) -> None:
        assert chosen(Format.TEXT, True) is Format.JSON
        assert chosen(Format.JSONL, False) is Format.JSONL


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def failing(error: BaseException, form: Format = Format.TEXT) -> int:
    """Raise inside `errors` and return the exit code."""
    with pytest.raises(SystemExit) as stop, errors(form):
        raise error
    code = stop.value.code
    assert isinstance(code, int)
    return code


class TestErrors:
    def test_nothing_happens_without_an_error(self) -> None:
        with errors():
            pass

    @pytest.mark.parametrize("cls", list(all_errors()), ids=lambda c: c.__name__)
    def test_every_error_ends_with_its_code_and_says_what_to_do(
        self, cls: type[FcilError], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert failing(cls("it went wrong.")) == cls.exit_code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error [{cls.code}]: it went wrong.\n")
        assert cls.default_action() in err

    def test_an_action_of_its_own_wins_over_the_classs(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        failing(PortInUse("port 1 is in use.", action="Take port 2."))
        err = capsys.readouterr().err
        assert "Take port 2." in err
        assert PortInUse.default_action() not in err

    def test_an_action_that_the_sentence_holds_is_not_repeated(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        failing(PortInUse("Take port 2.", action="Take port 2."))
        assert capsys.readouterr().err.count("Take port 2.") == 1

    @pytest.mark.parametrize("form", [Format.JSON, Format.JSONL])
    def test_programs_read_the_error_on_stdout_in_one_line(
        self, form: Format, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert failing(Unreachable("nobody.", action="Start it."), form) == 2
        out, err = capsys.readouterr()
        assert json.loads(out) == {
            "schema_version": 2,
            "status": "error",
            "data": {"code": "unreachable", "message": "nobody.", "action": "Start it."},
        }
        assert out.count("\n") == 1
        assert "error [unreachable]" in err

    def test_a_defect_is_one_sentence_with_code_5_and_a_file_to_report(
        self, capsys: pytest.CaptureFixture[str], state: Path
    ) -> None:
        assert failing(ZeroDivisionError("oops"), Format.JSON) == 5
        out, err = capsys.readouterr()
        told = json.loads(out)["data"]
        assert told["code"] == "internal"
        assert told["message"].startswith("ZeroDivisionError: oops (terminal.py:")
        assert "Traceback" not in out + err
        (kept,) = (state / "fcil" / "defects").iterdir()
        assert told["action"].endswith(f"Report it, with this file, which has the details: {kept}")
        assert "Traceback" in kept.read_text()
        assert "ZeroDivisionError: oops" in kept.read_text()
        assert kept.stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize(
        ("module", "extra"),
        [("jinja2.loaders", "server"), ("prometheus_client", "server"), ("pandas", "lab")],
    )
    def test_a_package_of_an_extra_that_is_not_installed_is_no_defect(
        self, module: str, extra: str, capsys: pytest.CaptureFixture[str], state: Path
    ) -> None:
        lacking = ModuleNotFoundError(f"No module named {module!r}", name=module)
        assert failing(lacking) == 4
        err = capsys.readouterr().err
        assert err.startswith("error [usage]: this command needs a package that is not installed")
        assert f"pip install 'fcil[{extra}]'" in err
        assert not (state / "fcil").exists()

    @pytest.mark.parametrize("module", ["fcil_server.forgotten", "no_such_package", None])
    def test_a_module_of_no_extra_is_a_defect(self, module: str | None, state: Path) -> None:
        assert failing(ModuleNotFoundError("No module", name=module)) == 5
        assert (state / "fcil" / "defects").is_dir()

    def test_a_defect_is_told_where_no_file_can_be_written(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: Path
    ) -> None:
        monkeypatch.setattr(defects, "_folders", lambda: [state / "a" / "b", Path("/dev/null/x")])
        assert failing(ZeroDivisionError("oops")) == 5
        assert "Report it, with this line and the command." in capsys.readouterr().err

    def test_only_the_newest_defects_are_kept(self, state: Path) -> None:
        kept = [defects.keep_details(ValueError(str(n))) for n in range(defects.KEPT + 3)]
        left = set((state / "fcil" / "defects").iterdir())
        assert len(left) == defects.KEPT
        assert kept[-1] in left

    def test_a_question_that_nobody_answers_with_yes_is_no_defect(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert failing(typer.Abort()) == 4
        assert "Nothing was done." in capsys.readouterr().err

    def test_ctrl_c_is_silent(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert failing(KeyboardInterrupt()) == 130
        assert capsys.readouterr() == ("", "")

    def test_a_reader_that_closed_the_pipe_is_no_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert failing(BrokenPipeError()) == 0
        assert capsys.readouterr() == ("", "")

    def test_an_exit_inside_keeps_its_code(self) -> None:
        assert failing(SystemExit(7)) == 7

    def test_the_cause_is_not_shown_for_a_named_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        error = DataError("no images.")
        error.__cause__ = OSError("secret path")
        failing(error)
        assert "secret path" not in capsys.readouterr().err


class TestLines:
    def test_a_line_has_its_time_level_and_text_on_stderr(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = Lines()
        lines(0.0, "info", "connected")
        lines(0.0, "warning", "[bold]not markup[/bold] " + "x" * 300)
        lines(0.0, "error", "lost")
        out, err = capsys.readouterr()
        first, second, third = err.splitlines()
        assert out == ""
        assert first.endswith(" connected")
        assert "warning: [bold]not markup[/bold] " + "x" * 300 in second, "neither eaten nor cut"
        assert third.endswith("error: lost")
        assert first[2] == first[5] == ":"

    def test_an_unknown_level_is_shown_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        Lines()(0.0, "note", "x")
        assert "note: x" in capsys.readouterr().err


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[2Jcleared", "a\nb", "a\rb", "\x9b31m", "tab\tbed", "\u202egnp.exe", "\x00", "\u2028"],
)
def test_text_of_a_peer_cannot_command_the_terminal(hostile: str) -> None:
    clean = printable(hostile)
    assert clean.isprintable() or "\N{REPLACEMENT CHARACTER}" in clean
    assert not set(clean) & set("\x1b\n\r\x9b\t\u202e\x00\u2028")
    assert len(clean) == len(hostile)


def test_ordinary_text_stays_as_it_is() -> None:
    assert printable("Käse, 猫 and 🐕") == "Käse, 猫 and 🐕"


# --- the net around a whole command line ------------------------------------------------------

app = typer.Typer()


def breaking(value: str) -> str:
    if value == "fails":
        raise ZeroDivisionError(value)
    return value


@app.command()
def look(
    number: int,
    word: Annotated[str, typer.Option(callback=breaking)] = "",
    json_flag: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    if number < 0:
        raise LookupError("below zero")


@app.command()
def other() -> None:
    pass


def ends(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line with these arguments and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["fcil-test", *arguments])
    with pytest.raises(SystemExit) as stop:
        run_app(app, "fcil-test")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_command_that_does_its_work_ends_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(monkeypatch, "look", "1") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("look", "1", "--word", "fails"), "ZeroDivisionError: fails (terminal.py:"),
        (("look", "--json", "--", "-1"), "LookupError: below zero (terminal.py:"),
    ],
    ids=["while the arguments are read", "in the command"],
)
def test_a_defect_anywhere_ends_as_a_sentence_with_code_5(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: Path,
) -> None:
    assert ends(monkeypatch, *arguments) == 5
    out, err = capsys.readouterr()
    assert err.startswith(f"error [internal]: {said}")
    assert "Traceback" not in err
    assert bool(out) is ("--json" in arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("look",), "Missing argument 'number'."),
        (("look", "one"), "Invalid value for 'number'"),
        (("look", "1", "--wrd", "x"), "No such option: --wrd"),
        (("lok",), "No such command 'lok'."),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",), ("--format", "jsonl"), ("--format=json",)])
def test_arguments_that_are_refused_end_with_code_4_in_the_form_asked_for(
    arguments: tuple[str, ...],
    said: str,
    form: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ends(monkeypatch, *arguments, *form) == 4
    out, err = capsys.readouterr()
    assert err.startswith("error [usage]: ")
    if form[:1] == ("--json",) or not form:  # the other two are options that it has not
        assert said in err
    if form:
        told = json.loads(out)
        assert (told["status"], told["data"]["code"]) == ("error", "usage")
        what = "commands: fcil-test" if arguments == ("lok",) else "options: fcil-test look"
        assert told["data"]["action"] == f"List the {what} --help"
    else:
        assert out == ""


@pytest.mark.parametrize("name", ["fcil_server.cli.main", "fcil_client.cli.main"])
def test_both_command_lines_tell_their_version(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fcil", "--version"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(name).main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fcil {version('fcil')}\n"


def test_a_command_to_copy_has_its_words_in_quotes():
    assert command("x", "--data", Path("a b"), "FILE") == "x --data 'a b' FILE"
    assert command("x", "\udce9\n") == "x '��'"
