"""The accuracy matrix on a terminal: every number is there, whatever fits."""

from __future__ import annotations

import io
import re
from collections import Counter

import pytest
from rich.console import Console

from fcil_protocol.process.tables import show
from fcil_server.cli.show_report import matrix_tables
from fcil_server.reports.results.metrics import Metrics

WIDTHS = [20, 40, 80, 10_000]


def matrix(tasks: int) -> Metrics:
    """Return a matrix in which each task has an accuracy of its own, which it keeps."""
    rows = tuple(tuple(float(50 + i) for i in range(t + 1)) for t in range(tasks))
    mean = tuple(sum(row) / len(row) for row in rows)
    return Metrics(
        tasks, rows, rows, mean, mean, mean, mean[-1], mean[-1], mean[0], mean[0],
        {}, {}, (1.0,) * tasks, (100,) * tasks, (2,) * tasks,
    )  # fmt: skip


def printed(tasks: int, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False)
    for one in matrix_tables(matrix(tasks), out):
        show(out, one)
    return out.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("tasks", [1, 8, 20, 51])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_accuracy_is_printed_once_at_any_width(tasks: int, width: int) -> None:
    lines = [line for line in printed(tasks, width) if re.match(r"\W*task \d+ ", line)]
    cells = [re.findall(r"[\d.]+", line) for line in lines]
    whole = Counter(int(float(n)) for row in cells for n in row[1:] if not is_mean(row, n, cells))
    assert "…" not in "".join(lines)
    assert whole == Counter({50 + i: tasks - i for i in range(tasks)})


def is_mean(row: list[str], number: str, rows: list[list[str]]) -> bool:
    """Say whether a number is its row's mean: the last one of a row of the first table."""
    return number is row[-1] and rows.index(row) < len({r[0] for r in rows})


@pytest.mark.parametrize("width", WIDTHS[2:])
def test_no_line_of_many_tasks_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, printed(51, width))) <= width


def test_a_pipe_has_one_table_and_few_tasks_have_decimals() -> None:
    assert sum("after" in line for line in printed(51, 10_000)) == 1
    assert sum("after" in line for line in printed(51, 80)) == 4
    assert any("50.0" in line for line in printed(5, 80))
