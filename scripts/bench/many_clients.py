"""One server and very many connected clients: seconds of a round, memory, lag of the loop.

The clients are the protocol's own pieces in a few processes (sockets, sessions, ciphers and
transfers are real; nothing is trained and nothing is kept on disk). Each fetches the round's
broadcast, opens it, and sends an update of S bytes, sealed. In a federation they have machines
of their own: here they yield to the server where both want a core (nice 10).

.venv/bin/python scripts/bench/many_clients.py [--clients 1000] [--kilobytes 100] [--rounds 3]
    [--relay pass|sums]: all clients are behind one relay, which passes updates on or adds them up
    [--intake N]: N intake processes hold the connections
    [--ledger postgresql://USER@HOST/DATABASE]: the ledger is there, not in a file
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from processes import children, cpu_s, is_intake, peak_mb, status_mb

import fcil_protocol
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import (
    Core,
    open_body,
    parse_header,
    seal,
    unwrap_key,
    verify_header,
    wrap_key,
)
from fcil_protocol.envelopes.header import chunk_bytes_for
from fcil_protocol.envelopes.transfer import (
    UNASKED_SPAN_BYTES,
    Receiver,
    Sender,
    unrequested_chunks,
)
from fcil_protocol.envelopes.window import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES
from fcil_protocol.link.dial import dial
from fcil_protocol.link.enrol_with_ticket import show
from fcil_protocol.link.zmq_link import Dealer, LinkNews, Links
from fcil_protocol.messages.frames import Received, parse
from fcil_protocol.messages.messages import (
    Ack,
    Bye,
    Chunk,
    Hello,
    Message,
    Nack,
    Parts,
    Pull,
    RoundClosed,
    RoundOpen,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import Certificate
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import Ticket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.storage.move_ledger import move_ledger

METHOD = Path(__file__).parent / "payload_method"
CLASSES = ("cat", "dog")
LIMIT = 1 << 30
LAG = ("loop_lag_max_s", "loop_lag_p99_s")


class Thin:
    """One client without images, worker or disk."""

    def __init__(self, member: dict[str, str], method: str, rounds: int) -> None:
        self.keys = PrivateKeys.derive(bytes.fromhex(member["seed"]), b"bench")
        self.client = member["client"]
        certificate = Certificate.from_bytes(bytes.fromhex(member["certificate"]))
        self.federation = certificate.federation
        self.server = certificate.verify(self.federation, time.time())
        self.address = member["address"]
        self.link_key = bytes.fromhex(member.get("link_key", "")) or self.server.curve
        self.relay: PublicKeys | None = None
        self.method = method
        self.rounds = rounds
        self.values = 0
        self.acked = 0
        self.refused: list[str] = []
        self._outgoing: dict[str, Sender] = {}
        self._receiver = Receiver(MAX_WINDOW_BYTES)
        self._missing: set[str] = set()
        self._held: set[str] = set()
        self._ahead: dict[str, int] = {}
        self._order: RoundOpen | None = None

    async def run(self, values: int, links: Links) -> None:
        """Take part until the server says goodbye."""
        self.values = values
        host, _, port = self.address.rpartition(":")
        self.link = Dealer(
            curve_secret=self.keys.curve_secret,
            curve_public=self.keys.public.curve,
            server_key=self.link_key,
            links=links,
        )
        self.link.connect(host, int(port))
        try:
            while True:
                news = await self.link.recv()
                if isinstance(news, LinkNews):
                    if news.state == "up":
                        self._greet("", "")
                    elif self.acked + len(self.refused) > self.rounds:
                        # The server ends, and its goodbye was lost.
                        return
                elif self._take(parse(news)):
                    return
        finally:
            self.link.close()

    def _greet(self, run: str, schema: str) -> None:
        self.channel = Channel(self.keys, self.server)
        hello = Hello(
            nonce=self.channel.nonce,
            protocol=fcil_protocol.PROTOCOL_VERSION,
            oldest=fcil_protocol.OLDEST_PROTOCOL_VERSION,
            package="0",
            federation=self.federation,
            client=self.client,
            methods=[self.method],
            run=run,
            schema_digest=schema,
            takes_compact=True,
            session_key=self.channel.session_key,
        )
        self._say(hello)

    def _say(self, message: Message, *blobs: bytes) -> None:
        if not self.link.send(self.channel.frames(message, *blobs)):
            self.refused.append(f"{message.type} did not leave")

    def _take(self, received: Received) -> bool:
        if isinstance(received.message, Welcome):
            self.channel.peer_nonce = received.message.server_nonce
        message = self.channel.check(received)
        match message:
            case Welcome():
                self.welcome = message
                if message.summing_relay is not None:
                    self.relay = PublicKeys.from_fields(message.summing_relay.model_dump())
                if message.session_key is not None:
                    self.channel.agree_as_client(message.session_key)
                if message.ready:
                    self._announce()
                else:
                    self._greet(message.run, message.schema_digest)
            case RoundOpen():
                self._asked(message)
            case Parts():
                self._part(received)
            case Chunk():
                data = received.blobs[0]
                self._receiver.put(message.digest, message.index, data, time.monotonic())
                self._go_on()
            case Want() | Pull():
                self._send_chunks(message.digest, message.chunks, message.span)
            case Ack():
                self._outgoing.pop(message.digest, None)
                self.acked += 1
            case Nack():
                self.refused.append(f"{message.code}: {message.text}")
            case Bye():
                return True
            case RoundClosed():
                pass
        return False

    # --- up ---------------------------------------------------------------------------------

    def _core(self, kind: str, task: int, round_: int, base: int) -> Core:
        return Core(
            protocol=fcil_protocol.PROTOCOL_VERSION,
            federation=self.federation,
            run=self.welcome.run,
            direction="update",
            sender=self.client,
            sender_key=self.keys.public.fingerprint,
            recipient="server",
            method=self.welcome.method,
            schema=self.welcome.schema_digest,
            task=task,
            round=round_,
            kind=kind,
            base=base,
        )

    def _offer(self, payload: Payload, core: Core, *, waits: bool = False) -> None:
        plain = pack(payload, compact=True)
        sealed, key = seal(plain, core, self.keys, chunk_bytes=chunk_bytes_for(len(plain)))
        header = sealed.parsed
        first = 0 if waits else unrequested_chunks(header)
        wraps = [wrap_key(key, sealed.header, self.server)]
        self._outgoing[header.update_id] = Sender(header, sealed.stored(wraps[0]).read)
        if self.relay is not None and core.kind != INVENTORY:
            wraps.append(wrap_key(key, sealed.header, self.relay))
        self._say(
            Update(digest=header.update_id, unasked=first), sealed.header, sealed.signature, *wraps
        )
        span = max(1, UNASKED_SPAN_BYTES // header.chunk_bytes)
        self._send_chunks(header.update_id, list(range(first)), span)

    def _send_chunks(self, digest: str, chunks: list[int], span: int) -> None:
        if digest not in self._outgoing:
            return
        for message, data in self._outgoing[digest].messages(chunks, span):
            self._say(message, data)

    def _announce(self) -> None:
        counts = {name: np.full(len(CLASSES), 5, np.int64) for name in ("train", "test")}
        payload = Payload({**counts}, {"names": list(CLASSES)})
        self._offer(payload, self._core(INVENTORY, -1, 0, 0))

    # --- down -------------------------------------------------------------------------------

    def _asked(self, order: RoundOpen) -> None:
        self._order = order
        wanted = [p for p in order.parts if p.digest not in self._held]
        self._missing = {p.digest for p in wanted}
        for part in wanted:  # a header and its first chunks together, as a client does
            size = chunk_bytes_for(part.sealed_bytes)
            count = min(-(-part.sealed_bytes // size), MIN_WINDOW_BYTES // size)
            self._ahead[part.digest] = count
            span = max(1, UNASKED_SPAN_BYTES // size)
            self._say(Want(digest=part.digest, chunks=list(range(count)), span=span, header=True))
        self._go_on()

    def _part(self, received: Received) -> None:
        data, signature, _ = received.blobs
        verify_header(data, signature, self.server)
        header = parse_header(data, max_plain_bytes=LIMIT)
        ahead = self._ahead.pop(header.update_id, 0)
        assembly, now = Assembly(header, path=None), time.monotonic()
        self._receiver.begin(received.blobs, assembly, now, unasked=ahead)
        self._go_on()

    def _go_on(self) -> None:
        for digest, envelope in list(self._receiver.under_way.items()):
            if envelope.complete:
                self._receiver.end(digest)
                key = unwrap_key(envelope.wrap, envelope.header_bytes, self.keys)
                open_body(envelope.header, key, envelope.assembly.chunks())
                self._missing.discard(digest)
                self._held.add(digest)
        for want in self._receiver.wants(time.monotonic()):
            self._say(want)
        if self._order is not None and not self._missing:
            order, self._order = self._order, None
            drawn = np.random.default_rng().random(self.values, dtype=np.float32)
            payload = Payload({"w0": drawn, "n": np.array([5], np.int64)})
            core = self._core(order.kind, order.task, order.round, order.base)
            self._offer(payload, core, waits=order.ask_first)


async def _some(members: list[dict[str, str]], values: int, rounds: int) -> None:
    clients = [Thin(m, "payload==1", rounds) for m in members]
    links = Links(len(clients))
    await asyncio.gather(*(c.run(values, links) for c in clients))
    links.close()
    refused = [text for c in clients for text in c.refused]
    print(json.dumps({"acked": sum(c.acked for c in clients), "refused": refused[:5]}), flush=True)


def _enrol(federation: LocalFederation, count: int) -> list[dict[str, str]]:
    members = []
    for number in range(count):
        seed = os.urandom(32)
        keys = PrivateKeys.derive(seed, b"bench")
        public = {k: v.hex() for k, v in keys.public.to_fields().items()}
        reply = control_socket.ask(
            federation.federation, "enrol_local", name=f"c{number}", keys=public
        )
        members.append(
            {
                "seed": seed.hex(),
                "client": reply["client_id"],
                "certificate": reply["certificate"],
                "address": reply["addresses"][0],
            }
        )
    return members


def _ticket(federation: LocalFederation, name: str, **extra: Any) -> Ticket:
    reply = control_socket.ask(federation.federation, "enrol", name=name, lasts_s=3600.0, **extra)
    return Ticket.from_text(reply["ticket"])


class Site:
    """A relay's process, and clients behind it."""

    def __init__(self, federation: LocalFederation, *, sums: bool) -> None:
        self.federation = federation
        self.directory = federation.directory / "relay"
        ticket = federation.directory / "relay.ticket"
        ticket.write_text(_ticket(federation, "site", relay=True).to_text())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-P", "-m", "fcil_server", "relay", "--dir", str(self.directory)]
        command += ["--ticket", str(ticket), "--listen", address, *(["--sums"] if sums else [])]
        paths = {"PYTHONPATH": os.pathsep.join((str(METHOD), os.environ.get("PYTHONPATH", "")))}
        self.process = subprocess.Popen(command, env={**federation.environment(), **paths})
        federation.until("relay")

    def enrol(self, count: int) -> list[dict[str, str]]:
        """Enrol clients with tickets; a door admits newcomers a few at a time."""
        return asyncio.run(self._enrol(count))

    async def _enrol(self, count: int) -> list[dict[str, str]]:
        members = []
        for number in range(count):
            seed = os.urandom(32)
            keys = PrivateKeys.derive(seed, b"bench")
            ticket = _ticket(self.federation, f"c{number}", via="site")
            answer, _ = await show(ticket, keys, ticket.addresses[0], dial)
            members.append(
                {
                    "seed": seed.hex(),
                    "client": answer.client,
                    "certificate": answer.certificate.hex(),
                    "address": ticket.addresses[0],
                    "link_key": ticket.server_key.hex(),
                }
            )
        return members

    def stop(self) -> None:
        """Stop the relay, and say what it did."""
        used, peak = cpu_s(self.process.pid), peak_mb(self.process.pid)
        counts = control_socket.ask(self.directory, "status")
        print(f"relay: {used:.1f} CPU s, {peak:.0f} MB at most; {counts['sums']} sums of "
              f"{counts['added']} updates; uplink {counts['uplink_sent'] / 1e6:.1f} MB up, "
              f"{counts['uplink_received'] / 1e6:.1f} MB down")  # fmt: skip
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def _raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(args: argparse.Namespace, directory: Path) -> None:
    settings = {
        "method.name": "payload",
        "method.kilobytes": args.kilobytes,
        "tasks.schedule": "listed",
        "tasks.classes": json.dumps([list(CLASSES)]),
        "round.rounds_per_task": args.rounds,
        "round.min_clients": args.clients,
        "run.evaluate": "false",
        "federation.intake": str(args.intake),
        "privacy.relay_sums": json.dumps(args.relay == "sums"),
    }
    env = {"PYTHONPATH": os.pathsep.join((str(METHOD), os.environ.get("PYTHONPATH", "")))}
    with LocalFederation(directory) as federation:
        given = [a for k, v in settings.items() for a in ("-c", f"{k}={v}")]
        federation.serve(*given, env=env)
        if args.ledger:
            federation.kill_server()
            move_ledger(federation.federation, args.ledger, "benchmark")
            federation.serve(*given, env=env)
        assert federation.server is not None
        pid = federation.server.pid
        site = Site(federation, sums=args.relay == "sums") if args.relay else None
        members = site.enrol(args.clients) if site else _enrol(federation, args.clients)
        empty = status_mb(pid) or 0.0
        step = -(-len(members) // args.processes)
        groups = [members[i : i + step] for i in range(0, len(members), step)]
        began = time.monotonic()
        values = round(args.kilobytes * 250)
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--group", str(values), "--rounds", str(args.rounds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in groups
        ]
        for process, group in zip(processes, groups, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(group).encode())
            process.stdin.close()
        to_start: float | None = None
        own_to_start = 0.0
        while True:
            moment = _moment(federation.federation)
            if to_start is None and moment.opened:
                to_start = _cpu_of_all(pid)
                own_to_start = cpu_s(pid)
            if moment.done:
                break
            if time.monotonic() - began > args.timeout_s:
                raise SystemExit(f"not done: {federation.last_words('server')}")
            time.sleep(0.1)
        peak, used, own = peak_mb(pid), _cpu_of_all(pid), cpu_s(pid)
        intake = [peak_mb(p) for p in children(pid) if is_intake(p)]
        worker = max((peak_mb(p) for p in children(pid) if not is_intake(p)), default=0.0)
        if site is not None:
            site.stop()
    said = []
    for process in processes:
        assert process.stdout is not None
        said.append(json.loads(process.stdout.read() or b"{}"))
        process.wait()
    with Ledger(federation.federation / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        assert run is not None
        rows = ledger.rounds.all(run.run_id)
        counted = [len(ledger.updates.of_round(r.key)) for r in rows]
    seconds = [(r.closed_at or 0) - r.opened_at for r in rows]
    lag = [f"{r.metrics[k] * 1e3:.0f}" for k in LAG for r in rows if k in r.metrics]
    print(f"clients {args.clients}, {args.kilobytes:g} kB each, {args.rounds} rounds")
    print(f"all connected and first round open after {rows[0].opened_at - _wall(began):.1f} s")
    print(f"seconds of a round: {', '.join(f'{s:.1f}' for s in seconds)}")
    print(f"lag of the loop, ms, at most and p99: {', '.join(lag) or 'not measured'}")
    print(f"updates in a round: {counted}; acknowledged {sum(s.get('acked', 0) for s in said)}")
    print(f"refused: {[t for s in said for t in s.get('refused', [])] or 'nothing'}")
    memory = f"{empty:.0f} MB before, {peak:.0f} MB at most; its worker {worker:.0f} MB"
    print(f"server: {memory}; {used:.1f} CPU s")
    assert to_start is not None, "a run that is done has opened a round"
    each = (used - to_start) / sum(counted) * 1e3
    alone = (own - own_to_start) / sum(counted) * 1e3
    print(f"of which from the first round on, for each update: {each:.1f} ms")
    print(f"of that the server's own process: {alone:.1f} ms")
    if intake:
        print(f"intake processes: {', '.join(f'{mb:.0f}' for mb in intake)} MB at most")


class _Moment(NamedTuple):
    """What the ledger says of the run.

    Attributes:
        opened: its first round has been opened.
    """

    opened: bool
    done: bool


def _moment(directory: Path) -> _Moment:
    """Return the run's progress; the server is not asked, since it would spend time on that."""
    with Ledger(directory / LEDGER_NAME, read_only=True) as ledger:
        run = ledger.runs.newest()
        if run is None:
            return _Moment(opened=False, done=False)
        opened = bool(ledger.rounds.newest(run.run_id, 1))
        return _Moment(opened, run.status is RunStatus.DONE)


def _cpu_of_all(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, ended or not."""
    return cpu_s(pid) + sum(cpu_s(child) for child in children(pid))


def _wall(monotonic: float) -> float:
    return time.time() - (time.monotonic() - monotonic)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--kilobytes", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=900)
    parser.add_argument("--relay", choices=("pass", "sums"))
    parser.add_argument("--intake", type=int, default=0)
    parser.add_argument("--ledger")
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _raise_limits()
    if args.group:
        os.nice(10)
        asyncio.run(_some(json.load(sys.stdin), args.group, args.rounds))
        return
    directory = Path(tempfile.mkdtemp(prefix="fcil-many-"))
    try:
        measure(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
