"""Workers that stand still for a while, give way, and are held to a bound of memory."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fcil_adapters.resources import memory_limit as memory_bound
from fcil_adapters.resources import priority
from fcil_adapters.worker import host as worker_host
from fcil_adapters.worker.exit_reason import End, exit_error
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.retry import Effort, persist
from fcil_adapters.worker.suspend import Suspension
from fcil_protocol.errors import ConfigError, OutOfMemory, WorkerDied
from fcil_protocol.process.child import GONE
from orphans import ends_with_its_parent

HERE = str(Path(__file__).parents[1])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a worker is stopped on Linux only")


@contextlib.asynccontextmanager
async def hosted(**options):
    host = WorkerHost("resting_worker", name="test", env={"PYTHONPATH": HERE}, **options)
    try:
        yield host
    finally:
        await host.stop()


async def until(true):
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


def stands_still(pid):
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class TestRest:
    def test_time_at_rest_is_added_up(self):
        clock = Clock()
        rest = Suspension(clock)
        for held, worked in ((5.0, 1.0), (2.0, 10.0)):
            rest.suspend()
            rest.suspend()
            clock.now += held
            rest.resume()
            rest.resume()
            clock.now += worked
        assert rest.rested_s == 7.0
        rest.suspend()
        clock.now += 1.0
        assert rest.rested_s == 8.0
        assert not rest.allowed.is_set()

    @LINUX
    def test_a_worker_stands_still_in_the_middle_of_its_work_and_goes_on_there(self):
        async def go():
            async with hosted() as host:
                seen = []

                def hear(progress):
                    seen.append(progress.done)
                    if progress.done == 3:
                        host.rest.suspend()

                work = asyncio.create_task(host.call("steps", {"n": 500}, on_progress=hear))
                await until(lambda: 3 in seen)
                pid = host.pid
                await until(lambda: stands_still(pid))
                assert not work.done()
                host.rest.resume()
                await work
                assert (seen, host.pid, host.starts) == ([*range(500)], pid, 1)

        asyncio.run(go())

    @LINUX
    def test_rest_is_no_lack_of_progress(self):
        async def go():
            async with hosted(stall_s=60) as host:
                await host.call("steps", {"n": 1})
                host._stall_s = 0.2
                loop = asyncio.get_running_loop()

                def hear(_):
                    if host.rest.rested_s == 0:
                        host.rest.suspend()
                        loop.call_later(0.8, host.rest.resume)

                await host.call("steps", {"n": 20}, on_progress=hear)
                assert host.rest.rested_s > 0.4
                host._stall_s = 60

        asyncio.run(go())

    def test_a_call_waits_for_the_end_of_the_rest(self):
        async def go():
            async with hosted() as host:
                host.rest.suspend()
                work = asyncio.create_task(host.call("steps", {"n": 1}))
                await until(lambda: host.busy)
                assert (host.pid, work.done()) == (None, False)
                host.rest.resume()
                await work
                host.rest.suspend()
                waits = asyncio.create_task(host.call("steps", {"n": 1}))
                await until(lambda: host.busy)
                waits.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waits
                assert host.pid is not None, "nothing had begun, so nothing was killed"

        asyncio.run(go())

    @LINUX
    def test_a_worker_at_rest_is_stopped_in_order(self, monkeypatch):
        monkeypatch.setattr(worker_host, "STOP_S", 600.0)  # a busy machine takes its time

        async def go():
            async with hosted() as host:
                await host.call("steps", {"n": 1})
                process = host._process
                host.rest.suspend()
                await until(lambda: stands_still(process.pid))
                await host.stop()
                # Its conversation ends and its parent's pipe closes at once: either may be first.
                assert process.returncode in (0, GONE), "it ended by itself, and was not killed"

        asyncio.run(go())

    @LINUX
    def test_a_worker_at_rest_can_be_killed_and_another_rests_from_its_first_word(self):
        async def go():
            async with hosted() as host:
                await host.call("steps", {"n": 1})
                host.rest.suspend()
                host.kill()
                host.rest.resume()
                work = asyncio.create_task(
                    host.call("hang", {}, on_progress=lambda _: None),
                )
                await until(lambda: host.pid is not None)
                host.rest.suspend()
                await until(lambda: stands_still(host.pid))
                work.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await work
                assert host.pid is None

        asyncio.run(go())

    @LINUX
    def test_a_worker_at_rest_ends_with_a_daemon_that_is_killed(self):
        script = (
            "import asyncio\n"
            "from fcil_adapters.worker.host import WorkerHost\n"
            "async def go():\n"
            "    host = WorkerHost('resting_worker', name='test')\n"
            "    await host.call('steps', {'n': 1})\n"
            "    host.rest.suspend()\n"
            "    print(host.pid, flush=True)\n"
            "    await asyncio.Event().wait()\n"
            "asyncio.run(go())\n"
        )
        ends_with_its_parent(script, PYTHONPATH=HERE)


class TestGivingWay:
    def test_a_worker_gives_way_at_the_processor_and_at_the_disk(self):
        async def go():
            async with hosted(nice=7) as host:
                place, _ = await host.call("place", {})
                group = Path(f"/proc/{host.pid}/autogroup")
                with contextlib.suppress(OSError):
                    return place, await asyncio.to_thread(group.read_text)
                return place, ""

        place, group = asyncio.run(go())
        assert place["nice"] == min(19, os.nice(0) + 7)
        if sys.platform == "linux":
            assert place["disk"] == [int(psutil.IOPRIO_CLASS_BE), 7]
        # Every session is a group of its own, in which alone niceness would count.
        assert not group or group.endswith(f"nice {place['nice']}\n")

    def test_where_the_system_refuses_it_works_all_the_same(self, monkeypatch, tmp_path):
        monkeypatch.setattr(priority, "AUTOGROUP", tmp_path / "none" / "autogroup")
        monkeypatch.setattr(os, "nice", lambda _: 5)

        def refuse(*_):
            raise psutil.AccessDenied

        monkeypatch.setattr(psutil.Process, "ionice", refuse, raising=False)
        priority.lower_priority(5)


def fields(each, batch=16, **more):
    return {"context": {"kind": "train"}, "batch": batch, "each": each, **more}


@LINUX
class TestBound:
    MEMORY = 400_000_000

    @pytest.fixture(autouse=True)
    def daemon(self, monkeypatch):
        """The daemon is this process, which may have grown large over many tests."""
        monkeypatch.setattr(worker_host, "own_memory", lambda: memory_bound.DAEMON_BYTES)

    def test_what_does_not_fit_is_done_with_fewer_images_at_once(self):
        said, effort = [], Effort()

        async def go():
            async with hosted(memory_bytes=self.MEMORY) as host:
                return await persist(
                    host, effort, "grow", fields(30_000_000), batch=16, notify=said.append
                )

        result, _ = asyncio.run(go())
        assert result["bytes"] == 30_000_000 * effort.fits["train"]
        assert effort.fits["train"] in (1, 2, 4)
        assert "It needs --max-memory" in said[0]
        assert "at least, and has 400 MB" in said[0]

    def test_when_not_even_one_fits_the_sentence_says_how_much_is_needed(self):
        async def go():
            async with hosted(memory_bytes=self.MEMORY) as host:
                await persist(host, Effort(1), "grow", fields(400_000_000))

        with pytest.raises(OutOfMemory, match=r"It needs --max-memory [5-9]\d\d MB at least"):
            asyncio.run(go())

    def test_a_bound_below_what_is_loaded_is_refused_at_once(self):
        async def go():
            async with hosted(memory_bytes=self.MEMORY) as host:
                await persist(host, Effort(), "grow", fields(1, least=10**9))

        with pytest.raises(ConfigError, match=r"max-memory is 400 MB, and .* at least 1\.\d GB"):
            asyncio.run(go())

    @pytest.mark.full
    def test_without_a_bound_nothing_is_refused(self):
        async def go():
            async with hosted() as host:
                return await host.call(
                    "grow", {**fields(30_000_000), "context": {"micro_batch": 16}}
                )

        assert asyncio.run(go())[0]["bytes"] == 480_000_000

    @pytest.mark.parametrize(
        ("words", "size"),
        [
            ("can't allocate memory: you tried to allocate 1572864 bytes. Error", 1572864),
            ("Unable to allocate 1.50 GiB for an array with shape", 3 << 29),
            ("Unable to allocate 381. MiB for an array with shape", 381 << 20),
            ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 << 20),
            ("", 0), ("std::bad_alloc", 0),
        ],
    )  # fmt: skip
    def test_libraries_say_what_they_asked_for(self, words, size):
        assert memory_bound.requested_bytes(words) == size

    def test_a_lack_is_never_told_as_less_than_the_bound(self):
        memory_bound.configure(500_000_000, 120_000_000)
        try:
            assert memory_bound.required_bound(10) == 510_000_000
            assert memory_bound.required_bound(600_000_001) == 730_000_000
        finally:
            memory_bound.configure(0, 0)


class TestEnds:
    def test_native_code_that_was_refused_memory_ends_as_a_lack_of_it(self, tmp_path):
        log = tmp_path / "log"
        for code, words in (
            (-signal.SIGABRT, "terminate called"), (1, "libgomp: Thread creation failed: x"),
            (1, "MemoryError: Unable to allocate internal buffer"),
        ):  # fmt: skip
            log.write_text(f"much\n{words}\n")
            bounded = exit_error(End("client", code, bound=500_000_000), log)
            assert isinstance(bounded, OutOfMemory)
            assert "beyond --max-memory 500 MB" in bounded.message
            assert type(exit_error(End("client", code), log)) is WorkerDied, (
                "without a bound a crash"
            )
        log.write_text("ValueError: x\n")
        assert type(exit_error(End("client", 1, bound=500_000_000), log)) is WorkerDied


def test_a_tighter_bound_of_the_system_stays():
    code = (
        "import resource\n"
        "from fcil_adapters.resources import memory_limit as memory_bound\n"
        "limits = (2_000_000_000, 2_000_000_000)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, limits)\n"
        "memory_bound.configure(4_000_000_000, 120_000_000)\n"
        "memory_bound.enforce()\n"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == limits\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("device", "number"), [("cuda", 1), ("cuda:0", 0)])
def test_the_bound_of_a_gpu_names_it_by_number(monkeypatch, device, number):
    """Torch's own check of the device runs; only what needs a GPU is replaced."""
    torch = pytest.importorskip("torch")
    bounds = []
    gpus = [
        SimpleNamespace(total_memory=10_000_000_000),
        SimpleNamespace(total_memory=8_000_000_000),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: gpus[n])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda *given: bounds.append(given), raising=False
    )
    monkeypatch.setattr(memory_bound, "_mine", memory_bound._Bound())
    memory_bound.configure(4_000_000_000, 0)
    memory_bound.enforce(device)
    assert bounds == [(4_000_000_000 / gpus[number].total_memory, number)]
