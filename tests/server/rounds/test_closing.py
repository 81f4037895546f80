"""How a round closes when updates turn out to be of no use, or their senders are revoked."""

import asyncio
from types import SimpleNamespace

import pytest

import sample_run
from fcil_adapters.contract import TaskInfo
from fcil_protocol.errors import (
    CorruptFile,
    DataError,
    DiskFull,
    InternalError,
    RunFailed,
    StorageError,
    WorkerDied,
)
from fcil_protocol.ids import RoundKey, UpdateId
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation.combining import Combined
from fcil_server.event_loop import Lag
from fcil_server.federation.config import Config
from fcil_server.federation.sections import RoundSection, RunSection
from fcil_server.ledger.enums import SPLIT_SUM, Answer, Outcome, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.reports.results.round_views import RoundReader
from fcil_server.rounds import closing, events, notes
from fcil_server.rounds.asking import describe_pause
from fcil_server.rounds.events import RoundRules
from fcil_server.rounds.position import Mode, RunContext, RunProgress
from fcil_server.rounds.schedule import Step
from sample_run import ALICE, BOB, RUN, digest

TASK = TaskInfo(0, (0, 1), ())


class Scene:
    """A run whose aggregations answer what `results` says, round after round."""

    def __init__(self, path, monkeypatch, least=0):
        self.clock = sample_run.Clock()
        self.ledger = Ledger(path, clock=self.clock)
        sample_run.add_clients(self.ledger)
        sample_run.add_run(self.ledger)
        self.ledger.tasks.open(RUN, 0, [0, 1])
        self.notes, self.results, self.round = [], [], 0
        self.discarded, self.seen, self.told = [], [], []
        self.kept, self.kept_at_save = set(), []
        self.settled, self.pruned = [], []
        self.why = events.Why.ANSWERED
        self.meanwhile = self.while_saving = lambda: None
        monkeypatch.setattr(closing, "method_context", lambda *_: None)

        async def aggregate(_ctx, _state, updates, _older):
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
            ledger=self.ledger, spool=Spool(path.with_name("spool")),
            spool_folder=path.with_name("spool"), notify=lambda *n: self.notes.append(n),
            name_of=str, masked_kinds=frozenset(), is_asynchronous=lambda _: False, continues_after=lambda _: False, peers=SimpleNamespace(by_client=lambda _: SimpleNamespace()),
            send=lambda _, message: self.told.append(message),
            aggregation=SimpleNamespace(
                log=path.with_name("worker.log"), aggregate=aggregate, class_conflicts=[], keep=self.keep, undo_keep=self.keep_not,
                settled=lambda: self.settled.append(self.ledger.rounds.current(RUN)),
            ),
            states=SimpleNamespace(discard_after=self.discarded.append, save=save, prune=self.pruned.append),
            classes=SimpleNamespace(names=dict, keyed=lambda ids: {f"class {i}": i for i in ids}), lag=Lag, attended=True,
        )  # fmt: skip
        self.at = RunProgress(round=self.open_round(), task=TASK, step=Step("train", 0, 9))
        self.closing = closing.Closing(self.kit, self.at, self.at.adopt)

    def open_round(self):
        rules = RoundRules(min_updates=self.kit.config.least_updates)
        return SimpleNamespace(reasons={}, rules=rules)

    def keep(self, rows):
        self.kept |= {row.client for row in rows}

    def keep_not(self, rows):
        self.kept -= {row.client for row in rows}

    def void(self):
        """Let both clients send what cannot be combined, and the run heed it."""
        key = self.play(None, {}, failure=InternalError("division by zero"))
        if why := self.closing.check_void(key):
            self.at.hold(why)
        return key

    def play(self, state, excluded, failure=None):
        """Let both clients send, and close the round with this result."""
        key = RoundKey(RUN, 0, "train", self.round)
        self.ledger.rounds.open(key, asked=(ALICE, BOB), base_state=0)
        for client in (ALICE, BOB):
            self.send(key, client)
        self.results.append(Combined(state, (), excluded, failure))
        answers = dict.fromkeys((ALICE, BOB), Answer.UPDATED)
        close = events.Close(Outcome.DONE, answers, self.why)
        self.round += 1
        asyncio.run(self.closing.close(TASK, Step("train", key.round, 9), close, 1.0))
        return key

    def send(self, key, client, **more):
        """Store an update of a client for a round."""
        update = UpdateId(digest(f"{client}{key.round}"))
        self.kit.spool.append(update, b"sealed")
        with self.ledger.transaction():
            self.ledger.updates.accept(
                key, client, update_id=update, samples=5, tensor_bytes=1, sealed_bytes=1, **more
            )
        self.kit.spool.sync()

    def closed(self, key):
        return next(r for r in self.ledger.rounds.all(RUN) if r.key == key)


