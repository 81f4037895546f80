"""What systemd is told, and that signals are taken over."""

import asyncio
import os
import socket

import pytest

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
