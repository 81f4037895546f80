"""Messages and payloads come through the pipe whole; anything else is refused by name."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import struct
import threading

import msgpack
import numpy as np
import pytest

from fcil_adapters.worker import pipe as worker_pipe
from fcil_adapters.worker.memory_files import MAPPED_BYTES, MemoryFile
from fcil_adapters.worker.pipe import AsyncPipe, Pipe
from fcil_protocol.errors import FcilError, StorageError, TooLarge, WireError
from fcil_protocol.payloads.payload import Payload, unpack


@contextlib.contextmanager
def pair():
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def open_fds():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def frame(fields, sizes=()):
    body = msgpack.packb({"m": fields, "s": list(sizes)}, use_bin_type=True)
    return struct.pack("<I", len(body)) + body


def test_fields_and_payloads_come_through_in_order():
    payload = Payload({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"task": 3})
    with pair() as (a, b):
        Pipe(a).send({"op": "x", "n": [1, 2.5, None, b"\0"]}, [payload, b"", b"raw"])
        Pipe(a).send({"second": True})
        fields, (first, empty, raw) = Pipe(b).recv()
        assert fields == {"op": "x", "n": [1, 2.5, None, b"\0"]}
        assert np.array_equal(unpack(first).tensors["x"], payload.tensors["x"])
        assert unpack(first).meta == {"task": 3}
        assert (empty, raw) == (b"", b"raw")
        assert Pipe(b).recv() == ({"second": True}, [])


def test_a_path_that_is_no_utf8_comes_through():
    path = os.fsdecode(b"/data/\xff\xfe")
    with pair() as (a, b):
        Pipe(a).send({"path": path})
        assert Pipe(b).recv()[0]["path"] == path


def test_a_payload_larger_than_the_socket_buffer_comes_through_without_a_reader():
    data = os.urandom(1 << 20) * 20
    with pair() as (a, b):
        Pipe(a).send({}, [data])
        assert Pipe(b).recv() == ({}, [data])


def test_large_payloads_are_mapped_each_by_itself_and_their_memory_goes_with_the_last_view():
    large = [os.urandom(MAPPED_BYTES + n) for n in (0, 5)]
    with pair() as (a, b):
        before = open_fds()
        Pipe(a).send({}, [large[0], b"small", large[1], b""])
        _, got = Pipe(b).recv()
        assert got == [large[0], b"small", large[1], b""]
        assert [type(blob) for blob in got] == [memoryview, bytes, memoryview, bytes]
        assert got[0].readonly
        assert open_fds() == before + 2
        del got[0]
        assert open_fds() == before + 1
        del got
        assert open_fds() == before


def test_a_large_payload_that_its_sender_can_still_change_is_copied():
    data = os.urandom(MAPPED_BYTES)
    fd = os.memfd_create("unsealed")
    os.write(fd, data)
    with pair() as (a, b):
        message = frame({}, [len(data)])
        socket.send_fds(a, [message[:4]], [fd])
        a.sendall(message[4:])
        _, (got,) = Pipe(b).recv()
    os.ftruncate(fd, 0)  # would end a process that had it mapped
    os.close(fd)
    assert got == data


def test_without_room_for_a_mapping_a_large_payload_is_copied(monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.EMFILE, "no descriptor")

    data = os.urandom(MAPPED_BYTES)
    with pair() as (a, b):
        Pipe(a).send({}, [data])
        monkeypatch.setattr("mmap.mmap", full)
        assert Pipe(b).recv() == ({}, [data])


def test_a_payload_written_piece_by_piece_travels_in_the_memory_it_was_written_to():
    data = os.urandom(MAPPED_BYTES)
    with pair() as (a, b):
        before = open_fds()
        file = MemoryFile()
        for start in range(0, len(data), 100_000):
            file.write(data[start : start + 100_000])
        Pipe(a).send({"n": 1}, [file])
        assert Pipe(b).recv() == ({"n": 1}, [data])
        file.close()  # it was given away: this does nothing
        assert open_fds() == before


def test_a_memory_file_that_is_never_sent_is_freed():
    before = open_fds()
    MemoryFile().write(b"x")
    assert open_fds() == before


def test_the_memory_file_has_no_name_and_cannot_be_changed():
    with pair() as (a, b):
        Pipe(a).send({}, [b"secret"])
        _, (fd,), _, _ = socket.recv_fds(b, 4, 1)
        try:
            assert not os.path.exists(os.readlink(f"/proc/self/fd/{fd}"))
            for change in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0)):
                with pytest.raises(PermissionError):
                    change()
        finally:
            os.close(fd)


def test_without_memory_files_an_unnamed_private_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pair() as (a, b):
        Pipe(a).send({}, [b"one", b"two"])
        assert list(tmp_path.iterdir()) == []
        assert Pipe(b).recv() == ({}, [b"one", b"two"])


def test_no_descriptor_is_left_open_on_either_side():
    with pair() as (a, b):
        before = open_fds()
        for _ in range(5):
            Pipe(a).send({}, [b"x" * 100])
            Pipe(b).recv()
        assert open_fds() == before


@pytest.mark.parametrize("cut", [0, 2, 4, 9])
def test_an_end_of_file_anywhere_is_an_eoferror(cut):
    with pair() as (a, b):
        a.sendall(frame({"some": "fields"})[:cut])
        a.close()
        with pytest.raises(EOFError, match="closed"):
            Pipe(b).recv()


def test_writing_to_a_closed_pipe_is_a_broken_pipe():
    with pair() as (a, b):
        b.close()
        with pytest.raises(BrokenPipeError):
            Pipe(a).send({"x": 1})


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1) + b"\xc1",
        struct.pack("<I", 3) + msgpack.packb([1, 2]),
        struct.pack("<I", 1) + msgpack.packb({}),
        frame([1]),
        frame({1: 2}),
        frame({}, [-1]),
        frame({}, ["x"]),
        frame({}, [4]),
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pair() as (a, b):
        a.sendall(data)
        with pytest.raises(WireError):
            Pipe(b).recv()


def test_random_bytes_are_refused_or_wait_for_more():
    rng = np.random.default_rng(0)
    for _ in range(200):
        body = rng.bytes(int(rng.integers(1, 40)))
        with pair() as (a, b):
            a.sendall(struct.pack("<I", len(body)) + body)
            a.close()
            with pytest.raises((FcilError, EOFError)):
                Pipe(b).recv()


def test_an_oversized_message_is_refused_by_its_length_alone():
    with pair() as (a, b):
        a.sendall(struct.pack("<I", worker_pipe.MAX_MESSAGE_BYTES + 1))
        with pytest.raises(TooLarge, match="exceeds"):
            Pipe(b).recv()


def test_nothing_is_sent_of_what_exceeds_a_limit(monkeypatch):
    monkeypatch.setattr(worker_pipe, "MAX_MESSAGE_BYTES", 100)
    monkeypatch.setattr(worker_pipe, "MAX_PAYLOAD_BYTES", 10)
    monkeypatch.setattr(worker_pipe, "MAX_PAYLOADS", 2)
    with pair() as (a, b):
        for fields, payloads in (({"x": "y" * 200}, []), ({}, [b"x" * 11]), ({}, [b""] * 3)):
            with pytest.raises(TooLarge):
                Pipe(a).send(fields, payloads)
        b.setblocking(False)
        with pytest.raises(BlockingIOError):
            b.recv(1)


@pytest.mark.parametrize("size", [3, 5])
def test_a_file_of_another_size_than_announced_is_refused(size):
    fd = os.memfd_create("x")
    os.write(fd, b"x" * size)
    with pair() as (a, b):
        data = frame({}, [4])
        socket.send_fds(a, [data[:4]], [fd])
        a.sendall(data[4:])
        os.close(fd)
        before = open_fds()
        with pytest.raises(WireError, match="payloads of 4 bytes"):
            Pipe(b).recv()
        assert open_fds() <= before


def test_files_that_nobody_announced_are_refused_and_closed():
    fd = os.memfd_create("x")
    with pair() as (a, b):
        before = open_fds()
        data = frame({})
        socket.send_fds(a, [data[:4]], [fd, fd])
        a.sendall(data[4:])
        with pytest.raises(WireError, match="2 files"):
            Pipe(b).recv()
        assert open_fds() == before
    os.close(fd)


def test_the_asynchronous_end_talks_to_the_blocking_one():
    def echo(sock):
        pipe = Pipe(sock)
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(*pipe.recv())

    async def talk(sock):
        pipe = AsyncPipe(sock)
        big = {"text": "x" * 3_000_000}  # more than a socket holds at once
        for fields, payloads in (({"n": 1}, []), (big, [b"y" * 5_000_000, b""])):
            await pipe.send(fields, payloads)
            assert await pipe.recv() == (fields, payloads)
        pipe.hang_up()
        with pytest.raises(EOFError):
            await pipe.recv()

    with pair() as (a, b):
        thread = threading.Thread(target=echo, args=(b,))
        thread.start()
        asyncio.run(talk(a))
        thread.join()


def test_hanging_up_wakes_a_waiting_recv():
    async def wait(sock):
        pipe = AsyncPipe(sock)
        waiting = asyncio.ensure_future(pipe.recv())
        await asyncio.sleep(0)
        pipe.hang_up()
        with pytest.raises(EOFError):
            await waiting

    with pair() as (a, _):
        asyncio.run(wait(a))


def test_a_cancelled_recv_loses_nothing():
    async def wait(a, b):
        pipe = AsyncPipe(a)
        waiting = asyncio.ensure_future(pipe.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        Pipe(b).send({"n": 2}, [b"z"])
        assert await pipe.recv() == ({"n": 2}, [b"z"])

    with pair() as (a, b):
        asyncio.run(wait(a, b))


def test_a_cancelled_send_leaves_no_memory_file_behind():
    async def cancel(sock):
        before = open_fds()
        sending = asyncio.ensure_future(AsyncPipe(sock).send({}, [b"x" * 10_000_000]))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert open_fds() == before

    with pair() as (a, _):
        asyncio.run(cancel(a))


def test_threads_that_send_at_the_same_time_do_not_mix_their_messages():
    """The thread that loads images gives signs of life while the other tells its progress."""
    ours, theirs = socket.socketpair()
    pipe, other = Pipe(ours), Pipe(theirs)
    count, text = 200, "x" * 100_000  # more than the socket takes at once

    def send(name):
        for i in range(count):
            pipe.send({"from": name, "n": i, "text": text})

    threads = [threading.Thread(target=send, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    got = {"a": [], "b": []}
    for _ in range(2 * count):
        message, _ = other.recv()
        assert message["text"] == text
        got[message["from"]].append(message["n"])
    for thread in threads:
        thread.join()
    assert got == {"a": list(range(count)), "b": list(range(count))}
    pipe.close()
    other.close()


def test_files_that_the_kernel_drops_for_want_of_descriptors_are_missed_by_name():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pair() as (a, b):
        Pipe(a).send({}, [b"payload"])
        lowest = os.dup(a.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with pytest.raises(StorageError, match="too many files are open"):
                Pipe(b).recv()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
