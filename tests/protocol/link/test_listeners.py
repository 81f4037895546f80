"""Listening sockets of one port: taken by nobody else, and each with a share of the clients."""

import select
import socket

import pytest

from fcil_protocol.errors import LinkError, PortInUse
from fcil_protocol.link.listeners import open_listeners


def close(sockets):
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "localhost"])
def test_all_listen_on_one_port(host):
    sockets, claim = open_listeners(host, 0, 3)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    close([*sockets, claim])


def test_connections_are_divided_among_them():
    sockets, claim = open_listeners("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]
    shares = [0, 0]
    while sum(shares) < len(clients):
        for sock in select.select(sockets, [], [], 30)[0]:
            sock.accept()[0].close()
            shares[sockets.index(sock)] += 1
    assert all(shares)  # by chance not: once in 2^63
    close([*clients, *sockets, claim])


def test_a_port_in_use_is_refused_also_if_it_is_shared():
    sockets, claim = open_listeners("127.0.0.1", 0, 2)
    port = sockets[0].getsockname()[1]
    with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
        open_listeners("127.0.0.1", port, 2)
    close(sockets)
    with pytest.raises(PortInUse):  # claimed
        open_listeners("127.0.0.1", port, 2)
    claim.close()
    again, claim = open_listeners("127.0.0.1", port, 1)  # free at once
    close([*again, claim])


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"])
def test_an_address_of_another_machine_or_of_none_is_refused(host):
    with pytest.raises(LinkError, match=f"cannot listen on {host}:0: .*[a-z]"):
        open_listeners(host, 0, 1)
