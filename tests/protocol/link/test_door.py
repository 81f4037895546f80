"""Connections leave descriptors free: the door is shut while few are left, and opens again."""

import contextlib
import os
import resource
import select
import socket
import sys

import pytest

from fcil_protocol.link import door as door_module
from fcil_protocol.link.door import SPARE, Door, spare_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such filters")


def free_descriptors() -> int:
    """Return how many a process may still open in order: the lowest free one is the next."""
    number = os.dup(1)
    os.close(number)
    return number


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def door(listener, monkeypatch):
    """A door that is shut once 16 more descriptors are taken, and opens when 8 are left of them."""
    limit = free_descriptors() + 32
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
        made = Door(32)
    made.guard(listener.fileno())
    yield made
    made.close()


@contextlib.contextmanager
def taken(count):
    fds = [os.dup(1) for _ in range(count)]
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


def knock(listener):
    """Begin a connection; on loopback it is there at once, if it is let in."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(listener.getsockname())
    return sock


def is_in(sock, timeout=0):
    return bool(select.select([], [sock], [], timeout)[1])


def test_with_descriptors_to_spare_it_stays_open(door, listener):
    door.shut_if_crowded()
    assert not door.is_shut
    with knock(listener) as sock:
        assert is_in(sock)


def test_it_is_shut_while_few_are_left_and_who_waited_gets_in_then(door, listener):
    with taken(20):
        door.shut_if_crowded()
        assert door.is_shut
        waiting = knock(listener)
        assert not is_in(waiting)
        door.open_if_room()
        assert door.is_shut
    door.open_if_room()
    assert not door.is_shut
    with waiting:
        assert is_in(waiting, timeout=60)  # its system tries again


def test_a_door_that_an_ended_process_has_shut_is_open_for_the_next(door, listener):
    with taken(20):
        door.shut_if_crowded()
        assert door.is_shut
    following = Door(32)
    following.guard(listener.fileno())
    with knock(listener) as sock:
        assert is_in(sock)
    following.close()


def test_a_connection_that_was_in_before_goes_on(door, listener):
    with knock(listener) as near, contextlib.closing(listener.accept()[0]) as far, taken(20):
        door.shut_if_crowded()
        assert door.is_shut
        near.sendall(b"x")
        assert far.recv(1) == b"x"


def test_a_process_without_any_descriptor_is_crowded(door):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free_descriptors(), hard))
    try:
        door.shut_if_crowded()
        assert door.is_shut
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_system_without_filters_lets_everybody_in(door, listener, monkeypatch):
    monkeypatch.setattr(door_module, "_ATTACH_FILTER", 9999)
    with taken(20):
        door.shut_if_crowded()
        assert not door.is_shut


def test_a_door_without_a_listener_is_never_shut():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    door = Door(soft)
    door.shut_if_crowded()
    assert not door.is_shut


@pytest.mark.parametrize(
    ("limit", "spare"),
    [(200, SPARE), (4096, SPARE), (20_000, 1250), (resource.RLIM_INFINITY, SPARE)],
)
def test_a_sixteenth_is_left_and_some_hundreds_at_least(limit, spare, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (limit, limit))
    assert spare_descriptors() == spare
