"""Work that fails is tried again: with fewer images where memory lacks, once where a worker died."""

import asyncio
import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from adapters import half_method
from fcil_adapters.contract import registry
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.loop import _named
from fcil_adapters.worker.retry import UNKNOWN_BATCH, Effort, batch_of, persist
from fcil_adapters.worker.watchdog import LONGEST_STEP_S, SLOW_TIMES, StallTimer, oom_kills
from fcil_protocol.errors import (
    DataError,
    InternalError,
    OutOfMemory,
    WorkerDied,
    WorkerError,
    WorkerStalled,
)

HERE = str(Path(__file__).parents[1])
MB = 1_000_000


class Host:
    """A worker as a script: what each call ends in."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked, self.stops = [], 0

    async def call(self, op, fields, payloads, *, on_progress=None):
        self.asked.append(fields["context"]["micro_batch"] if "context" in fields else op)
        outcome = self.script.pop(0) if self.script else op
        if isinstance(outcome, Exception):
            raise outcome
        return {"did": outcome}, list(payloads)

    async def stop(self):
        self.stops += 1


def go(host, effort, *, batch=16, kind="train", said=None):
    fields = {"context": {"kind": kind, "micro_batch": None}, "other": 1}
    tell = (lambda _: None) if said is None else said.append
    return asyncio.run(persist(host, effort, "run", fields, [b"x"], batch=batch, notify=tell))


def lack():
    return OutOfMemory("the worker ran out of memory.", action="Free some.")


def test_a_lack_of_memory_halves_the_images_in_one_pass_and_what_fits_is_remembered():
    host, effort, said = Host(lack(), lack()), Effort(), []
    assert go(host, effort, said=said) == ({"did": "run"}, [b"x"])
    assert host.asked == [None, 8, 4]
    assert host.stops == 2, "what a worker holds is free only when it is gone"
    assert [line.rpartition("again with ")[2] for line in said] == [
        "8 images in one pass",
        "4 images in one pass",
    ]
    assert go(Host(), effort) == ({"did": "run"}, [b"x"])
    again = Host()
    go(again, effort)
    assert again.asked == [4]


def test_every_kind_of_work_has_a_measure_of_its_own():
    effort = Effort()
    go(Host(lack()), effort)
    other = Host(lack())
    go(other, effort, kind="evaluate", batch=256)
    assert other.asked == [None, 128]
    assert effort.fits == {"train": 8, "evaluate": 128}


def test_the_persons_own_limit_is_where_it_begins():
    host = Host(lack())
    go(host, Effort(own=6))
    assert host.asked == [6, 3]
    beyond = Host(lack())
    go(beyond, Effort(own=1000))
    assert beyond.asked == [1000, 8], "a limit above the batch is none"


def test_where_one_image_does_not_fit_the_lack_is_named_and_forgotten():
    host, effort = Host(*[lack() for _ in range(9)]), Effort()
    with pytest.raises(OutOfMemory, match="even with one image at a time. Free some"):
        go(host, effort)
    assert host.asked == [None, 8, 4, 2, 1]
    assert effort.most("train") is None, "what took the memory may be gone by the next round"


@pytest.mark.parametrize("error", [WorkerDied, WorkerStalled])
def test_a_death_is_tried_once_more_with_nothing_changed_then_named(error):
    host, said = Host(error("it ended.")), []
    assert go(host, Effort(), said=said)[0] == {"did": "run"}
    assert host.asked == [None, None]
    assert said == ["it ended. Trying once more"]
    twice = Host(error("it ended."), error("it ended."))
    with pytest.raises(error, match=r"it ended. \(2 times\)") as caught:
        go(twice, Effort())
    assert type(caught.value) is error
    assert len(twice.asked) == 2


def test_any_other_failure_is_final():
    host = Host(DataError("no such image."))
    with pytest.raises(DataError):
        go(host, Effort())
    assert len(host.asked) == 1


def test_work_without_images_is_tried_again_after_a_death_and_not_after_a_lack_of_memory():
    def call(*script):
        host = Host(*script)
        try:
            asyncio.run(persist(host, Effort(), "scan", {"data": "x"}))
        finally:
            host.script.clear()
        return host

    assert call(WorkerDied("it ended.")).asked == ["scan", "scan"]
    with pytest.raises(OutOfMemory, match="^the worker ran out of memory. Free some.$"):
        call(lack())


def test_a_methods_own_batch_is_known_or_a_large_one_taken():
    assert batch_of(SimpleNamespace(batch_size=64)) == 64
    assert batch_of(SimpleNamespace()) == UNKNOWN_BATCH
    assert batch_of(SimpleNamespace(batch_size=0)) == UNKNOWN_BATCH


@pytest.mark.parametrize("torch", [False, True])
@pytest.mark.full
def test_a_real_limit_on_memory_is_met_with_fewer_images(torch):
    """The limit of this process leaves room for 5 images of 100 MB; the batch has 32."""
    effort, said = Effort(), []
    fields = {
        "context": {"kind": "train", "micro_batch": None},
        "batch": 32,
        "each": 100 * MB,
        "room": 550 * MB,
        "torch": torch,
    }

    async def work():
        host = WorkerHost(
            "faulty_worker", name="test", env={"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1"}
        )
        try:
            return await persist(host, effort, "allocate", fields, (), batch=32, notify=said.append)
        finally:
            await host.stop()

    reply, _ = asyncio.run(work())
    assert reply["images"] == 4
    assert effort.fits == {"train": 4}
    assert len(said) == 3
    assert all("ran out of memory" in line for line in said)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        type("OutOfMemoryError", (RuntimeError,), {})(
            "CUDA out of memory. Tried to allocate 2 GiB"
        ),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_known_in_all_its_forms(error):
    assert type(_named(error)) is OutOfMemory


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "full")],
    ids=str,
)
def test_another_failure_is_not_taken_for_one_of_memory(error):
    assert type(_named(error)) is InternalError


def test_a_failure_in_a_methods_own_lines_names_the_method_and_the_line(monkeypatch):
    monkeypatch.setattr(registry, "load_method", lambda _name: half_method.METHOD)
    with pytest.raises(AttributeError) as raised:
        half_method.Aggregator().aggregate(None, None, [None])
    error = _named(raised.value, "half_method")
    assert type(error) is WorkerError
    words = r"the method half_method failed with AttributeError: .* \(/.*/half_method.py:\d+\)\."
    assert re.fullmatch(words, error.message)
    assert error.action == "See the worker's log."


def test_a_failure_elsewhere_is_not_the_methods(monkeypatch):
    monkeypatch.setattr(registry, "load_method", lambda _name: half_method.METHOD)
    assert _named(KeyError(), "half_method").message == "the worker failed with KeyError."


# --- silence --------------------------------------------------------------------------------


def test_silence_is_summed_and_ends_with_a_word():
    quiet = StallTimer(80.0)
    assert quiet.step_s == LONGEST_STEP_S
    steps = [quiet.passed(5.0) for _ in range(16)]
    assert steps == [False] * 15 + [True]
    quiet.heard()
    assert not quiet.passed(5.0)


def test_announced_work_may_be_silent_for_longer_until_the_next_word():
    quiet = StallTimer(10.0)
    quiet.heard("loading")
    assert quiet.allowed_s == 10.0 * SLOW_TIMES
    assert not any(quiet.passed(quiet.step_s) for _ in range(8))
    quiet.heard()
    assert quiet.allowed_s == 10.0


def test_an_hour_in_which_this_process_did_not_run_is_no_silence_of_the_worker():
    quiet = StallTimer(60.0)
    assert not quiet.passed(3600.0)
    assert not quiet.passed(quiet.step_s)


def test_what_the_worker_waits_for_is_not_its_silence():
    quiet = StallTimer(1.0)
    quiet.mark_waiting(ours=True)
    assert not any(quiet.passed(1.0) for _ in range(100))
    quiet.mark_waiting(ours=False)
    assert any(quiet.passed(1.0) for _ in range(100))


def test_the_kernels_own_count_is_read_where_there_is_one(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill 12\n")
    assert oom_kills(counters) == 12
    counters.write_text("nr_free_pages 1\n")
    assert oom_kills(counters) is None
    assert oom_kills(tmp_path / "absent") is None
    if os.path.exists("/proc/vmstat"):
        assert oom_kills() is None or oom_kills() >= 0
