"""A damaged newest state is computed again to the byte, or given up openly; never guessed."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fcil_adapters.contract import registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_protocol.errors import CannotOpen, CorruptFile, FcilError, RunFailed, WorkerDied
from fcil_protocol.ids import Digest, RoundKey
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.storage.spool import Spool
from fcil_server.aggregation.combining import Combined
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.federation.config import load
from fcil_server.federation.roster import WITHDRAWN
from fcil_server.ledger.enums import OPENING, RunStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RunRow
from fcil_server.rounds.classes import ClassRegistry
from fcil_server.rounds.closing import needed_updates
from fcil_server.rounds.coordinator import Coordinator
from fcil_server.runs.recovery import ensure_state
from server.storage_kit import ALICE, BOB, Built, build, flip


@dataclass
class Sums:
    """Stands for the worker: each step adds one to what the kit's states hold.

    Attributes:
        given: the clients of each aggregation.
        needs: who must be in it for the result to come out right.
    """

    given: list[list[str]] = field(default_factory=list)
    needs: set[str] = field(default_factory=lambda: {ALICE, BOB})
    failure: FcilError | None = None
    start: int = -1
    step: int = 1  # what the opening of a task adds
    device: str = "cpu"

    async def init(self, _ctx: Any) -> Payload:
        return Payload({"w": np.full(100, self.start, np.float32)}, {})

    async def open_task(self, _ctx: Any, state: Payload) -> Payload:
        return Payload({"w": state.tensors["w"] + self.step}, {})

    def settled(self) -> None:
        """Nothing is remembered."""

    async def aggregate(self, _ctx: Any, state: Payload, updates: Any, _older: Any) -> Combined:
        if self.failure is not None:
            return Combined(None, failure=self.failure)
        self.given.append([u.client for u in updates])
        right = {u.client for u in updates} == self.needs
        return Combined(Payload({"w": state.tensors["w"] + (1 if right else 2)}, {}))


@dataclass
class Scene:
    """A run that stands at the end of its first task (state 2), its updates in the spool."""

    built: Built
    ledger: Ledger
    kit: Any
    notes: list[tuple[str, str, str]]
    worker: Sums

    def ensure(self) -> RunRow | None:
        return asyncio.run(ensure_state(self.kit, self.built.directory))

    def exclude(self, client: str, reason: str) -> None:
        self.ledger.database.write(
            "UPDATE updates SET status = 'excluded', reason = ? WHERE client = ? AND task = 0 "
            "AND kind = 'train' AND round = 1",
            (reason, client),
        )


@pytest.fixture
def scene(tmp_path: Path):
    built = build(tmp_path / "fed")
    with built.ledger() as ledger:
        for table in ("updates", "rounds", "evaluations", "bytes", "states", "tasks"):
            ledger.database.write(f"DELETE FROM {table} WHERE task > 0")  # noqa: S608
        states = StateStore(states_folder(built.directory, built.run))
        states.discard_after(2)
        shutil.rmtree(built.spool)
        spool = Spool(built.spool)
        for update in needed_updates(ledger, built.run):
            spool.append(update, b"sealed")
        spool.sync()
        notes: list[tuple[str, str, str]] = []
        method = registry.load_method("running_mean")
        hparams = registry.make_hparams(method, {})
        kit = SimpleNamespace(
            run=built.run, config=load(None, ["method.name=running_mean"]), method=method,
            hparams=hparams, info=NO_BACKBONE, ledger=ledger,
            exchanges=method.exchanges(hparams, NO_BACKBONE),
            classes=ClassRegistry(ledger, built.run), states=states, spool=spool,
            aggregation=Sums(), notify=lambda *note: notes.append(note), kept=None,
        )  # fmt: skip
        yield Scene(built, ledger, kit, notes, kit.aggregation)
        spool.close()


def test_the_spool_keeps_what_made_the_newest_state(scene: Scene) -> None:
    rows = scene.ledger.updates.of_round(RoundKey(scene.built.run, 0, "train", 1))
    assert needed_updates(scene.ledger, scene.built.run) == {r.update_id for r in rows}
    assert len(rows) == 2
    scene.exclude(BOB, WITHDRAWN)  # and nothing of whoever was revoked meanwhile
    assert needed_updates(scene.ledger, scene.built.run) == {
        r.update_id for r in rows if r.client == ALICE
    }


def test_a_start_deletes_what_a_kill_kept_and_what_nobody_recorded(scene: Scene) -> None:
    """Killed after the newest state was committed, before the file of the round before it went."""
    shutil.rmtree(scene.built.spool)
    needed = needed_updates(scene.ledger, scene.built.run)
    killed = Spool(scene.built.spool)
    for keys in (["of the round before"], [*needed, "refused"], ["never recorded"]):
        for key in keys:
            killed.append(key, b"sealed")
        killed.sync()
        killed.end_round()
    scene.kit.spool = Spool(scene.built.spool)
    Coordinator._tidy_spool(SimpleNamespace(context=scene.kit))
    assert set(scene.kit.spool.keys()) == needed
    assert len(list(scene.built.spool.iterdir())) == 1


def test_nothing_happens_to_a_whole_state(scene: Scene) -> None:
    assert scene.ensure() is None
    assert (scene.notes, scene.worker.given) == ([], [])


@pytest.mark.parametrize("how", ["damaged", "missing", "no record"])
def test_it_is_computed_again_and_said(scene: Scene, how: str) -> None:
    path = scene.built.state(2)
    whole = path.read_bytes(), path.with_suffix(".json").read_bytes()
    if how == "damaged":
        flip(path)
    else:
        (path if how == "missing" else path.with_suffix(".json")).unlink()
    assert scene.ensure() is None
    assert (path.read_bytes(), path.with_suffix(".json").read_bytes()) == whole
    ((level, code, text),) = scene.notes
    assert (level, code) == ("warning", "state_recomputed")
    assert "000002" in text


def test_an_update_that_aggregation_left_out_is_given_to_it_again(scene: Scene) -> None:
    """It compares updates with each other, so the one that it excluded belongs to the input."""
    scene.exclude(BOB, "its values are 40 times those of the others")
    flip(scene.built.state(2))
    assert scene.ensure() is None
    assert scene.worker.given == [[ALICE, BOB]]


def test_an_update_that_was_withdrawn_before_is_not(scene: Scene) -> None:
    scene.exclude(BOB, WITHDRAWN)
    scene.worker.needs = {ALICE}
    flip(scene.built.state(2))
    assert scene.ensure() is None
    assert scene.worker.given == [[ALICE]]


def test_both_ways_are_tried(scene: Scene) -> None:
    scene.exclude(BOB, "damaged")
    scene.worker.needs = {ALICE}
    flip(scene.built.state(2))
    assert scene.ensure() is None
    assert scene.worker.given == [[ALICE, BOB], [ALICE]]


def test_the_opening_of_a_task_needs_no_updates(scene: Scene) -> None:
    """All three are damaged, and only the last round's updates are kept: it goes back to 0."""
    whole = scene.built.state(0).read_bytes()
    for number in range(3):
        flip(scene.built.state(number))
    fork = scene.ensure()
    assert fork is not None
    assert fork.parent_state == 0
    assert scene.built.state(0).read_bytes() == whole
    assert [code for _, code, _ in scene.notes] == ["state_recomputed", "state_lost"]


