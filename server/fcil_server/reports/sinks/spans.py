"""A closed round as spans of a trace, and the rounds of notes, from the ledger's rows. Pure.

A round that is exported again gets the same ids. Spans hold ids, counts and sizes, and no name of a
client or a class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fcil_protocol.ids import RoundKey
from fcil_protocol.process.round_spans import (
    TraceSpan,
    Value,
    client_span_id,
    round_span_id,
    span_id,
    trace_id,
)
from fcil_server.ledger.enums import Answer, Outcome, UpdateStatus
from fcil_server.ledger.rows import AnswerRow, Event, RoundRow, UpdateRow

_AFTER_COLLECT = ("aggregate", "save", "evaluate")  # phases, in their order
_FAULTS = (Answer.LOST, Answer.STRAGGLER)
# Codes of notes about a round that has just been closed (`rounds.closing`).
_AFTERWARDS = ("excluded", "far_apart", "pace", "too_few_updates", "void")


def of_round(
    row: RoundRow, updates: Sequence[UpdateRow], answers: Sequence[AnswerRow]
) -> list[TraceSpan]:
    """Return the spans of a closed round: itself first, its phases, and a span for each client.

    Phases are placed from the end: after a restart of the server they say how long they took in
    its last start, and collecting lasted from the opening.

    Args:
        row: the round, closed.
        updates: its updates.
        answers: of the clients without one.
    """
    assert row.closed_at is not None, "only closed rounds are exported"
    trace = trace_id(row.key)
    root = round_span_id(trace)
    counted = sum(u.status is UpdateStatus.COUNTED for u in updates)
    attributes: dict[str, Value] = {
        "fcil.run": row.run,
        "fcil.task": row.task,
        "fcil.kind": row.kind,
        "fcil.round": row.round,
        "fcil.seq": row.seq,
        "fcil.outcome": row.outcome.value if row.outcome else "",
        "fcil.closed_by": row.why,
        "fcil.asked": len(row.asked),
        "fcil.updates": len(updates),
        "fcil.counted": counted,
        "fcil.reopened": row.reopened,
    }
    fault = "" if row.outcome is Outcome.DONE else str(attributes["fcil.outcome"])
    spans = [TraceSpan(trace, root, None, "round", row.opened_at, row.closed_at, attributes, fault)]
    spans += _phases(row, trace, root)
    spans += (_update(row, update, trace, root) for update in updates)
    spans += (_answer(row, answer, trace, root) for answer in answers)
    return spans


def rounds_of(notes: Sequence[Event], rounds: Sequence[RoundRow]) -> list[RoundKey | None]:
    """Return the round of each note: the one that was open when it was made, or has just closed.

    Args:
        notes: of one run.
        rounds: of the same run in their order, all that were open during the notes.
    """
    opened, found = [row.opened_at for row in rounds], list[RoundKey | None]()
    for note in notes:
        number = bisect_right(opened, note.at)
        row = rounds[number - 1] if number else None
        if row is not None and row.closed_at is not None and note.at > row.closed_at:
            row = row if note.code in _AFTERWARDS else None
        found.append(None if row is None else row.key)
    return found


def _phases(row: RoundRow, trace: bytes, root: bytes) -> Iterator[TraceSpan]:
    assert row.closed_at is not None
    ends, found = row.closed_at, []
    for name in reversed(_AFTER_COLLECT):
        seconds = row.phases.get(f"{name}_s")
        if seconds is not None:
            began = max(row.opened_at, ends - seconds)
            found.append(TraceSpan(trace, span_id(trace, name), root, name, began, ends, {}))
            ends = began
    yield TraceSpan(trace, span_id(trace, "collect"), root, "collect", row.opened_at, ends, {})
    yield from reversed(found)


def _update(row: RoundRow, update: UpdateRow, trace: bytes, root: bytes) -> TraceSpan:
    attributes: dict[str, Value] = {
        "fcil.client": update.client,
        "fcil.update": update.update_id,
        "fcil.status": update.status.value,
        "fcil.samples": update.samples,
        "fcil.tensor_bytes": update.tensor_bytes,
        "fcil.sealed_bytes": update.sealed_bytes,
    }
    fault = "excluded" if update.status is UpdateStatus.EXCLUDED else ""
    name = client_span_id(trace, update.client)
    ended = max(row.opened_at, update.accepted_at)
    return TraceSpan(trace, name, root, "client", row.opened_at, ended, attributes, fault)


def _answer(row: RoundRow, answer: AnswerRow, trace: bytes, root: bytes) -> TraceSpan:
    attributes: dict[str, Value] = {
        "fcil.client": answer.client,
        "fcil.status": answer.answer.value,
    }
    fault = answer.answer.value if answer.answer in _FAULTS else ""
    name = client_span_id(trace, answer.client)
    ended = max(row.opened_at, answer.at)
    return TraceSpan(trace, name, root, "client", row.opened_at, ended, attributes, fault)
