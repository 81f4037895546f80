"""A site behind one uplink: a real relay between a real server and real clients."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fcil_protocol
from fcil_protocol.envelopes.envelope import StoredEnvelope, unwrap_key
from fcil_protocol.errors import FcilError
from fcil_protocol.ids import RoundKey
from fcil_protocol.link.dial import dial
from fcil_protocol.link.enrol_with_ticket import show
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Ack, Admit, Hello, Nack, Update, Uplink
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import REGISTRY
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, Direction, RunStatus
from system.kit import open_ledger, settings, write_client
from system.raw_client import WAIT_S, RawClient, good_update
from system.test_wire import NAMES, free_port, secrets

pytestmark = pytest.mark.processes


def ticket(federation, name, *extra):
    """Make a ticket with the command, in a file of its own."""
    path = federation.directory / f"{name}.ticket"
    command = [sys.executable, "-m", "fcil_server", "enrol", name, "--out", str(path), *extra]
    command += ["--dir", str(federation.federation)]
    subprocess.run(command, check=True, env=federation.environment(), capture_output=True)
    return path


class Site:
    """A relay's process in a federation, perhaps behind another one."""

    def __init__(self, federation, name="site", via=None):
        self.federation = federation
        self.name = name
        self.directory = federation.directory / f"relay-{name}"
        self.port = free_port()
        behind = () if via is None else ("--via", via.name)
        self.start("--ticket", str(ticket(federation, name, "--relay", *behind)))

    def start(self, *extra):
        command = ["fcil_server", "relay", "--dir", str(self.directory), *extra]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        self.process = self.federation._start(self.name, command, None)
        self.federation.clients[self.name] = self.process
        self.federation.until("relay")

    def join(self, name, folder):
        path = ticket(self.federation, name, "--via", self.name)
        self.federation.join(name, folder, "--ticket", str(path))

    def status(self):
        return control_socket.ask(self.directory, "status")

    def memory(self):
        """Return what the process holds in memory that it can write."""
        found = []
        process = Path(f"/proc/{self.process.pid}")
        maps = (process / "maps").read_text("ascii").splitlines()
        with (process / "mem").open("rb", buffering=0) as memory:
            for line in maps:
                place, rights = line.split()[:2]
                if rights.startswith("rw") and "[vvar" not in line:
                    begin, end = (int(x, 16) for x in place.split("-"))
                    try:
                        memory.seek(begin)
                        found.append(memory.read(end - begin))
                    except (OSError, OverflowError):
                        continue
        return b"".join(found)

    def opens(self, stored):
        """Say whether the relay's keys open an envelope."""
        keys = PrivateKeys.load(self.directory / "keys.json")
        try:
            unwrap_key(stored.wrap, stored.header, keys)
        except FcilError:
            return False
        return True