@pytest.mark.parametrize("lost", [(3,), (2, 3)], ids=["the opening", "both"])
def test_an_opening_that_changes_nothing_has_the_state_before_it(
    scene: Scene, lost: tuple[int, ...]
) -> None:
    """Sums open a task as they are: the opening and the state before it have one digest."""
    newest = scene.ledger.states.newest(scene.built.run)
    state = scene.kit.states.load(newest.state)
    scene.kit.classes.announce(ALICE, ["oak"])
    scene.kit.classes.open_task(1)
    scene.kit.states.save(3, state, newest.digest, 1)
    key = RoundKey(scene.built.run, 1, OPENING, 0)
    scene.ledger.states.add(key, 3, newest.digest, newest.digest)
    scene.worker.step = 0
    for number in lost:
        flip(scene.built.state(number))
    assert scene.ensure() is None
    assert [code for _, code, _ in scene.notes] == ["state_recomputed"] * len(lost)
    for number in lost:
        assert np.array_equal(scene.kit.states.load(number).tensors["w"], state.tensors["w"])


def test_a_run_that_lost_very_many_states_does_not_walk_through_all_of_them(scene: Scene) -> None:
    """Each is as unreadable as the next, and a sentence about each would fill the screen."""
    parent = scene.ledger.states.newest(scene.built.run).digest
    for number in range(3, 1500):
        key, made = RoundKey(scene.built.run, 0, "train", number), Digest(f"{number:064x}")
        scene.ledger.states.add(key, number, made, parent)
        parent = made
    for number in range(3):
        scene.built.state(number).unlink()
    fork = scene.ensure()
    assert fork is not None
    assert fork.parent_state == 0
    assert max(len(text) for _, _, text in scene.notes) < 1000