@pytest.fixture
def scene(tmp_path, monkeypatch):
    made = Scene(tmp_path / "ledger.sqlite", monkeypatch)
    yield made
    made.ledger.close()
    made.kit.spool.close()


class TestAsynchronous:
    """BOB is at work as the round closes; ALICE's update counts."""

    @pytest.fixture
    def told(self, scene):
        """Close a round of a kind that continues, or not; return who is told."""

        def close(number=0, rounds=9, why=events.Why.TAKEN, answer=Answer.SURPLUS):
            scene.kit.is_asynchronous = lambda _: True
            scene.kit.continues_after = lambda step: RunContext.continues_after(scene.kit, step)
            clients = {ALICE: "alice", BOB: "bob"}
            scene.kit.peers.by_client = lambda c: SimpleNamespace(name=clients[c])
            named = []
            scene.kit.send = lambda peer, _: named.append(peer.name)
            key = RoundKey(RUN, 0, "train", number)
            scene.ledger.rounds.open(key, asked=(ALICE, BOB), base_state=0)
            scene.send(key, ALICE)
            scene.results.append(Combined(GOOD, (), {}, None))
            ended = events.Close(Outcome.DONE, {ALICE: Answer.UPDATED, BOB: answer}, why)
            asyncio.run(scene.closing.close(TASK, Step("train", number, rounds), ended, 1.0))
            return named

        return close

    @pytest.mark.parametrize("answer", [Answer.SURPLUS, Answer.LOST])
    def test_a_client_at_work_hears_nothing_while_its_update_can_count(self, told, answer):
        assert told(answer=answer) == ["alice"]

    @pytest.mark.parametrize(
        "ends",
        [
            {"rounds": 1},
            {"why": events.Why.REST},
            {"answer": Answer.DECLINED},
        ],
        ids=["last round", "rest of the task", "declined"],
    )
    def test_it_hears_the_end_once_it_cannot(self, told, ends):
        assert told(**ends) == ["alice", "bob"]

    def test_an_update_whose_start_is_damaged_is_left_out_with_the_reason(self, scene):
        def load(number):
            raise CorruptFile(f"state {number} is damaged.")

        scene.kit.states.load = load
        key = RoundKey(RUN, 0, "train", 0)
        scene.ledger.rounds.open(key, asked=(ALICE, BOB), base_state=0)
        scene.send(key, ALICE)
        scene.send(key, BOB, base_state=-3)
        scene.results.append(Combined(GOOD, (), {}, None))
        ended = events.Close(Outcome.DONE, dict.fromkeys((ALICE, BOB), Answer.UPDATED), scene.why)
        asyncio.run(scene.closing.close(TASK, Step("train", 0, 9), ended, 1.0))
        assert scene.seen == [[ALICE]]
        assert "the state that it starts from cannot be read" in scene.closing.verdict(BOB).reason
        assert scene.notes[0][:2] == ("error", "corrupt_file")


def test_it_is_closed_as_void_and_everybody_is_told_why(scene):
    key = scene.void()
    row = scene.closed(key)
    assert (row.outcome, row.why, row.new_state) == (Outcome.SKIPPED, "void", None)
    assert {u.status for u in scene.ledger.updates.of_round(key)} == {UpdateStatus.EXCLUDED}
    assert [n[:2] for n in scene.notes] == [("error", "void")]
    assert "task 0 train round 0 is void" in scene.notes[0][2]
    assert "division by zero" in scene.notes[0][2]
    verdict = scene.closing.verdict(ALICE)
    assert (verdict.counted, verdict.reason) == (
        False, "the round is void, and no update is to blame: division by zero",
    )  # fmt: skip
    assert scene.settled == [None], "after the round is closed"


