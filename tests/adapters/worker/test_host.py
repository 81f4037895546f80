"""A worker may fail in any way: the daemon gets one named error, and the next call works."""

import asyncio
import contextlib
import errno
import os
import select
import signal
import stat
import struct
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

from fcil_adapters.contract import Progress
from fcil_adapters.worker import host as worker_host
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.loop import Call
from fcil_protocol.errors import (
    DataError,
    InternalError,
    OutOfMemory,
    StorageError,
    TooLarge,
    UsageError,
    WireError,
    WorkerDied,
    WorkerError,
    WorkerStalled,
)
from orphans import ends_with_its_parent
from planted import plant

HERE = str(Path(__file__).parents[1])


@contextlib.asynccontextmanager
async def hosted(**options):
    env = {"PYTHONPATH": HERE, **options.pop("env", {})}
    host = WorkerHost("faulty_worker", name="test", env=env, **options)
    try:
        yield host
    finally:
        await host.stop()


@contextlib.asynccontextmanager
async def impatient():
    """Host a worker that has started, and may then be silent for a fifth of a second."""
    async with hosted(stall_s=60) as host:
        await pid_of(host)
        host._stall_s = 0.2
        yield host
        host._stall_s = 60


def run(coroutine):
    return asyncio.run(coroutine)


async def pid_of(host):
    fields, _ = await host.call("echo", {})
    return fields["pid"]


def test_calls_bring_fields_and_payloads_and_keep_the_process():
    async def go():
        async with hosted() as host:
            assert host.pid is None
            fields, payloads = await host.call("echo", {"n": [1, 2]}, [b"abc", b""])
            assert (fields["n"], payloads) == ([1, 2], [b"abc", b""])
            assert host.pid == fields["pid"] == await pid_of(host)
            assert not host.busy
        assert host.pid is None

    run(go())