@pytest.mark.full
def test_a_broadcast_crosses_the_uplink_once_and_the_relay_learns_nothing_of_it(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(tasks__classes=[list(NAMES.values())], round__min_clients=4))
        site = Site(federation)
        folders = {}
        for k, name in enumerate("abcd"):
            folders[name] = write_client(tmp_path / name, NAMES, offset=12 * k, names=NAMES)
            join = federation.join if name == "d" else site.join
            join(name, folders[name])
        federation.until("run_done")
        counts, memory = site.status(), site.memory()
        status = control_socket.ask(federation.federation, "status")
        assert Counter(c["state"] for c in status["clients"]) == {"ready": 5}
        with open_ledger(federation) as ledger:
            run = ledger.runs.newest().run_id
            rows = {c.name: c for c in ledger.clients.all()}
            behind = {c.client_id for c in rows.values() if c.via == rows["site"].client_id}
            rounds = ledger.rounds.all(run)
            counted = [{u.client for u in ledger.updates.of_round(r.key)} for r in rounds]
            flows = ledger.bytes.all(run)
            kept = ledger.parts.all(run)
    assert len(behind) == 3
    assert [r.kind for r in rounds] == ["train", "evaluate"]
    assert counted == [{c.client_id for n, c in rows.items() if n != "site"}] * 2

    # Once: what the server sent of shared parts it sent to the relay and to the direct client.
    shared = Counter()
    for flow in flows:
        if flow.direction is Direction.DOWN and flow.cause is Cause.BROADCAST:
            shared[flow.client] += flow.sealed
    (direct,) = {c.client_id for c in rows.values()} - behind - {rows["site"].client_id}
    assert shared[rows["site"].client_id] == shared[direct] > 0
    assert not any(shared[client] for client in behind)
    handshakes = {f.client for f in flows if f.cause is Cause.HANDSHAKE}
    assert handshakes == {rows["site"].client_id, direct}  # lanes have none of their own
    assert counts["fetched"] == counts["cached_chunks"] > 0
    assert counts["from_cache"] + counts["fanned_out"] == 3 * counts["fetched"]
    assert {p.name for p in kept} > {REGISTRY}

    # Nothing: not in its files, not in its memory, and its keys open nothing.
    stored = b"".join(p.read_bytes() for p in site.directory.rglob("*") if p.is_file())
    assert len(list((site.directory / "cache").iterdir())) == counts["cached_chunks"]
    looked = 0
    for what, secret in secrets(federation, folders.values()):
        if len(set(secret)) >= 6:
            looked += 1
            assert secret not in stored, f"{what} is in the relay's files"
            assert secret not in memory, f"{what} is in the relay's memory"
    assert looked > 50
    assert str(site.directory).encode() in memory  # it was looked at the right place
    tried = 0
    for path in (*(tmp_path / "state").rglob("*.part"), *federation.federation.rglob("*.part")):
        data = path.read_bytes()
        data = data[data.index(b"fcilenv") :]
        assert not site.opens(StoredEnvelope.from_bytes(data))
        tried += 1
    assert tried >= 8


@pytest.mark.full
def test_a_relay_and_then_its_server_are_killed_and_the_rounds_go_on(tmp_path):
    with LocalFederation(tmp_path) as federation:
        listed = settings(
            tasks__classes=[["0", "1"]], round__min_clients=3, round__rounds_per_task=3
        )
        federation.serve("--until-done", *listed)
        site = Site(federation)
        for k, name in enumerate("abc"):
            folder = write_client(tmp_path / name, range(2), offset=12 * k)
            site.join(name, folder)
        federation.until("update")
        site.process.kill()
        site.process.wait()
        federation.until("relay_left")
        site.start()
        federation.until("update")
        federation.kill_server()
        federation.serve("--until-done", *listed)
        federation.until("relay")
        assert federation.server.wait(120) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rounds = ledger.rounds.all(run.run_id)
        assert [r.kind for r in rounds] == ["train"] * 3 + ["evaluate"]
        for row in rounds:
            updates = ledger.updates.of_round(row.key)
            assert len({u.client for u in updates}) == len(updates) == 3


# --- a relay that does more than relay ---------------------------------------------------------


class HostileRelay:
    """An enrolled relay that its owner replaced by this."""

    uplink: dict = {}  # further fields of its first message

    def __init__(self, federation):
        self.federation = federation
        self.keys = PrivateKeys.generate()
        self.queues = {}
        self.last = 0

    def ticket(self, name, **extra):
        reply = control_socket.ask(
            self.federation.federation, "enrol", name=name, lasts_s=600.0, **extra
        )
        return Ticket.from_text(reply["ticket"])

    async def connect(self):
        invited = self.ticket("site", relay=True)
        answer, certificate = await show(invited, self.keys, invited.addresses[0], dial)
        self.client, self.certificate = answer.client, certificate
        self.server = certificate.keys
        self.link = dial(invited.addresses[0], self.keys, self.server)
        while not isinstance(news := await self.link.recv(), LinkNews) or news.state != "up":
            pass
        self.channel = Channel(self.keys, self.server)
        self.say(
            Uplink(
                nonce=self.channel.nonce,
                protocol=fcil_protocol.PROTOCOL_VERSION,
                oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
                package="0",
                federation=certificate.federation,
                relay=self.client,
                address="127.0.0.1:7720",
                **self.uplink,
            )
        )
        self.own = asyncio.Queue()
        self.task = asyncio.create_task(self._listen())
        assert isinstance(await self.hear(), Admit)

    async def _listen(self):
        while True:
            frames = await self.link.recv()
            if isinstance(frames, LinkNews):
                continue
            if relay_frames.is_laned(frames):
                laned = relay_frames.read_down(frames)
                self.queues[laned.number].put_nowait(laned.frames)
            else:
                message = self.channel.check(parse(frames))
                if isinstance(message, Admit):
                    self.channel.peer_nonce = message.server_nonce
                self.own.put_nowait(message)

    async def hear(self, kind=Admit):
        while not isinstance(message := await asyncio.wait_for(self.own.get(), WAIT_S), kind):
            pass
        return message

    def say(self, message, *blobs):
        assert self.link.send(self.channel.frames(message, *blobs))

    def lane(self, key):
        self.last += 1
        self.queues[self.last] = asyncio.Queue()
        return LaneLink(self, self.last, key)


