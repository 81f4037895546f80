"""What systemd is told, and that signals are taken over."""

import asyncio
import os
import platform
import socket
import subprocess
import sys

import pytest

from fcil_protocol.process import supervisor as supervisor_module
from fcil_protocol.process.supervisor import Notifier, Service


@pytest.fixture
def supervisor(tmp_path):
    """A socket as systemd has it, and the environment that names it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        yield sock, {"NOTIFY_SOCKET": str(tmp_path / "notify")}


def test_without_a_supervisor_nothing_is_sent_and_nothing_fails():
    notifier = Notifier({})
    assert not notifier.active
    notifier.send("READY=1")
    notifier.status("anything")


def test_a_supervisor_that_is_gone_is_no_trouble(tmp_path):
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).send("READY=1")


def test_an_abstract_socket_is_one_too():
    name = f"fcil-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(10)
        Notifier({"NOTIFY_SOCKET": "@" + name}).send("READY=1")
        assert sock.recv(100) == b"READY=1"


def test_the_variables_are_not_handed_to_child_processes():
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2", "WATCHDOG_PID": "1", "HOME": "/"}
    Notifier(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("3000000", "own", 3.0),
        ("3000000", "", 3.0),
        ("3000000", "1", 0.0),  # meant for another process
        ("soon", "", 0.0),
    ],
)
def test_the_watchdog_is_for_the_process_that_it_names(usec, pid, seconds):
    named = str(os.getpid()) if pid == "own" else pid
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": named}
    assert Notifier(environ).watchdog_s == seconds


def test_a_status_is_one_line_whatever_names_are_in_it_and_is_said_once(supervisor):
    sock, environ = supervisor
    notifier = Notifier(environ)
    notifier.status("class cat\nREADY=1")
    notifier.status("class cat\nREADY=1")
    notifier.status("x" * 10_000)
    assert sock.recv(20_000).count(b"\n") == 0
    assert len(sock.recv(20_000)) < 400


def test_from_start_to_end_the_supervisor_hears_everything_in_order(supervisor):
    sock, environ = supervisor
    service = Service(environ=environ | {"WATCHDOG_USEC": "60000000"})

    async def live():
        service.ready(lambda: "at work")
        service.news()
        service.stopping()
        service.stopping()
        service.over()

    asyncio.run(live())
    said = [sock.recv(1000).decode() for _ in range(5)]
    assert said == ["READY=1", "STATUS=at work", "WATCHDOG=1", "STOPPING=1", "STATUS=stopping"]
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1000)


BLOCKS = """
import ctypes, sys, threading
from fcil_protocol.process.supervisor import share_heaps
if sys.argv[1] == "daemon":
    share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE, THREADS = 20 << 20, 8
libc.free(libc.malloc(SIZE))  # from now on glibc has such blocks in its heaps
ready, turn = threading.Barrier(THREADS), threading.Lock()

def work():
    libc.malloc(100)  # takes a heap
    ready.wait()
    with turn:
        block = libc.malloc(SIZE)
        ctypes.memset(block, 1, SIZE)
        libc.malloc(1 << 20)  # stays, and pins the heap below it
        libc.free(block)
    ready.wait()

threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * 4096 >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")
def test_a_daemons_threads_use_each_others_freed_memory():
    """Eight threads had 20 MB each, one after the other."""
    left = {
        kind: int(
            subprocess.run(
                [sys.executable, "-c", BLOCKS, kind], check=True, capture_output=True, text=True
            ).stdout
        )
        for kind in ("daemon", "other")
    }
    assert left["daemon"] < 100
    assert left["other"] > left["daemon"] + 60


def test_a_service_is_a_daemon(monkeypatch):
    asked = []
    monkeypatch.setattr(supervisor_module, "share_heaps", lambda: asked.append(True))
    Service(environ={})
    assert asked == [True]