def test_three_in_a_row_hold_the_run_with_a_sentence_and_each_further_one_does_again(scene):
    for _ in range(2):
        scene.void()
        assert scene.at.mode is Mode.RUNNING
    scene.void()
    assert scene.at.mode is Mode.PAUSED
    assert "the last 3 rounds are void" in describe_pause(scene.at)
    assert scene.notes[-1][:2] == ("error", "paused")
    log = scene.kit.aggregation.log
    assert f"{log} name (memory, the method), then: fcil-server resume" in scene.notes[-1][2]
    # A restart counts them, too: the ledger does.
    scene.at = RunProgress(round=scene.open_round(), task=TASK, step=Step("train", 0, 9))
    scene.closing = closing.Closing(scene.kit, scene.at, scene.at.adopt)
    scene.void()
    assert scene.at.mode is Mode.PAUSED
    assert "the last 4 rounds" in scene.at.held_for


def test_a_server_that_nobody_attends_ends_instead(scene):
    scene.kit.attended = False
    scene.void()
    scene.void()
    with pytest.raises(
        RunFailed, match="the last 3 rounds are void: .*: division by zero"
    ) as ended:
        scene.void()
    assert str(scene.kit.aggregation.log) in ended.value.action
    assert [r.why for r in scene.ledger.rounds.all(RUN)] == ["void"] * 3


def test_a_drained_server_ends_drained(scene):
    scene.at.mode = Mode.DRAINING
    for _ in range(3):
        scene.void()
    assert scene.at.mode is Mode.DRAINING


def test_a_good_round_in_between_begins_the_count_anew(scene):
    scene.void()
    scene.void()
    third = scene.play(GOOD, {ALICE: "far out"})
    assert not scene.closing.check_void(third)
    scene.void()
    assert scene.at.mode is Mode.RUNNING
    assert (scene.closed(third).outcome, scene.closed(third).new_state) == (Outcome.DONE, 0)


def test_the_rest_of_a_task_stays_closed_although_its_round_is_void(scene):
    scene.why = events.Why.REST
    assert scene.closed(scene.void()).why == "rest_of_task"


GOOD = Payload({}, {})


def revoke(scene, client):
    """Leave out what a client sent to the open round, as a revocation does."""
    key = RoundKey(RUN, 0, "train", scene.round - 1)
    scene.ledger.updates.exclude(key, client, "revoked")


@pytest.mark.parametrize("moment", ["meanwhile", "while_saving"])
def test_who_is_revoked_while_a_state_is_made_is_not_in_it(scene, moment):
    def once():
        setattr(scene, moment, lambda: None)
        revoke(scene, BOB)

    setattr(scene, moment, once)
    scene.results.append(Combined(GOOD))
    key = scene.play(GOOD, {})
    assert scene.seen == [[ALICE, BOB], [ALICE]]
    assert scene.discarded == [-1]
    row = scene.closed(key)
    assert (row.outcome, row.new_state) == (Outcome.DONE, 0)
    assert [u.client for u in scene.ledger.updates.accepted(key)] == [ALICE]
    assert scene.kept_at_save[-1] == [ALICE]


def test_what_counts_is_kept_before_the_state_is_on_disk_and_nothing_else_is(scene):
    scene.play(GOOD, {ALICE: "far out"})
    assert scene.kept_at_save == [[BOB]]
    scene.kept.clear()
    scene.void()
    assert not scene.kept


def test_a_server_without_its_ledger_leaves_no_state(scene, monkeypatch):
    def lost():
        raise StorageError("the ledger cannot be used.")

    monkeypatch.setattr(scene.ledger.database, "check_still_in_place", lost)
    with pytest.raises(StorageError):
        scene.play(GOOD, {})
    assert scene.kept_at_save == [], "nothing was saved"


def test_a_round_whose_last_sender_is_revoked_meanwhile_leaves_the_state(scene):
    def both():
        scene.meanwhile = lambda: None
        revoke(scene, ALICE)
        revoke(scene, BOB)

    scene.meanwhile = both
    key = scene.play(GOOD, {})
    assert (scene.closed(key).outcome, scene.closed(key).new_state) == (Outcome.SKIPPED, None)


def test_clients_are_told_the_outcome_that_the_ledger_has(scene):
    scene.void()
    assert {m.outcome for m in scene.told} == {"skipped"}
    scene.play(GOOD, {})
    assert scene.told[-1].outcome == "done"


