"""What commands show as tables: nothing is cut, on a narrow terminal or in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fcil_protocol.process.tables import Column, console, show_table

NAME = "laboratory-machine:camera-of-the-third-floor-north-7"
WHY = "a refusal that takes rather many words to say what was expected and what was got"


def printed(width: int, *row: str, wraps: tuple[str, ...] = ("why",)) -> str:
    out = io.StringIO()
    titles = ("client", "state", "why")
    columns = [Column(title, i, wraps=title in wraps) for i, title in enumerate(titles)]
    show_table(Console(file=out, width=width, soft_wrap=True, markup=False), [row], columns)
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_name_is_whole_on_a_terminal_of_any_width(width: int) -> None:
    text = printed(width, NAME, "preparing", WHY)
    assert NAME in text
    assert "preparing" in text
    assert "…" not in text
    assert set(WHY.split()) <= set(text.split())


def test_a_word_that_is_longer_than_its_column_is_folded() -> None:
    text = printed(40, "a", "b", "x" * 90)
    assert text.count("x") == 90


def test_a_name_is_not_taken_for_markup() -> None:
    assert "[red]x[/red]" in printed(80, "[red]x[/red]", "", "")


def test_in_a_pipe_each_row_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = {"client": NAME, "why": WHY * 9}
    show_table(console(), [row], (Column("client"), Column("why", wraps=True)))
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][1:] == [
        f"{NAME}  {WHY * 9}"
    ]
