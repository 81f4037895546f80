"""A round as spans: who, when and how long, with ids that any program can derive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fcil_protocol.ids import ClientId, RoundKey, RunId, UpdateId
from fcil_protocol.process.round_spans import TraceSpan
from fcil_server.ledger.enums import Answer, Outcome, UpdateStatus
from fcil_server.ledger.rows import AnswerRow, Event, RoundRow, UpdateRow
from fcil_server.reports.sinks import spans

RUN = RunId("r20260101-000000-0000")
ROW = RoundRow(
    run=RUN, task=1, kind="train", round=2, seq=7, opened_at=100.0, remaining_s=None,
    asked=(ClientId("a"), ClientId("b"), ClientId("c")), reopened=0, closed_at=110.0,
    outcome=Outcome.DONE, base_state=3, new_state=4,
    phases={"collect_s": 6.0, "aggregate_s": 2.5, "save_s": 0.5}, metrics={}, why="answered",
)  # fmt: skip


def update(client: str, at: float, status: UpdateStatus = UpdateStatus.COUNTED) -> UpdateRow:
    return UpdateRow(
        run=RUN, client=ClientId(client), task=1, kind="train", round=2,
        update_id=UpdateId(f"u{client}"), accepted_at=at, samples=5, tensor_bytes=100,
        sealed_bytes=120, status=status, reason="too large: cat", train_loss=None,
        train_accuracy=None,
    )  # fmt: skip


def answer(client: str, at: float, what: Answer) -> AnswerRow:
    return AnswerRow(RUN, 1, "train", 2, ClientId(client), what, "on battery", at)


def by_name(found: list[TraceSpan]) -> dict[str, list[tuple[float, float]]]:
    names: dict[str, list[tuple[float, float]]] = {}
    for span in found:
        names.setdefault(span.name, []).append((span.began, span.ended))
    return names


def test_phases_fill_the_round_and_each_client_has_its_time() -> None:
    found = spans.of_round(
        ROW, [update("a", 103.0), update("b", 107.0)], [answer("c", 101.0, Answer.DECLINED)]
    )
    assert by_name(found) == {
        "round": [(100.0, 110.0)],
        "collect": [(100.0, 107.0)],
        "aggregate": [(107.0, 109.5)],
        "save": [(109.5, 110.0)],
        "client": [(100.0, 103.0), (100.0, 107.0), (100.0, 101.0)],
    }
    root, *parts = found
    assert root.parent is None
    assert {span.parent for span in parts} == {root.id}
    assert len({span.id for span in found}) == len(found)
    assert not any(span.fault for span in found)
    assert root.attributes["fcil.counted"] == 2


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({}, {"collect": [(100.0, 110.0)]}),
        # After a restart the server knows how long it collected since, not in all.
        ({"collect_s": 0.1, "aggregate_s": 4.0}, {"collect": [(100.0, 106.0)], "aggregate": [(106.0, 110.0)]}),
        # A clock that was set in between makes no span that ends before it begins.
        ({"aggregate_s": 50.0, "save_s": 1.0}, {"collect": [(100.0, 100.0)], "aggregate": [(100.0, 109.0)], "save": [(109.0, 110.0)]}),
        ({"evaluate_s": 3.0}, {"collect": [(100.0, 107.0)], "evaluate": [(107.0, 110.0)]}),
    ],
)  # fmt: skip
def test_phases_are_placed_from_the_end(phases: Any, expected: Any) -> None:
    found = by_name(spans.of_round(replace(ROW, phases=phases), [], []))
    found.pop("round")
    assert found == expected


def test_what_went_wrong_is_marked_by_a_code_and_nothing_else() -> None:
    found = spans.of_round(
        replace(ROW, outcome=Outcome.SHORT),
        [update("a", 99.0, UpdateStatus.EXCLUDED)],
        [answer("b", 110.0, Answer.LOST), answer("c", 110.0, Answer.DECLINED)],
    )
    assert [s.fault for s in found if s.name in ("round", "client")] == [
        "short", "excluded", "lost", "",
    ]  # fmt: skip
    assert "cat" not in str(found), "a reason may name a class"
    assert "battery" not in str(found)
    assert all(s.ended >= s.began for s in found)


def test_ids_follow_from_the_key_alone() -> None:
    one = spans.of_round(ROW, [update("a", 103.0)], [])
    again = spans.of_round(ROW, [update("a", 103.0)], [])
    assert one == again
    # SHA-256 of "fcil/trace/1 r20260101-000000-0000 1 train 2", computed apart.
    assert one[0].trace == spans.trace_id(RoundKey(RUN, 1, "train", 2))
    others = [
        RoundKey(RUN, 1, "train", 3),
        RoundKey(RUN, 2, "train", 2),
        RoundKey(RUN, 1, "finish", 2),
        RoundKey(RunId("r20260101-000000-0001"), 1, "train", 2),
    ]
    assert len({spans.trace_id(key) for key in (ROW.key, *others)}) == 5
    assert len(one[0].trace) == 16
    assert {len(span.id) for span in one} == {8}


@pytest.mark.parametrize(
    ("at", "code", "number"),
    [
        (99.0, "task_opened", None),
        (100.0, "round_opened", 2),
        (110.0, "update", 2),
        (111.0, "connected", None),
        (111.0, "excluded", 2),  # told after the commit that closes the round
        (120.0, "update", 3),
        (500.0, "update", 3),  # it is still open
    ],
)
def test_a_note_belongs_to_the_round_that_is_open_or_whose_closing_it_tells(at, code, number):
    rounds = [ROW, replace(ROW, round=3, seq=8, opened_at=120.0, closed_at=None)]
    note = Event(1, at, "info", RUN, None, code, "of bob")
    (key,) = spans.rounds_of([note], rounds)
    assert (None if key is None else key.round) == number
