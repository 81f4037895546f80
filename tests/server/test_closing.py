"""How a round closes when updates turn out to be of no use, or their senders are revoked."""

import asyncio
from types import SimpleNamespace

import pytest

import sample_run
from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import DiskFull, InternalError, RunFailed, WorkerError
from fcil_protocol.ids import UpdateId
from fcil_protocol.payload import Payload
from fcil_server import closing, round_events
from fcil_server.aggregation import Aggregation
from fcil_server.config import Config
from fcil_server.config_sections import RoundSection
from fcil_server.ledger import Ledger
from fcil_server.ledger_rows import RoundKey
from fcil_server.ledger_words import Outcome, UpdateStatus
from fcil_server.plan import Step
from fcil_server.position import Position
from fcil_server.turns import Lag
from sample_run import ALICE, BOB, RUN, digest

TASK = TaskInfo(0, (0, 1), ())


class Spool:
    def __init__(self):
        self.held = set()

    def keys(self):
        return self.held

    def remove(self, keys):
        self.held -= set(keys)


class Scene:
    """A run whose aggregations answer what `results` says, round after round."""

    def __init__(self, path, monkeypatch, least=0):
        self.ledger = Ledger(path, clock=sample_run.Clock())
        sample_run.add_clients(self.ledger)
        sample_run.add_run(self.ledger)
        self.ledger.new_task(RUN, 0, [0, 1])
        self.notes, self.results, self.round = [], [], 0
        self.discarded, self.seen, self.told = [], [], []
        self.kept, self.kept_at_save = set(), []
        self.why = round_events.Why.ANSWERED
        self.meanwhile = self.while_saving = lambda: None
        monkeypatch.setattr(closing, "context", lambda *_: None)

        async def aggregate(_ctx, _state, updates):
            self.seen.append([u.client for u in updates])
            self.meanwhile()
            return self.results.pop(0)

        def save(*_):
            self.kept_at_save.append(sorted(self.kept))
            return digest("new")

        async def in_thread(function, *args):
            self.while_saving()  # as if the loop had its turn meanwhile
            return function(*args)

        monkeypatch.setattr(closing.asyncio, "to_thread", in_thread)

        self.kit = SimpleNamespace(
            run=RUN, config=Config(round=RoundSection(min_updates=least)),
            ledger=self.ledger, spool=Spool(), notify=lambda *n: self.notes.append(n),
            name_of=str, peers=SimpleNamespace(by_client=lambda _: SimpleNamespace()),
            send=lambda _, message: self.told.append(message),
            aggregation=SimpleNamespace(
                aggregate=aggregate, far_apart=[], keep=self.keep, keep_not=self.keep_not
            ),
            states=SimpleNamespace(discard_after=self.discarded.append, save=save, prune=lambda: None),
            classes=SimpleNamespace(names=dict), lag=Lag,
        )  # fmt: skip
        self.at = Position(round=SimpleNamespace(reasons={}), task=TASK, step=Step("train", 0, 9))
        self.closing = closing.Closing(self.kit, self.at)

    def keep(self, rows):
        self.kept |= {row.client for row in rows}

    def keep_not(self, rows):
        self.kept -= {row.client for row in rows}

    def play(self, state, excluded):
        """Let both clients send, and close the round with this result."""
        key = RoundKey(RUN, 0, "train", self.round)
        self.ledger.new_round(key, asked=(ALICE, BOB), base_state=0)
        for client in (ALICE, BOB):
            update = UpdateId(digest(f"{client}{self.round}"))
            with self.ledger.transaction():
                self.ledger.accept_update(
                    key, client, update_id=update, samples=5, tensor_bytes=1, sealed_bytes=1
                )
        self.results.append((state, excluded))
        answers = dict.fromkeys((ALICE, BOB), round_events.Answer.UPDATED)
        close = round_events.Close(round_events.Outcome.DONE, answers, self.why)
        self.round += 1
        asyncio.run(self.closing.close(TASK, Step("train", key.round, 9), close, 1.0))
        return key

    def closed(self, key):
        return next(r for r in self.ledger.rounds(RUN) if r.key == key)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    made = Scene(tmp_path / "ledger.sqlite", monkeypatch)
    yield made
    made.ledger.close()