class LaneLink:
    """A client's link that is a lane of the relay."""

    def __init__(self, relay, number, key):
        self.relay, self.number, self.key = relay, number, key
        self.told = [LinkNews("up")]

    async def recv(self):
        if self.told:
            return self.told.pop()
        return await self.relay.queues[self.number].get()

    def send(self, frames):
        return self.relay.link.send(relay_frames.up(self.number, self.key, frames))

    def close(self):
        self.relay.link.send(relay_frames.up(self.number, self.key))


class Behind(RawClient):
    """A client whose every frame the relay has in its hands."""

    def __init__(self, relay):
        self.relay = relay
        self.keys = PrivateKeys.generate()
        self.heard = []

    async def connect(self):
        shown = self.relay.ticket("victim", via="site")
        assert shown.via
        make = lambda _address, keys, _server: self.relay.lane(keys.public.curve)  # noqa: E731
        answer, self.certificate = await show(shown, self.keys, shown.addresses[0], make)
        self.client = answer.client
        self.server = Certificate.from_bytes(answer.certificate).keys
        self.link = self.relay.lane(self.keys.public.curve)


@pytest.mark.full
def test_a_relay_cannot_speak_for_a_client_or_send_its_ciphertext_as_its_own(tmp_path):
    async def story(federation):
        relay = HostileRelay(federation)
        await relay.connect()
        victim = Behind(relay)
        await victim.connect()
        await victim.greet()
        assert isinstance(await victim.announce({"0": 5}), Ack)
        order = await victim.asked()
        tensors = {k: v for k, v in good_update(order).items() if k != "classes"}
        sealed, wrap = victim.sealed(Payload(tensors), victim.update_core(order))
        digest = sealed.parsed.update_id
        with pytest.raises(FcilError):
            unwrap_key(wrap, sealed.header, relay.keys)

        # Its own session: a relay sends no updates, whatever it signs.
        signature = relay.keys.sign("envelope", sealed.header)
        relay.say(Update(digest=digest), sealed.header, signature, wrap)
        assert (await relay.hear(Nack)).code == "malformed"

        # The victim's session: the envelope signed anew, the message signed by the relay.
        forger = Channel(relay.keys, relay.server)
        forger.peer_nonce, forger._sent = victim.channel.peer_nonce, 1000
        victim.link.send(forger.frames(Update(digest=digest), sealed.header, signature, wrap))
        assert (await victim.hear(Ack, Nack)).code == "bad_signature"

        # A lane of its own with the victim's key, and a hello in the victim's name.
        second = relay.lane(victim.keys.public.curve)
        forger = Channel(relay.keys, relay.server)
        hello = Hello(
            nonce=forger.nonce, protocol=1, oldest=1, package="0",
            federation=victim.certificate.federation, client=victim.client,
        )  # fmt: skip
        second.send(forger.frames(hello))
        second.told.clear()
        answer = parse(await asyncio.wait_for(second.recv(), WAIT_S)).message
        assert (answer.type, answer.code) == ("nack", "bad_signature")

        # A client is what a relay is not: its key says hello in vain.
        relay.say(hello.model_copy(update={"client": relay.client}))
        assert (await relay.hear(Nack)).code == "malformed"

        # The victim noticed nothing of it: its update counts.
        assert isinstance(await victim.upload(sealed, wrap), Ack)
        relay.task.cancel()
        relay.link.close()
        return RoundKey(order.run, order.task, order.kind, order.round), digest, relay

    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(round__min_clients=1, run__evaluate=False))
        key, digest, relay = asyncio.run(story(federation))
        federation.until("left")
        with open_ledger(federation) as ledger:
            assert [u.update_id for u in ledger.updates.of_round(key)] == [digest]
        assert "Traceback" not in federation.log("server").read_text()