def test_no_module_in_the_current_directory_is_run(tmp_path, monkeypatch):
    """As `PIL.py` beside the class folders of a data set would be."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(plant(tmp_path / "data", tmp_path / "marks"))

    async def go():
        async with hosted() as host:
            await pid_of(host)

    run(go())
    assert os.listdir(tmp_path / "marks") == []


def test_errors_of_the_worker_arrive_by_their_class_and_the_worker_goes_on():
    async def go():
        async with hosted() as host:
            pid = await pid_of(host)
            with pytest.raises(DataError) as caught:
                await host.call("refuse", {})
            assert (caught.value.message, caught.value.action) == ("no such image.", "Look again.")
            with pytest.raises(OutOfMemory, match="ran out of memory.*smaller micro-batch"):
                await host.call("run_out_of_memory", {})
            with pytest.raises(InternalError, match="no operation 'nothing'"):
                await host.call("nothing", {})
            with pytest.raises(TooLarge, match="exceeds"):
                await host.call("too_large", {})
            with pytest.raises(InternalError, match="worker failed with TypeError"):
                await host.call("nothing_to_send", {})
            assert await pid_of(host) == pid

    run(go())


def test_the_end_of_a_worker_is_not_explained_by_an_earlier_error(tmp_path):
    async def go():
        async with hosted(log=tmp_path / "worker.log", memory_bytes=1 << 40) as host:
            for _ in range(2):
                with pytest.raises(InternalError):
                    await host.call("raise_unexpected", {})  # its traceback is in the log
                with pytest.raises(WorkerDied, match=r"ended with exit code 3\.$"):
                    await host.call("end", {"signal": 0, "code": 3})

    run(go())
    assert (tmp_path / "worker.log").read_text().count("Traceback") == 2


def test_without_a_descriptor_for_a_call_the_worker_is_kept(monkeypatch):
    def no_file(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    async def go():
        async with hosted() as host:
            pid = await pid_of(host)
            monkeypatch.setattr("fcil_adapters.worker.memory_files._anonymous", no_file)
            with pytest.raises(StorageError, match="Too many open files") as caught:
                await host.call("echo", {}, [b"payload"])
            assert "ulimit -n" in caught.value.action
            monkeypatch.undo()
            assert await pid_of(host) == pid
            await host.stop()
            monkeypatch.setattr("fcil_adapters.worker.host.socket.socketpair", no_file)
            with pytest.raises(WorkerError, match="cannot be started: Too many open files"):
                await host.call("echo", {})
            monkeypatch.undo()
            assert await pid_of(host) != pid

    run(go())


def test_a_traceback_stays_in_the_log_which_only_its_owner_reads(tmp_path):
    log = tmp_path / "worker.log"

    async def go():
        async with hosted(log=log) as host:
            with pytest.raises(InternalError) as caught:
                await host.call("raise_unexpected", {})
            return str(caught.value)

    text = run(go())
    assert text == (f"the worker failed with ValueError: something with two lines. See {log}.")
    assert "Traceback" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_death_in_the_middle_of_a_call_is_named_and_the_next_call_works():
    deaths = [
        (9, 0, "killed .signal 9., perhaps for lack of memory"),
        (6, 0, "by signal 6 .SIGABRT."),
        (0, 3, "exit code 3"),
    ]

    async def go():
        async with hosted(log=Path(os.devnull)) as host:
            for number, code, words in deaths:
                with pytest.raises(WorkerDied, match=words):
                    await host.call("end", {"signal": number, "code": code})
                assert host.pid is None
            assert await pid_of(host) == host.pid

    run(go())


def test_a_kill_9_from_outside_in_the_middle_of_a_call_is_named():
    async def go():
        async with hosted() as host:
            seen = []

            def strike(progress):
                seen.append(progress)
                os.kill(host.pid, signal.SIGKILL)

            with pytest.raises(WorkerDied, match="signal 9"):
                await host.call("hang", {}, on_progress=strike)
            assert seen == [Progress(1, 2, 0.5)]
            assert (host.starts, host.deaths) == (1, 1)

    run(go())


def test_a_worker_that_died_between_two_calls_is_replaced_without_a_word():
    async def go():
        async with hosted() as host:
            pid = await pid_of(host)
            watch = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([watch], [], [], 30)
            os.close(watch)
            assert await pid_of(host) != pid
            assert (host.starts, host.deaths) == (2, 1)

    run(go())


def test_an_end_that_was_asked_for_is_no_death():
    async def go():
        async with hosted() as host:
            await pid_of(host)
            await host.stop()
            await pid_of(host)
            host.kill()
            await pid_of(host)
            assert (host.starts, host.deaths) == (3, 0)

    run(go())


def test_a_cancelled_call_kills_the_hanging_worker():
    async def go():
        async with hosted() as host:
            started = asyncio.Event()
            pids = []

            def note(_):
                pids.append(host.pid)
                started.set()

            task = asyncio.ensure_future(host.call("hang", {}, on_progress=note))
            await started.wait()
            watch = os.pidfd_open(pids[0])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert select.select([watch], [], [], 30)[0]
            os.close(watch)
            assert await pid_of(host) != pids[0]

    run(go())


def test_a_worker_without_a_word_for_too_long_is_ended_and_named():
    async def go():
        async with impatient() as host:
            with pytest.raises(WorkerStalled, match="no progress for 0 s, and was ended.*log"):
                await host.call("hang", {})
            assert (host.pid, host.deaths) == (None, 1)
        async with impatient() as host:
            with pytest.raises(WorkerStalled, match="for 1 s while loading nothing"):
                await host.call("load", {})

    run(go())


def test_a_worker_that_hangs_writes_down_where_before_it_is_ended(tmp_path):
    log = tmp_path / "worker.log"

    async def go():
        async with hosted(stall_s=60, log=log) as host:
            await pid_of(host)
            host._stall_s = 0.2
            with pytest.raises(WorkerStalled):
                await host.call("hang", {})

    run(go())
    assert "in hang" in log.read_text()


def test_a_worker_that_is_stopped_in_the_middle_of_its_work_is_ended():
    async def go():
        async with impatient() as host:
            stop = lambda _: os.kill(host.pid, signal.SIGSTOP)  # noqa: E731
            with pytest.raises(WorkerStalled):
                await host.call("hang", {}, on_progress=stop)
            assert host.pid is None

    run(go())


def test_a_worker_that_says_a_word_now_and_then_may_take_as_long_as_it_likes():
    async def go():
        async with hosted(stall_s=60) as host:
            await pid_of(host)
            host._stall_s = 1.0
            await host.call("murmur", {"n": 8, "every_s": 0.25})

    run(go())


def test_a_worker_that_waits_for_the_daemon_is_not_blamed_for_it():
    async def answer(_):
        await asyncio.sleep(1.0)  # a slow disk
        return {}, ()

    async def go():
        async with impatient() as host:
            await host.call("ask_and_wait", {}, on_request=answer)

    run(go())


def test_a_kill_while_the_kernel_ran_out_of_memory_is_told_as_such(monkeypatch):
    counts = iter([7, 8])
    monkeypatch.setattr(worker_host, "oom_kills", lambda: next(counts))

    async def go():
        async with hosted() as host:
            with pytest.raises(OutOfMemory, match="kernel killed the test worker"):
                await host.call("end", {"signal": 9, "code": 0})

    run(go())


def test_killing_the_worker_ends_the_call_under_way_by_name():
    async def go():
        async with hosted() as host:
            with pytest.raises(WorkerDied, match="was stopped"):
                await host.call("hang", {}, on_progress=lambda _: host.kill())
            assert await pid_of(host) == host.pid
            host.kill()
            assert host.pid is None

    run(go())


def test_progress_is_sent_at_most_ten_times_a_second_and_always_at_the_end(monkeypatch):
    sent = []
    now = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(now) / 32)  # 31 ms for a step
    call = Call({}, [], SimpleNamespace(send=sent.append))
    for i in range(11):
        call.progress(Progress(i + 1, 11))
    assert [message["progress"]["done"] for message in sent] == [1, 5, 9, 11]


def test_progress_comes_through_and_need_not_be_listened_to():
    async def go():
        seen = []
        async with hosted() as host:
            await host.call("count", {"n": 1}, on_progress=seen.append)
            await host.call("count", {"n": 1})
        return seen

    assert run(go()) == [Progress(1, 1)]


def test_the_worker_may_ask_back_again_and_again():
    async def answer(fields):
        return {"i": fields["update"]}, [b"payload %d" % fields["update"]]

    async def go():
        async with hosted() as host:
            fields, _ = await host.call("gather", {"n": 2}, on_request=answer)
            one = lambda f: ({"i": f["update"]}, [b""])  # noqa: E731  a plain function may answer
            await host.call("gather", {"n": 1}, on_request=one)
            return fields["got"]

    expected = [[i, b"payload %d" % i] for i in (0, 1)]
    assert run(go()) == expected * 2


def test_an_error_while_answering_is_raised_to_the_caller_and_the_worker_goes_on():
    def answer(fields):
        raise UsageError(f"update {fields['update']} is gone.")

    async def go():
        async with hosted() as host:
            pid = await pid_of(host)
            with pytest.raises(UsageError, match="update 0 is gone"):
                await host.call("gather", {"n": 1}, on_request=answer)
            with pytest.raises(InternalError, match="offers nothing"):
                await host.call("gather", {"n": 1})
            assert await pid_of(host) == pid

    run(go())


def test_a_worker_may_handle_a_refused_request_and_go_on_asking():
    def answer(fields):
        if fields["update"] == 0:
            raise DataError("gone.")
        return {}, ()

    async def go():
        async with hosted() as host:
            assert await host.call("ask_twice", {}, on_request=answer) == ({}, [])

    run(go())


def test_garbage_from_the_worker_is_refused_and_the_worker_replaced():
    garbage = [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 2) + b"\xc1\xc1",
        struct.pack("<I", 11) + msgpack.packb({"m": {"odd": 1}, "s": []}),
    ]

    async def go():
        async with hosted() as host:
            for data in garbage:
                with pytest.raises(WireError):
                    await host.call("garbage", {"data": data})
                assert host.pid is None
            assert await pid_of(host) == host.pid

    run(go())


def test_calls_wait_for_one_another():
    async def go():
        async with hosted() as host:
            calls = [host.call("echo", {"n": i}) for i in range(5)]
            return [fields["n"] for fields, _ in await asyncio.gather(*calls)]

    assert run(go()) == [0, 1, 2, 3, 4]


def test_an_idle_worker_is_released_and_a_prompt_next_call_keeps_it():
    async def go():
        async with hosted(idle_s=0) as host:
            first = await pid_of(host)
            assert await pid_of(host) == first
            for _ in range(3):
                await asyncio.sleep(0)
            assert host.pid is None
            assert await pid_of(host) != first

    run(go())


def test_a_call_that_is_cancelled_while_the_device_rests_leaves_no_idle_worker():
    async def go():
        async with hosted(idle_s=0) as host:
            await pid_of(host)
            host.rest.suspend()
            call = asyncio.create_task(host.call("echo", {"n": 1}))
            await asyncio.sleep(0)
            assert host.pid is not None
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            for _ in range(3):
                await asyncio.sleep(0)
            assert host.pid is None

    run(go())


def test_the_worker_has_its_own_threads_niceness_and_session_and_no_file_of_ours(tmp_path):
    async def go():
        secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
        os.set_inheritable(secret, True)
        try:
            async with hosted(threads=3, nice=5, env={"FCIL_TEST": "yes"}) as host:
                fields, _ = await host.call("environment", {})
        finally:
            os.close(secret)
        return fields

    fields = run(go())
    assert fields["threads"] == "3"
    assert fields["extra"] == "yes"
    assert fields["nice"] == min(19, os.nice(0) + 5)
    assert fields["session"] is True
    assert fields["oom"] == 500  # the kernel ends it before the daemon
    assert str(tmp_path / "secret") not in fields["files"]


def test_a_module_that_cannot_start_is_named_with_its_last_words(tmp_path):
    async def go():
        host = WorkerHost("no_such_worker", name="test", log=tmp_path / "worker.log")
        with pytest.raises(WorkerDied, match=r"exit code 1: .*No module named .*worker\.log"):
            await host.call("echo", {})
        await host.stop()

    run(go())


def test_a_long_log_is_set_aside_while_the_worker_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_host, "MAX_LOG_BYTES", 100)
    log = tmp_path / "worker.log"

    async def go():
        async with hosted(log=log) as host:
            pid = await pid_of(host)
            for _ in range(3):
                await host.call("talk", {"n": 200})
            assert await pid_of(host) == pid

    run(go())
    assert log.stat().st_size < 300
    assert (tmp_path / "worker.log.1").stat().st_size == 201


def test_a_hanging_worker_ends_when_its_pipe_closes():
    async def go():
        async with hosted() as host:
            with pytest.raises(WorkerDied, match="exit code 143"):
                await host.call("hang", {}, on_progress=lambda _: host._process.ask())

    run(go())


def test_a_hanging_worker_ends_with_its_daemon():
    script = (
        "import asyncio, sys\n"
        "from fcil_adapters.worker.host import WorkerHost\n"
        f"host = WorkerHost('faulty_worker', name='x', env={{'PYTHONPATH': {HERE!r}}})\n"
        "say = lambda _: print(host.pid, flush=True)\n"
        "asyncio.run(host.call('hang', {}, on_progress=say))\n"
    )
    ends_with_its_parent(script)