BOTH = {ALICE: "aggregation failed on it", BOB: "aggregation failed on it"}


def test_it_is_closed_as_skipped_and_everybody_is_told_why(scene):
    key = scene.play(None, BOTH)
    row = scene.closed(key)
    assert (row.outcome, row.new_state) == (Outcome.SKIPPED, None)
    assert {u.status for u in scene.ledger.updates(key)} == {UpdateStatus.EXCLUDED}
    assert [n[:2] for n in scene.notes] == [("error", "excluded")] * 2
    verdict = scene.closing.verdict(ALICE)
    assert (verdict.counted, verdict.reason) == (False, "aggregation failed on it")


def test_three_in_a_row_end_the_run_after_the_third_is_closed(scene):
    scene.play(None, BOTH)
    scene.play(None, BOTH)
    with pytest.raises(RunFailed, match="no update of the last 3 rounds could be used"):
        scene.play(None, BOTH)
    assert [r.outcome for r in scene.ledger.rounds(RUN)] == [Outcome.SKIPPED] * 3


def test_a_good_round_in_between_begins_the_count_anew(scene):
    good = Payload({}, {})
    for state, excluded in ((None, BOTH), (None, BOTH), (good, {ALICE: "far out"}), (None, BOTH)):
        key = scene.play(state, excluded)
    assert scene.closed(key).outcome is Outcome.SKIPPED
    third = scene.ledger.rounds(RUN)[2]
    assert (third.outcome, third.new_state) == (Outcome.DONE, 0)


def aggregation(monkeypatch, *, works):
    """Return an aggregation that no update gets through, and whose worker works or does not."""
    made = object.__new__(Aggregation)
    made.tell = lambda _: None

    async def combine(*_):
        raise InternalError("division by zero")

    async def broadcast(*_):
        if not works:
            raise WorkerError("the server worker cannot be started.")

    monkeypatch.setattr(made, "_combine", combine)
    monkeypatch.setattr(made, "broadcast", broadcast)
    return made


def test_updates_are_blamed_only_if_the_worker_can_do_anything(monkeypatch):
    rows = [SimpleNamespace(client=ALICE), SimpleNamespace(client=BOB)]
    state, excluded = asyncio.run(aggregation(monkeypatch, works=True).aggregate(None, None, rows))
    assert state is None
    assert set(excluded) == {ALICE, BOB}
    assert "division by zero" in excluded[ALICE]
    with pytest.raises(WorkerError, match="cannot be started"):
        asyncio.run(aggregation(monkeypatch, works=False).aggregate(None, None, rows))


GOOD = Payload({}, {})


def revoke(scene, client):
    """Leave out what a client sent to the open round, as a revocation does."""
    key = RoundKey(RUN, 0, "train", scene.round - 1)
    scene.ledger.exclude_update(key, client, "revoked")


@pytest.mark.parametrize("moment", ["meanwhile", "while_saving"])
def test_who_is_revoked_while_a_state_is_made_is_not_in_it(scene, moment):
    def once():
        setattr(scene, moment, lambda: None)
        revoke(scene, BOB)

    setattr(scene, moment, once)
    scene.results.append((GOOD, {}))
    key = scene.play(GOOD, {})
    assert scene.seen == [[ALICE, BOB], [ALICE]]
    assert scene.discarded == [-1]
    row = scene.closed(key)
    assert (row.outcome, row.new_state) == (Outcome.DONE, 0)
    assert [u.client for u in scene.ledger.accepted(key)] == [ALICE]
    assert scene.kept_at_save[-1] == [ALICE]


