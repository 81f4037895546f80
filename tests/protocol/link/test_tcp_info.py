"""The kernel's own counts of a TCP connection."""

import os
import socket
import sys

import pytest

from fcil_protocol.link.tcp_info import Probe, TcpCounts, _Wrapping, duplicate_socket, open_probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its counts")


@pytest.fixture(params=[("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def pair(request):
    """Yield both ends of a TCP connection: the accepting one, the connecting one."""
    at, to = request.param
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    try:
        listener = socket.create_server((at, 0), family=family, dualstack_ipv6=at == "::")
    except (OSError, ValueError):
        pytest.skip(f"this machine has no {at}")
    with listener, socket.create_connection((to, listener.getsockname()[1])) as near:
        far, _ = listener.accept()
        with far:
            yield far, near


def _send(sender, receiver, size):
    sender.sendall(bytes(size))
    left = size
    while left:
        left -= len(receiver.recv(left))


def test_every_payload_byte_is_counted_once_in_its_direction(pair):
    far, near = pair
    probe = open_probe(far.fileno())
    before = probe.read()
    _send(near, far, 100_000)
    _send(far, near, 3_000)
    near.sendall(b".")  # what comes back confirms what went out
    far.recv(1)
    grown = probe.read() - before
    assert grown.received == 100_001
    assert grown.acked == 3_000
    assert grown.retransmitted == 0
    probe.close()


def test_the_link_figure_adds_a_header_for_every_segment(pair):
    far, near = pair
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe = open_probe(far.fileno())
    before = probe.read()
    for _ in range(10):
        _send(near, far, 10)  # a segment each
    grown = probe.read() - before
    is_v6 = far.family == socket.AF_INET6 and not far.getpeername()[0].startswith("::ffff:")
    header = 86 if is_v6 else 66
    assert grown.link_up == 100 + 10 * header
    assert grown.link_down % header == 0  # confirmations only
    probe.close()


def test_a_closed_probe_lets_the_connection_end_and_keeps_its_last_counts(pair):
    far, near = pair
    probe = open_probe(far.fileno())
    _send(near, far, 500)
    far.close()
    near.settimeout(0.05)
    with pytest.raises(TimeoutError):
        near.recv(1)  # held by the probe
    assert probe.close().received == 500
    near.settimeout(5)
    assert near.recv(1) == b""
    assert probe.last.received == 500
    assert probe.read() is None
    assert probe.close() == probe.last


def test_the_end_of_a_stream_is_not_taken_for_a_byte(pair):
    far, near = pair
    probe = open_probe(far.fileno())
    _send(near, far, 10)
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    assert probe.close().received == 10


def test_the_confirmed_end_of_a_stream_is_not_taken_for_a_byte(pair):
    far, near = pair
    probe = open_probe(far.fileno())
    _send(far, near, 10)
    far.shutdown(socket.SHUT_WR)
    assert near.recv(1) == b""
    _send(near, far, 1)  # comes after the confirmation
    assert probe.close().acked == 10


def test_what_is_no_tcp_socket_has_no_probe(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert open_probe(file.fileno()) is None
        number = os.dup(file.fileno())
    os.close(number)
    assert open_probe(number) is None
    assert duplicate_socket(number) is None
    one, other = socket.socketpair()
    with one, other:
        assert open_probe(one.fileno()) is None


def test_counters_of_32_bits_go_on_beyond_them():
    counter = _Wrapping()
    assert [counter.at(v) for v in (5, 4_294_967_295, 3, 3, 10)] == [
        5, 4_294_967_295, 4_294_967_299, 4_294_967_299, 4_294_967_306,
    ]  # fmt: skip


def test_counts_add_and_subtract_field_by_field():
    one = TcpCounts(1, 2, 3, 4, 5)
    assert one + one == TcpCounts(2, 4, 6, 8, 10)
    assert one + one - one == one


def test_a_kernel_that_tells_less_is_not_believed(monkeypatch):
    class Old:
        family = socket.AF_INET

        def getsockopt(self, *_):
            return bytes(160)

        def close(self):
            pass

    assert Probe(Old()).read() is None
