"""One peer sends without end while two honest clients learn: what it costs the server's memory.

PROTOCOL.md 2.4 says what may lie unread of whom. Without these limits one message of 190 frames
of 8 MiB took 3.2 GB. Only bytes and what was counted are looked at here, never time.
"""

import asyncio
import subprocess
import sys

import pytest

from attack_kit import floods
from fcil_protocol.link.zmq_link import MAX_MESSAGE_BYTES
from fcil_protocol.messages.messages import Ack
from fcil_protocol.process import control_socket
from fcil_protocol.trust.ticket import Ticket
from fcil_server.lab.local.federation import LocalFederation
from system.raw_client import RawClient
from system.siege import Siege
from system.test_wire import free_port

pytestmark = [pytest.mark.processes, pytest.mark.full]

MIB = 1 << 20
MOST_MB = 64  # that a flood may cost while it lasts
LEFT_MB = 24  # and afterwards
LARGEST = MAX_MESSAGE_BYTES - 33  # a frame of it passes


@pytest.fixture(scope="module")
def siege(tmp_path_factory):
    folder = tmp_path_factory.mktemp("floods")
    with LocalFederation(folder) as federation:
        yield Siege(federation, folder)


def ticket(federation, name, *extra):
    """Make a ticket that nobody uses."""
    path = federation.directory / f"{name}.ticket"
    command = [sys.executable, "-m", "fcil_server", "enrol", name, "--out", str(path), *extra]
    command += ["--dir", str(federation.federation)]
    subprocess.run(command, check=True, env=federation.environment(), capture_output=True)
    return Ticket.from_text(path.read_text().strip())


def guest(federation, name):
    return ticket(federation, name).guest_keys()


def revoked(federation, name):
    """Return the keys of somebody who was a member."""
    client = RawClient(federation, name)
    control_socket.ask(federation.federation, "revoke", name=name)
    return client.keys


def member(federation, name):
    return RawClient(federation, name).keys


FRAMES = {
    "large": {"frames": 190, "size": 8 * MIB},
    "largest": {"frames": 400, "size": LARGEST},
    "tiny": {"frames": 1_000_000, "size": 1},
    "small": {"frames": 500_000, "size": 34},  # each takes most memory for its bytes
}


def run_against(siege, flood):
    """Flood until more rounds have opened and closed; return what was taken, and the costs."""
    before = siege.facts()

    def once():
        try:
            return flood()
        except ConnectionRefusedError:  # a guest that comes back at once, a member cut off
            return floods.Taken(0, cut=True)

    async def attack():
        return [await asyncio.to_thread(once) async for _ in siege.passes()]

    taken = asyncio.run(attack())
    peak = siege.facts().peak
    for _ in range(10):  # what was freed is given back by then
        siege.federation.until("update")
    siege.facts()
    siege.federation.until("update")
    assert "Traceback" not in siege.federation.log("server").read_text()
    return taken, peak - before.peak, siege.facts().peak - before.peak


@pytest.mark.parametrize("who", [guest, revoked, member], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", FRAMES)
def test_a_flood_is_cut_and_costs_little_memory_and_no_round(siege, who, shape):
    federation = siege.federation
    keys = who(federation, f"{who.__name__}-{shape}")
    server = RawClient(federation, f"by-{who.__name__}-{shape}").server
    address = f"127.0.0.1:{federation.port}"

    def flood():
        return floods.one_message(address, server.curve, keys, **FRAMES[shape])

    taken, cost, left = run_against(siege, flood)
    assert all(one.cut for one in taken)
    assert taken[0].sent > 0
    assert cost < MOST_MB
    assert left < LEFT_MB


@pytest.mark.parametrize("size", [8 * MIB, LARGEST - 300, MIB])
def test_headers_with_bad_signatures_cost_little_memory_and_no_round(siege, size):
    liar = RawClient(siege.federation, f"liar-{size}")

    def flood():
        return floods.update_headers(
            liar.address, liar.server, liar.keys,
            federation=liar.certificate.federation, client=liar.client,
            count=800 * MIB // size, size=size,
        )  # fmt: skip

    taken, cost, left = run_against(siege, flood)
    assert taken[0].sent > 0
    assert cost < MOST_MB
    assert left < LEFT_MB


def test_a_member_that_was_cut_is_one_all_the_same(siege):
    async def story():
        client = RawClient(siege.federation, "penitent")
        await client.connect()
        await client.greet()
        client.link.send([bytes(LARGEST)] * 7)
        await asyncio.to_thread(siege.federation.until, "flood", text="penitent")
        client.close()
        await client.connect()
        await client.greet()
        assert isinstance(await client.announce({"7": 1}), Ack)
        client.close()

    asyncio.run(story())


def memory_mb(pid):
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) / 1e3


@pytest.mark.parametrize("shape", ["largest", "small"])
def test_the_door_of_a_relay_has_the_same_limits(siege, tmp_path, shape):
    federation, port = siege.federation, free_port()
    name = f"site-{shape}"
    ticket(federation, name, "--relay")
    path = federation.directory / f"{name}.ticket"
    listen = ["--listen", f"127.0.0.1:{port}", "--dir", str(tmp_path / name)]
    relay = federation._start(name, ["fcil_server", "relay", *listen, "--ticket", str(path)], None)
    try:
        federation.until("relay")
        through = ticket(federation, f"via-{shape}", "--via", name)
        before = memory_mb(relay.pid)

        def flood():
            try:
                return floods.one_message(
                    f"127.0.0.1:{port}", through.server_key, through.guest_keys(), **FRAMES[shape]
                )
            except ConnectionRefusedError:
                return floods.Taken(0, cut=True)

        taken, _, _ = run_against(siege, flood)
        assert all(one.cut for one in taken)
        assert max(one.sent for one in taken) > 0
        assert memory_mb(relay.pid) - before < MOST_MB
    finally:
        relay.terminate()
        relay.wait()