def test_what_counts_is_kept_before_the_state_is_on_disk_and_nothing_else_is(scene):
    scene.play(GOOD, {ALICE: "far out"})
    assert scene.kept_at_save == [[BOB]]
    scene.kept.clear()
    scene.play(None, BOTH)
    assert not scene.kept


def test_a_round_whose_last_sender_is_revoked_meanwhile_leaves_the_state(scene):
    def both():
        scene.meanwhile = lambda: None
        revoke(scene, ALICE)
        revoke(scene, BOB)

    scene.meanwhile = both
    key = scene.play(GOOD, {})
    assert (scene.closed(key).outcome, scene.closed(key).new_state) == (Outcome.SKIPPED, None)


def test_clients_are_told_the_outcome_that_the_ledger_has(scene):
    scene.play(None, BOTH)
    assert {m.outcome for m in scene.told} == {"skipped"}
    scene.play(GOOD, {})
    assert scene.told[-1].outcome == "done"


def test_a_round_tells_how_late_the_loop_was_meanwhile(scene):
    scene.kit.lag = lambda: Lag(max_s=0.25, p99_s=0.01)
    key = scene.play(Payload({}, {}), {})
    told = scene.ledger.round(key).metrics
    assert told == {"loop_lag_max_s": 0.25, "loop_lag_p99_s": 0.01}


def test_nobody_hears_a_verdict_before_it_is_on_the_disk(scene):
    heard = []
    scene.play(GOOD, {})
    before = scene.closing.verdict(ALICE)

    def sync():
        heard.append(scene.closing.verdict(ALICE))  # a client that says Hello meanwhile

    scene.ledger.sync = sync
    scene.play(None, BOTH)
    assert heard == [before]
    assert before.counted
    assert not scene.closing.verdict(ALICE).counted


def test_a_disk_that_keeps_what_is_needed_no_more_ends_nothing(scene):
    def full():
        raise DiskFull("the disk is full.")

    scene.kit.states.prune = full
    scene.play(GOOD, {})
    scene.play(GOOD, {})
    assert [n[1] for n in scene.notes] == ["disk_full", "disk_full"]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A scene in which a state is made of two updates at least."""
    made = Scene(tmp_path / "ledger.sqlite", monkeypatch, least=2)
    yield made
    made.ledger.close()


def test_a_round_left_with_too_few_updates_changes_nothing_and_says_why(two):
    key = two.play(GOOD, {ALICE: "far out"})
    row = two.closed(key)
    assert (row.outcome, row.why, row.new_state) == (Outcome.SKIPPED, "too_few", None)
    reasons = {u.client: u.reason for u in two.ledger.updates(key)}
    assert reasons[ALICE] == "far out"
    assert "needs 2 updates to change anything and had 1" in reasons[BOB]
    assert not two.ledger.accepted(key)
    assert (two.kept_at_save, two.at.number) == ([], -1)
    assert [n[1] for n in two.notes] == ["excluded", "too_few_updates"]
    assert {m.outcome for m in two.told} == {"skipped"}
    assert not two.closing.verdict(BOB).counted


@pytest.mark.parametrize("moment", ["meanwhile", "while_saving"])
def test_one_left_by_a_revocation_meanwhile_is_too_few(two, moment):
    def once():
        setattr(two, moment, lambda: None)
        revoke(two, BOB)

    setattr(two, moment, once)
    key = two.play(GOOD, {})
    assert two.seen == [[ALICE, BOB]], "one alone is not combined"
    assert (two.closed(key).outcome, two.closed(key).new_state) == (Outcome.SKIPPED, None)
    assert two.discarded == [-1]
    assert not two.kept


def test_a_round_closed_with_the_rest_of_its_task_stays_so(two):
    """Else the rounds after it would open again."""
    two.meanwhile = lambda: revoke(two, BOB)
    two.why = round_events.Why.REST
    key = two.play(GOOD, {})
    assert (two.closed(key).why, two.closed(key).outcome) == ("rest_of_task", Outcome.SKIPPED)
