"""A failing aggregation: who is left out, who is not to blame, what a kill and a deadline leave."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from fcil_protocol.errors import (
    CorruptFile,
    DiskFull,
    InternalError,
    OutOfMemory,
    WorkerDied,
    WorkerStalled,
)
from fcil_protocol.payloads.payload import Payload
from fcil_server.aggregation.combining import Combined, Combining, limit_s
from fcil_server.aggregation.trials import Trials


class Killed(BaseException):
    """Stands for kill -9 of the server."""


class Scene:
    """A round of updates; `fails` says why some of them cannot be combined."""

    def __init__(self, path, count, fails, *, limit=None):
        self.path, self.fails, self.limit = path, fails, limit
        self.rows = [SimpleNamespace(client=f"{n:04d}", update_id=f"u{n}") for n in range(count)]
        self.tries, self.kill_at, self.told = [], None, []

    async def combine(self, rows):
        if self.kill_at == len(self.tries):
            raise Killed
        numbers = tuple(int(r.client) for r in rows)
        self.tries.append(numbers)
        await asyncio.sleep(0)
        error = self.fails(set(numbers))
        if error is not None:
            raise error
        return Combined(Payload({"sum": np.array([float(sum(numbers))])}))

    def run(self, about=("round 0",)):
        ids = (r.update_id for r in self.rows)
        made = Combining(
            self.combine, self.rows, Trials(self.path, (*about, *ids)), self.limit, self.told.append
        )
        return asyncio.run(made.run())


def blames(*culprits, error=InternalError):
    return lambda chosen: error("no inverse.") if not chosen.isdisjoint(culprits) else None


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.json"


def test_without_a_failure_it_is_one_call_and_nothing_is_kept(path):
    scene = Scene(path, 50, lambda _: None)
    assert scene.run().state.tensors["sum"].item() == sum(range(50))
    assert (len(scene.tries), path.exists()) == (1, False)


def test_the_culprits_are_named_and_the_state_is_that_of_the_others(path):
    scene = Scene(path, 100, blames(7, 70))
    combined = scene.run()
    assert combined.failure is None
    assert combined.excluded == dict.fromkeys(
        ("0007", "0070"), "aggregation failed on it: no inverse."
    )
    assert combined.state.tensors["sum"].item() == sum(range(100)) - 77
    assert len(scene.tries) < 45, "before: 103"
    assert scene.told == ["an aggregation failed and is tried again: no inverse."]


def test_of_two_that_fail_only_together_one_is_left_out_and_told_so(path):
    fails = lambda chosen: InternalError("singular.") if {1, 2} <= chosen else None  # noqa: E731
    combined = Scene(path, 4, fails).run()
    assert combined.excluded == {
        "0001": "aggregation failed on it with the others', not on it alone: singular."
    }
    assert combined.state.tensors["sum"].item() == 5


@pytest.mark.parametrize("count", [1, 2, 40])
def test_where_all_fail_nobody_is_to_blame(path, count):
    combined = Scene(path, count, lambda _: InternalError("a defect.")).run()
    assert (combined.state, combined.excluded) == (None, {})
    assert "a defect" in combined.failure.message


def test_where_memory_lacks_for_one_more_nobody_is_to_blame(path):
    fails = lambda chosen: OutOfMemory("no memory.") if len(chosen) > 4 else None  # noqa: E731
    combined = Scene(path, 5, fails).run()
    assert combined.state is None
    assert isinstance(combined.failure, OutOfMemory)


def test_a_worker_killed_from_outside_again_and_again_blames_nobody(path):
    troubles = [WorkerDied("killed."), WorkerStalled("silent."), WorkerDied("killed.")]
    scene = Scene(path, 5, lambda _: troubles.pop(0) if troubles else None)
    combined = scene.run()
    assert (combined.excluded, combined.failure) == ({}, None)
    assert combined.state.tensors["sum"].item() == 10


def test_a_damaged_update_is_found_and_a_full_disk_ends_it(path):
    combined = Scene(path, 5, blames(3, error=CorruptFile)).run()
    assert list(combined.excluded) == ["0003"]
    with pytest.raises(DiskFull):
        Scene(path, 5, blames(3, error=DiskFull)).run()


def test_killed_at_any_try_a_restart_comes_to_the_same_and_goes_on_where_it_was(path):
    whole = Scene(path.with_name("whole"), 20, blames(3, 11))
    expected, tries = whole.run(), len(whole.tries)
    for moment in range(tries):
        path.unlink(missing_ok=True)
        scene = Scene(path, 20, blames(3, 11))
        scene.kill_at = moment
        with pytest.raises(Killed):
            scene.run()
        scene.kill_at = None
        again = scene.run()
        assert again.excluded == expected.excluded
        assert again.state.tensors["sum"] == expected.state.tensors["sum"]
        # The two tries of all together count as one; a state that was in memory is made again.
        assert len(scene.tries) <= tries + 2


def test_what_another_round_or_a_damaged_file_shows_counts_nothing(path):
    assert Scene(path, 8, blames(3)).run().excluded
    assert not Scene(path, 8, lambda _: None).run(about=("round 1",)).excluded
    for text in ("", "{", "[]", '{"about": 1}', '{"about": "", "spent_s": "x", "shown": {}}'):
        path.write_text(text)
        assert list(Scene(path, 8, blames(3)).run().excluded) == ["0003"]


def test_a_full_disk_costs_the_memory_of_tries_and_nothing_else(tmp_path):
    scene = Scene(tmp_path / "gone" / "trials.json", 8, blames(3))
    assert list(scene.run().excluded) == ["0003"]


def test_all_tries_have_one_deadline_over_restarts(path):
    """Of the time, what earlier starts have spent is gone."""
    hangs = asyncio.Event

    async def never(rows):
        scene.tries.append(len(rows))
        if len(scene.tries) == 1:
            raise InternalError("first.")
        await hangs().wait()

    scene = Scene(path, 8, None, limit=0.05)
    scene.combine = never
    combined = scene.run()
    assert combined.state is None
    assert "first. Finding out why took longer than 0 s." in combined.failure.message
    ids = [r.update_id for r in scene.rows]
    Trials(path, ("round 0", *ids)).note([*ids, "together"], "it failed before", 1e6)
    scene.tries.clear()
    assert "it failed before" in scene.run().failure.message
    assert scene.tries == [], "its time is over"


def test_the_deadline_follows_the_silence_that_is_allowed():
    assert limit_s(0.0, 1000) is None
    assert limit_s(10.0, 1) == 40.0
    assert limit_s(10.0, 1000) == 240.0