def test_a_round_tells_how_late_the_loop_was_meanwhile(scene):
    scene.kit.lag = lambda: Lag(max_s=0.25, p99_s=0.01)
    key = scene.play(Payload({}, {}), {})
    told = scene.ledger.rounds.get(key).metrics
    assert told == {"loop_lag_max_s": 0.25, "loop_lag_p99_s": 0.01}


def test_nobody_hears_a_verdict_before_it_is_on_the_disk(scene):
    heard = []
    scene.play(GOOD, {})
    before = scene.closing.verdict(ALICE)

    def sync():
        heard.append(scene.closing.verdict(ALICE))  # a client that says Hello meanwhile

    scene.ledger.sync = sync
    scene.void()
    assert heard == [before]
    assert before.counted
    assert not scene.closing.verdict(ALICE).counted


def test_a_disk_that_keeps_what_is_needed_no_more_ends_nothing(scene):
    def full(_kept):
        raise DiskFull("the disk is full.")

    scene.kit.states.prune = full
    scene.play(GOOD, {})
    scene.play(GOOD, {})
    assert [n[1] for n in scene.notes] == ["disk_full", "disk_full"]


def test_the_file_of_a_round_stays_until_the_next_state_is_made(scene):
    spool = scene.kit.spool

    def sent(turn):
        return sorted(digest(f"{client}{turn}") for client in (ALICE, BOB))

    def files():
        return len(list(scene.kit.spool_folder.glob("*.seg")))

    for turn in range(3):
        scene.play(GOOD, {})
        assert sorted(spool.keys()) == sent(turn)
        assert files() == 1
    scene.void()
    assert sorted(spool.keys()) == sent(2), "the newest state is still that of the round before"
    assert files() == 1
    scene.play(GOOD, {ALICE: "far out"})
    assert sorted(spool.keys()) == sent(4), "of what was left out too: it can be computed again"
    assert files() == 1


@pytest.fixture
def two(tmp_path, monkeypatch):
    """A scene in which a state is made of two updates at least."""
    made = Scene(tmp_path / "ledger.sqlite", monkeypatch, least=2)
    yield made
    made.ledger.close()
    made.kit.spool.close()


def test_a_round_left_with_too_few_updates_changes_nothing_and_says_why(two):
    key = two.play(GOOD, {ALICE: "far out"})
    row = two.closed(key)
    assert (row.outcome, row.why, row.new_state) == (Outcome.SKIPPED, "too_few", None)
    reasons = {u.client: u.reason for u in two.ledger.updates.of_round(key)}
    assert reasons[ALICE] == "far out"
    assert "needs 2 updates to change anything and had 1" in reasons[BOB]
    assert not two.ledger.updates.accepted(key)
    assert (two.kept_at_save, two.at.number) == ([], -1)
    assert [n[1] for n in two.notes] == ["excluded", "too_few_updates"]
    assert {m.outcome for m in two.told} == {"skipped"}
    assert not two.closing.verdict(BOB).counted


@pytest.mark.parametrize(
    ("endless", "words"), [(False, "begins again with new keys"), (True, "is given up")]
)
def test_a_masked_round_of_too_few_says_if_it_begins_again(two, endless, words):
    two.at.round.rules = RoundRules(suffices=lambda _: False, endless=endless)
    assert words in notes.describe_masked_in_vain(two.at, 2)
    assert "2 updates that can be used, too few" in notes.describe_masked_in_vain(two.at, 2)


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
    two.why = events.Why.REST
    key = two.play(GOOD, {})
    assert (two.closed(key).why, two.closed(key).outcome) == ("rest_of_task", Outcome.SKIPPED)


def test_the_first_round_of_a_kind_says_how_long_the_others_take(scene):
    scene.meanwhile = lambda: setattr(scene.clock, "now", scene.clock.now + 20)
    scene.play(GOOD, {})
    ((level, code, text),) = scene.notes
    assert (level, code) == ("info", "pace")
    assert text.startswith(
        "task 0 train round 0 took 20.0 s; the other 8 together take about 2 min 40 s"
    )
    scene.play(GOOD, {})
    assert len(scene.notes) == 1, "once"


def test_a_round_without_a_result_says_nothing_of_the_others(scene):
    scene.meanwhile = lambda: setattr(scene.clock, "now", scene.clock.now + 20)
    scene.void()
    assert [n[1] for n in scene.notes] == ["void"]