def test_a_result_that_differs_is_never_taken(scene: Scene) -> None:
    scene.worker.needs = {"somebody else"}
    flip(scene.built.state(2))
    damaged = scene.built.state(2).read_bytes()
    fork = scene.ensure()
    assert fork is not None
    assert (fork.parent_run, fork.parent_state) == (scene.built.run, 1)
    assert scene.built.state(2).read_bytes() == damaged
    ((level, code, text),) = scene.notes
    assert (level, code) == ("error", "state_lost")
    assert "the result differs" in text
    assert "goes back from state 2 to 1" in text
    assert f"run {fork.run_id}; lost: task 0 train round 1." in text
    assert [a.action for a in scene.ledger.audit.newest()][-1] == "fall_back"


@pytest.mark.parametrize("how", ["not kept", "cannot be opened"])
def test_without_its_updates_the_run_goes_back(scene: Scene, how: str) -> None:
    flip(scene.built.state(2))
    if how == "not kept":
        scene.kit.spool.remove(scene.kit.spool.keys()[:1])
    else:
        scene.worker.failure = CannotOpen("the keys were changed.")
    fork = scene.ensure()
    assert fork is not None
    assert fork.parent_state == 1
    said = "1 of its 2 updates are not kept" if how == "not kept" else "the keys were changed"
    assert said in scene.notes[0][2]


def test_updates_that_a_run_keeps_are_as_good_as_those_in_the_spool(scene: Scene) -> None:
    flip(scene.built.state(2))
    ids = scene.kit.spool.keys()
    scene.kit.spool.remove(ids)
    scene.kit.kept = SimpleNamespace(names=lambda: ids)
    assert scene.ensure() is None
    assert scene.notes[0][1] == "state_recomputed"


def test_a_failure_that_may_pass_gives_nothing_up(scene: Scene) -> None:
    flip(scene.built.state(2))
    scene.worker.failure = WorkerDied("it was killed.")
    with pytest.raises(RunFailed, match=r"000002.* is damaged.*it was killed") as caught:
        scene.ensure()
    assert "rollback" in caught.value.action
    assert len(scene.ledger.runs.all()) == 1


def test_the_copy_of_the_final_model_serves_as_well(scene: Scene) -> None:
    path = scene.built.state(2)
    shutil.copy(path, path.parents[1] / "final.safetensors")
    flip(path)
    scene.worker.failure = WorkerDied("it is not needed.")
    assert scene.ensure() is None
    assert scene.notes[0][1] == "state_recomputed"


def test_a_complete_run_is_never_begun_again(scene: Scene) -> None:
    scene.ledger.runs.set_status(scene.built.run, RunStatus.DONE)
    scene.worker.needs = set()
    flip(scene.built.state(2))
    assert scene.ensure() is None
    assert len(scene.ledger.runs.all()) == 1
    assert scene.notes[0][0] == "error"


def test_a_run_without_any_readable_state_says_what_to_do(scene: Scene) -> None:
    for number in range(3):
        flip(scene.built.state(number))
    scene.worker.start = 5
    with pytest.raises(CorruptFile, match="none of the states") as caught:
        scene.ensure()
    assert "--new-run" in caught.value.action
