"""Notes and refusals on their way to terminal and ledger: together, bounded, and all counted."""

import asyncio

import pytest

from fcil_protocol.errors import WireError
from fcil_protocol.ids import ClientId
from fcil_server.daemon.journal import BATCH_S, Journal
from fcil_server.daemon.note_budget import BURST, MINUTE_S
from fcil_server.ledger.databases.sqlite import log_path
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

ANN, BOB = ClientId("a" * 26), ClientId("b" * 26)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / LEDGER_NAME) as made:
        made.database.checkpoint_by_hand()
        yield made


class Desk:
    """A journal with a clock of its own; `said` is what the terminal shows."""

    def __init__(self, ledger):
        self.clock, self.said = Clock(), []
        self.ledger = ledger
        self.journal = Journal(ledger, lambda note: self.said.append(note.text), self.clock)

    def later(self, seconds):
        self.clock.now += seconds
        self.journal.write()

    def texts(self):
        return [e.text for e in self.ledger.events.newest(limit=100_000)]


def play(ledger, story):
    """Run ``async story(desk)`` in a loop, where notes are committed together."""

    async def main():
        await story(Desk(ledger))

    asyncio.run(main())


def test_many_notes_are_one_commit_a_second_later_at_most(ledger):
    async def story(desk):
        desk.journal.note("info", "first", "nobody waits for the first")
        assert desk.texts() == ["nobody waits for the first"]
        before = ledger.database._commits
        for number in range(1000):
            desk.journal.note("info", "test", f"{number}")
        assert len(desk.said) == 1001, "the terminal hears at once"
        assert ledger.database._commits == before
        timer = desk.journal._timer
        assert 0 < timer.when() - asyncio.get_running_loop().time() <= BATCH_S
        desk.later(BATCH_S)
        assert ledger.database._commits == before + 1
        assert len(desk.texts()) == 1001

    play(ledger, story)


def test_outside_a_loop_a_note_is_committed_at_once(ledger):
    desk = Desk(ledger)
    for number in range(3):
        desk.journal.note("info", "test", f"{number}")
        assert desk.texts()[-1] == f"{number}"


def test_one_clients_flood_is_a_few_lines_and_a_count(ledger):
    async def story(desk):
        for number in range(18_478):
            desk.journal.note("info", "declined", f"ann: {number} {'x' * 2000}", ANN)
        desk.journal.note("info", "declined", "bob: no data", BOB)
        desk.later(MINUTE_S)
        assert len(desk.said) == BURST + 2
        assert desk.said[-1].endswith(f"(and {18_478 - BURST - 1:,} more like it)")
        assert "bob: no data" in desk.said
        assert len(desk.texts()) == len(desk.said)
        assert log_path(ledger.path).stat().st_size < 1 << 20

    play(ledger, story)


def test_refusals_are_all_counted_and_few_have_a_row(ledger):
    async def story(desk):
        for _ in range(10_240):
            desk.journal.refusal(ANN, WireError("no message."))
        desk.later(MINUTE_S)
        assert desk.journal.refused == 10_240
        assert ledger.refusals.counts() == {"malformed": 10_240}
        rows = ledger.refusals.newest(limit=1000)
        assert len(rows) == BURST + 1
        assert f"{10_240 - BURST - 1:,} more like it" in rows[0].reason

    play(ledger, story)


def test_counts_that_the_disk_refused_are_written_with_the_next(ledger, monkeypatch):
    async def story(desk):
        with monkeypatch.context() as broken:
            broken.setattr(ledger.events, "add_all", full)
            for _ in range(5):
                desk.journal.refusal(ANN, WireError("no message."))
            desk.later(BATCH_S)
        desk.journal.refusal(ANN, WireError("no message."))
        desk.later(BATCH_S)
        assert ledger.refusals.counts() == {"malformed": 6}

    def full(*_):
        raise WireError("any error of ours")

    play(ledger, story)


def test_what_an_operator_does_to_a_flooding_client_is_said_all_the_same(ledger):
    async def story(desk):
        for _ in range(1000):
            desk.journal.note("warning", "malformed", "ann: no message.", ANN)
        desk.journal.note("warning", "revoked", "ann was removed from the allow list", ANN)
        desk.journal.note("info", "update", "update from ann", ANN)
        assert desk.said[-2:] == ["ann was removed from the allow list", "update from ann"]

    play(ledger, story)


def test_at_the_end_everything_is_said(ledger):
    async def story(desk):
        for number in range(500):
            desk.journal.note("info", "declined", f"ann: {number}", ANN)
        desk.journal.write(everything=True)
        assert desk.texts()[-1] == f"ann: 499 (and {500 - BURST - 1} more like it)"
        assert desk.journal._timer is None

    play(ledger, story)


def test_an_erased_name_is_in_no_line_that_is_still_to_come(ledger):
    async def story(desk):
        for number in range(BURST + 9):
            desk.journal.note("info", "declined", f"ann: {number}", ANN)
            desk.journal.refusal(ANN, WireError(f"ann sent {number}"))
        desk.journal.write()  # as before an erasure
        desk.journal.rename("ann", "erased-1")
        desk.later(MINUTE_S)
        assert desk.texts()[-1].startswith("erased-1: 68 (and 8 more")
        assert "ann" not in ledger.refusals.newest(limit=1)[0].reason

    play(ledger, story)


@pytest.mark.parametrize("heard", [True, False])
def test_a_code_that_is_always_said_in_full_has_a_budget_where_a_client_chose_it(ledger, heard):
    """A goodbye has a code of its sender's choice."""

    async def story(desk):
        for number in range(1000):
            desk.journal.note("warning", "revoked", f"{number}", ANN, heard=heard)
        assert len(desk.said) == (BURST if heard else 1000)

    play(ledger, story)
