"""Which state can be promoted, and what of it a stopped server's ledger remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcil_protocol.errors import CorruptFile, UsageError
from fcil_server.aggregation.store import states_folder
from fcil_server.runs.fork import fork
from fcil_server.runs.promotion import choose_promoted, describe_promoted, promote_offline
from server.storage_kit import Built, build, flip


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "fed")


def promote(built: Built, state: str) -> dict[str, object]:
    with built.ledger() as ledger:
        return promote_offline(ledger, built.directory, state, "uid 7")


def promoted(built: Built) -> list[int | None]:
    with built.ledger() as ledger:
        return [row.promoted for row in ledger.runs.all()]


def test_a_state_is_promoted_and_taken_back_and_the_audit_log_says_so(built: Built) -> None:
    assert promoted(built) == [None]
    with built.ledger() as ledger:
        assert not ledger.runs.had_promotion(built.run)
    told = promote(built, "2")
    assert told == {"run": built.run, "state": 2, "task": 0, "promoted": True, "clients": None}
    assert describe_promoted(told).startswith("Clients use the model of state 2, of task 0, once")
    assert promoted(built) == [2]
    told = promote(built, "last")
    assert told["promoted"] is False
    assert describe_promoted(told).startswith("Clients use the newest model from now on")
    assert promoted(built) == [None]
    with built.ledger() as ledger:
        assert ledger.runs.had_promotion(built.run)
        acts = [(row.actor, row.detail) for row in ledger.audit.newest() if row.action == "promote"]
    assert acts == [
        ("uid 7", f"state 2 of {built.run}"),
        ("uid 7", f"the newest state of {built.run}"),
    ]


@pytest.mark.parametrize("before", [None, 1, -1])
def test_a_failed_promotion_leaves_what_was_before(built: Built, before: int | None) -> None:
    with built.ledger() as ledger:
        if before is not None:
            ledger.runs.promote(built.run, None if before < 0 else before)
        undo = ledger.runs.promote(built.run, 2)
        ledger.runs.undo_promote(built.run, undo)
        assert ledger.runs.had_promotion(built.run) is (before == -1)
    assert promoted(built) == [before if before == 1 else None]


def test_the_best_is_promoted_by_its_number_which_stays(built: Built) -> None:
    with built.ledger() as ledger:
        best = ledger.evaluations.best(built.run)
    assert best is not None
    assert promote(built, "best")["state"] == best.state
    assert promoted(built) == [best.state]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("0", "state 0 of run .* has learned nothing yet"),
        ("99", "no file of state 99; kept are the states"),
        ("first", "unknown state 'first'; expected best, last or a number"),
        ("", "unknown state ''"),
        ("last", "no state is promoted.*run promote best"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(built: Built, state: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        promote(built, state)
    assert promoted(built) == [None]


def test_a_damaged_state_is_refused_and_the_one_before_stays(built: Built) -> None:
    promote(built, "1")
    flip(states_folder(built.directory, built.run) / "000002.safetensors")
    with pytest.raises(CorruptFile):
        promote(built, "2")
    assert promoted(built) == [1]


def test_a_fork_begins_without_a_promotion(built: Built) -> None:
    promote(built, "2")
    with built.ledger() as ledger:
        fork(ledger, built.directory, built.run, 2, actor="me", action="rollback")
    assert promoted(built) == [2, None]


def test_the_opening_of_a_later_task_has_what_was_learned_before(built: Built) -> None:
    with built.ledger() as ledger:
        rows = [s for s in ledger.states.all(built.run) if s.kind == "open" and s.task > 0]
        run = ledger.runs.named(None)
        for row in rows:
            assert choose_promoted(ledger, built.directory, run, str(row.state)) == row
    assert rows
