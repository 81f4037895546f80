"""The metrics against numbers computed by hand from docs/methods/README.md, "Measures"."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from fcil_server.ledger.enums import CENTRAL
from fcil_server.ledger.rows import Evaluation
from fcil_server.reports.results import metrics
from fcil_server.reports.results.metrics import compute, forgetting
from sample_run import RUN


def rows(table: dict[tuple[int, str], dict[int, tuple[int, int]]]) -> list[Evaluation]:
    """(task, client) -> class -> (correct, total)."""
    return [
        Evaluation(RUN, task, client, class_id, *counts)
        for (task, client), classes in table.items()
        for class_id, counts in classes.items()
    ]


TASKS = [(0, 1), (2,), (3,)]
# Client b has class 0 only, and is away at the last evaluation.
TABLE = {
    (0, "a"): {0: (8, 10), 1: (5, 10)},
    (0, "b"): {0: (20, 20)},
    (1, "a"): {0: (9, 10), 1: (8, 10), 2: (9, 10)},
    (1, "b"): {0: (20, 20)},
    (2, "a"): {0: (7, 10), 1: (6, 10), 2: (5, 10), 3: (10, 10)},
}


def close(expected: object) -> object:
    return pytest.approx(expected, abs=1e-9)


class TestByHand:
    m = compute(rows(TABLE), TASKS)

    def test_pooled_matrix(self) -> None:
        """33/40; 37/40, 9/10; 13/20, 5/10, 10/10."""
        assert self.m.matrix == ((82.5,), (92.5, 90.0), (65.0, 50.0, 100.0))

    def test_macro_matrix(self) -> None:
        """Class 0 has 28/30 and 29/30 of both clients, class 1 has 5/10, 8/10 of one."""
        first = (28 / 30 + 5 / 10) / 2 * 100
        second = (29 / 30 + 8 / 10) / 2 * 100
        assert self.m.matrix_macro[0] == close((first,))
        assert self.m.matrix_macro[1] == close((second, 90.0))
        assert self.m.matrix_macro[2] == close((65.0, 50.0, 100.0))
        assert self.m.macro[2] == close((70 + 60 + 50 + 100) / 4)

    def test_task_mean_and_sample_weighted_differ(self) -> None:
        assert self.m.task_mean == close((82.5, 91.25, 215 / 3))
        assert self.m.sample_weighted == close((82.5, 92.0, 70.0))

    def test_faa_is_the_last_accuracy_and_aia_the_mean(self) -> None:
        assert self.m.faa == self.m.task_mean[-1] == close(215 / 3)
        assert self.m.aia == close((82.5 + 91.25 + 215 / 3) / 3)
        assert self.m.faa_sample_weighted == 70.0
        assert self.m.aia_sample_weighted == close(81.5)

    def test_forgetting_by_each_definition(self) -> None:
        """Task 0: best 92.5, own 82.5, last 65. Task 1: 90, last 50."""
        assert self.m.forgetting == close(
            {"max": (27.5 + 40) / 2, "diag": (17.5 + 40) / 2, "fedmammoth": (17.5 + 40) / 3}
        )

    def test_matched_forgetting_leaves_out_who_is_missing_in_the_end(self) -> None:
        """Client a alone: task 0 was 13/20, then 17/20, is 13/20; task 1 was 90, is 50."""
        assert self.m.forgetting_matched == close(
            {"max": (20 + 40) / 2, "diag": (0 + 40) / 2, "fedmammoth": 40 / 3}
        )

    def test_coverage_and_counts(self) -> None:
        assert self.m.coverage == (1.0, 1.0, 1.0)
        assert self.m.test_images == (40, 50, 40)
        assert self.m.evaluators == (2, 2, 1)

    def test_the_order_of_rows_changes_nothing(self) -> None:
        assert compute(reversed(rows(TABLE)), TASKS) == self.m


class TestEdges:
    def test_no_evaluation_is_none(self) -> None:
        assert compute([], TASKS) is None
        assert compute([], []) is None

    def test_one_task_forgets_nothing(self) -> None:
        m = compute(rows({(0, "a"): {0: (3, 4)}}), [(0, 1)])
        assert (m.faa, m.aia) == (75.0, 75.0)
        assert m.forgetting == {"max": 0.0, "diag": 0.0, "fedmammoth": 0.0}
        assert m.forgetting_matched == m.forgetting
        assert m.coverage == (0.5,)

    def test_improvement_stays_negative(self) -> None:
        table = {(0, "a"): {0: (5, 10)}, (1, "a"): {0: (7, 10), 1: (10, 10)}}
        m = compute(rows(table), [(0,), (1,)])
        assert m.forgetting == close({"max": -20.0, "diag": -20.0, "fedmammoth": -10.0})

    def test_equal_clients_make_matched_and_plain_forgetting_equal(self) -> None:
        table = {
            (t, c): {i: (10 - 2 * (t - i), 10) for i in range(t + 1)}
            for t in range(4)
            for c in "ab"
        }
        m = compute(rows(table), [(0,), (1,), (2,), (3,)])
        assert m.forgetting_matched == m.forgetting
        assert m.forgetting["max"] == close((60 + 40 + 20) / 3)

    def test_what_nobody_can_test_is_null_and_never_nan(self) -> None:
        """Task 1 has no test images at all: its column is undefined, the means use the rest."""
        table = {(0, "a"): {0: (5, 10)}, (1, "a"): {0: (4, 10)}, (2, "a"): {0: (4, 10), 2: (8, 10)}}
        m = compute(rows(table), [(0,), (1,), (2,)])
        assert m.matrix == ((50.0,), (40.0, None), (40.0, None, 80.0))
        assert m.task_mean == (50.0, 40.0, 60.0)
        assert m.forgetting == close({"max": 10.0, "diag": 10.0, "fedmammoth": 5.0})
        assert m.coverage == (1.0, 0.5, close(2 / 3))
        text = json.dumps(m.to_json(), allow_nan=False)
        assert "null" in text

    def test_an_evaluation_that_was_skipped_leaves_aia_undefined(self) -> None:
        m = compute(rows({(1, "a"): {0: (4, 10), 1: (8, 10)}}), [(0,), (1,)])
        assert m.matrix == ((None,), (40.0, 80.0))
        assert (m.faa, m.aia) == (60.0, None)
        assert m.forgetting == {"max": None, "diag": None, "fedmammoth": None}

    def test_nobody_in_both_evaluations_leaves_matched_forgetting_undefined(self) -> None:
        table = {(0, "a"): {0: (5, 10)}, (1, "b"): {0: (4, 10), 1: (8, 10)}}
        m = compute(rows(table), [(0,), (1,)])
        assert m.forgetting["max"] == close(10.0)
        assert m.forgetting_matched["max"] is None

    def test_zero_images_are_no_evaluation_of_a_class(self) -> None:
        m = compute(rows({(0, "a"): {0: (5, 10), 1: (0, 0)}, (0, "b"): {0: (0, 0)}}), [(0, 1)])
        assert (m.matrix, m.matrix_macro, m.coverage) == (((50.0,),), ((50.0,),), (0.5,))
        assert m.evaluators == (1,)

    def test_classes_of_later_or_unknown_tasks_do_not_count(self) -> None:
        table = {(0, "a"): {0: (5, 10), 1: (10, 10), 99: (10, 10)}, (7, "a"): {0: (1, 1)}}
        m = compute(rows(table), [(0,), (1,)])
        assert (m.tasks, m.matrix, m.sample_weighted) == (1, ((50.0,),), (50.0,))

    def test_the_servers_folder_is_apart(self) -> None:
        table = {(0, "a"): {0: (5, 10)}, (0, CENTRAL): {0: (100, 100)}}
        assert metrics.pooled(rows(table), [(0,)]).faa == 50.0
        assert metrics.central(rows(table), [(0,)]).faa == 100.0
        only = rows({(0, CENTRAL): {0: (1, 2)}})
        assert metrics.pooled(only, [(0,)]) is None

    def test_class_ids_need_not_be_in_order(self) -> None:
        table = {(0, "a"): {7: (5, 10)}, (1, "a"): {7: (2, 10), 3: (9, 10)}}
        m = compute(rows(table), [(7,), (3,)])
        assert m.matrix == ((50.0,), (20.0, 90.0))


def test_forgetting_takes_the_largest_drop_before_the_last_task() -> None:
    """The last row's own drop, zero, is no candidate: a task that only improved is negative."""
    S = np.array([[10.0, np.nan, np.nan], [20.0, 50.0, np.nan], [30.0, 60.0, 70.0]])
    found = forgetting(S - S[-1])
    assert found["max"] == close((-10 - 10) / 2)
    assert found["diag"] == close((-20 - 10) / 2)


def test_memory_grows_with_the_rows_of_a_thousand_clients_and_not_with_their_classes() -> None:
    tasks = [tuple(range(10 * t, 10 * t + 10)) for t in range(20)]
    table = {
        (task, f"c{k}"): dict.fromkeys(tasks[task][:1], (1, 2))
        for task in range(20)
        for k in range(300)
    }
    given = rows(table)
    tracemalloc.start()
    compute(given, tasks)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300 * 20 * 200 * 8  # one count for each client, task and class