@pytest.mark.parametrize("fails", [False, True])
def test_every_second_round_is_tested_and_a_failed_test_costs_its_number_alone(
    tmp_path, monkeypatch, fails
):
    scene = Scene(tmp_path / "ledger.sqlite", monkeypatch)

    async def evaluate(_ctx, _parts, folder, ids):
        assert (folder, ids) == ("tests", {"class 0": 0, "class 1": 1})
        if fails:
            raise DataError("the folder is gone.")
        return {0: (3, 4), 1: (0, 1)}

    scene.kit.config = Config(run=RunSection(central_test="tests", central_test_every=2))
    scene.kit.exchanges = (SimpleNamespace(kind="train", rounds=None),)
    scene.kit.aggregation.evaluate = evaluate
    scene.kit.aggregation.broadcast = lambda *_: asyncio.sleep(0, ())
    keys = [scene.play(Payload(), {}), scene.play(Payload(), {})]
    views = [RoundReader(scene.ledger.database).view(scene.ledger.rounds.get(k)) for k in keys]
    assert [view.tested for view in views] == [None, None if fails else 0.6]
    assert all(view.round.outcome is Outcome.DONE for view in views)
    best = scene.ledger.rounds.get(keys[1]).new_state
    assert scene.pruned[-1] == (() if fails else (best,)), "the best tested state is kept"
    assert any("is not tested: the folder is gone." in note[2] for note in scene.notes) is fails


def fail_last_test(scene, error):
    """Let the test after a task fail with an error."""

    async def evaluate(*_):
        raise error

    scene.kit.config = Config(run=RunSection(central_test="tests"))
    scene.kit.aggregation.evaluate = evaluate
    scene.kit.aggregation.broadcast = lambda *_: asyncio.sleep(0, ())
    scene.play(Payload(), {})
    asyncio.run(closing.Closing(scene.kit, scene.at, scene.at.adopt).central_evaluation(TASK))


def test_a_last_test_that_fails_ends_no_server_whose_task_is_learned(tmp_path, monkeypatch):
    scene = Scene(tmp_path / "ledger.sqlite", monkeypatch)
    fail_last_test(scene, DataError("the folder is gone."))
    level, _, text = scene.notes[-1]
    assert (level, "run.central_test: the folder is gone." in text) == ("error", True)


def test_a_last_test_whose_worker_dies_is_repeated_when_the_run_is_resumed(tmp_path, monkeypatch):
    """The task is not closed without it."""
    scene = Scene(tmp_path / "ledger.sqlite", monkeypatch)
    with pytest.raises(WorkerDied):
        fail_last_test(scene, WorkerDied("the worker died."))


def test_a_test_of_rounds_needs_images():
    with pytest.raises(ValueError, match="set central_test"):
        RunSection(central_test_every=1)


# --- sums of relays -----------------------------------------------------------------------------


def test_who_is_revoked_takes_the_sum_with_it_that_its_update_is_in(scene, monkeypatch):
    """The sum cannot be used without it, and its other updates are excluded with the reason."""
    together = UpdateId(digest("sum"))
    send = scene.send
    monkeypatch.setattr(scene, "send", lambda key, c: send(key, c, sum_id=together))

    def once():
        scene.meanwhile = lambda: None
        revoke(scene, BOB)

    scene.meanwhile = once
    key = scene.play(GOOD, {})
    assert scene.seen == [[ALICE, BOB]]
    assert (scene.closed(key).outcome, scene.closed(key).new_state) == (Outcome.SKIPPED, None)
    assert scene.closing.verdict(ALICE).reason == SPLIT_SUM
    assert scene.closing.verdict(BOB).reason == "revoked"


def test_a_sum_of_two_that_count_makes_a_state_and_stays_in_the_spool(scene, monkeypatch):
    together = UpdateId(digest("sum"))
    send = scene.send
    monkeypatch.setattr(scene, "send", lambda key, c: send(key, c, sum_id=together))
    key = scene.play(GOOD, {})
    assert scene.closed(key).new_state == 0
    assert {u.status for u in scene.ledger.updates.of_round(key)} == {UpdateStatus.COUNTED}
    assert closing.needed_updates(scene.ledger, RUN) == {together}
