"""Who attacks in `attacks.py`: one process for each attack, that is killed when its time is over.

Each function gets the federation and returns what came of it. Those that flood are the functions
of `tests/attack_kit`, with which the tests attack, too.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from fcil_protocol.errors import FcilError
from fcil_protocol.link.dial import dial
from fcil_protocol.link.enrol_with_ticket import show
from fcil_protocol.process import control_socket
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from system.raw_client import RawClient

MIB = 1 << 20
LARGE = {"frames": 60, "size": 8 * MIB}
SMALL = {"frames": 1_000_000, "size": 1}
HEADERS = {"count": 100, "size": 8 * MIB}
POURED = {"most_bytes": 20_000_000, "most_s": 15.0}
# A peer of ZMTP 3.1 that will speak CURVE: what everybody may send before anybody asks.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
NULL = GREETING.replace(b"CURVE", b"NULL\0")
GIANT = b"\x06" + (1 << 30).to_bytes(8, "big")  # a command that says how long it will be
HOLD_S = 12.0  # longer than a handshake may take
KNOCK_S = 15.0  # until former members have used up what guests may do at once


@dataclass
class Came:
    """What came of an attack.

    Attributes:
        sent: bytes that were taken, where it is a flood.
        refused: it was cut, or hears that it is not wanted.
        more: what else there is to say.
    """

    sent: int = 0
    refused: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A federation under attack: its directory, and the server's port."""

    directory: Path
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def member(self, name: str) -> RawClient:
        return RawClient(SimpleNamespace(federation=self.directory), name)

    def former(self, name: str) -> RawClient:
        client = self.member(name)
        control_socket.ask(self.directory, "revoke", name=name)
        return client

    def ticket(self, name: str, **extra: Any) -> Ticket:
        reply = control_socket.ask(self.directory, "enrol", name=name, lasts_s=600.0, **extra)
        return Ticket.from_text(reply["ticket"])


# --- bytes without end ----------------------------------------------------------------------


def _one_message(place: Place, keys: PrivateKeys, shape: dict[str, int]) -> Came:
    from attack_kit import floods

    server = place.member("witness").server
    try:
        taken = floods.one_message(place.address, server.curve, keys, **shape)
    except ConnectionRefusedError:
        return Came(0, refused=True)
    return Came(taken.sent, taken.cut)


def ticket_large(place: Place) -> Came:
    return _one_message(place, place.ticket("guest").guest_keys(), LARGE)


def former_large(place: Place) -> Came:
    return _one_message(place, place.former("former").keys, LARGE)


def member_large(place: Place) -> Came:
    return _one_message(place, place.member("member").keys, LARGE)


def ticket_small(place: Place) -> Came:
    return _one_message(place, place.ticket("guest").guest_keys(), SMALL)


def member_headers(place: Place) -> Came:
    from attack_kit import floods

    liar = place.member("liar")
    taken = floods.update_headers(
        place.address, liar.server, liar.keys,
        federation=liar.certificate.federation, client=liar.client, **HEADERS,
    )  # fmt: skip
    # Nothing of it counts, whether it was cut or each header was refused for its signature.
    return Came(taken.sent, refused=True, more={"cut": taken.cut})


# --- messages that are written down ---------------------------------------------------------


def _poured(flood: Any) -> Came:
    poured = asyncio.run(flood)
    told = dict(poured.answers)
    return Came(poured.sent_bytes, poured.cut, {"messages": poured.messages, "answers": told})


def inventories(place: Place) -> Came:
    from attack_kit import notes

    return _poured(notes.inventory_flood(place.member("lister"), **POURED))


def declines(place: Place) -> Came:
    from attack_kit import notes

    return _poured(notes.decline_flood(place.member("decliner"), **POURED))


def bad_signatures(place: Place) -> Came:
    from attack_kit import notes

    return _poured(notes.bad_signatures(place.member("forger"), **POURED))


def junk(place: Place) -> Came:
    from attack_kit import notes

    return _poured(notes.junk(place.member("junk"), **POURED))


def gone_in_the_middle(place: Place) -> Came:
    """A member says more than can be read, reads no answer, and its machine goes down."""
    rude = place.member("rude")

    async def go() -> int:
        await rude.connect()
        await rude.greet()
        assert rude.link is not None
        ends, sent = time.monotonic() + POURED["most_s"], 0
        while time.monotonic() < ends:
            sent += 120 * rude.link.send([os.urandom(60)] * 2)
            await asyncio.sleep(0)
        print(json.dumps(asdict(Came(sent, refused=True))), flush=True)
        os._exit(0)  # the kernel resets the connection

    return Came(asyncio.run(go()))


def relay(place: Place) -> Came:
    """A relay that opens lanes for nobody, and reads no answer."""
    from attack_kit import relays

    async def go() -> Any:
        ticket, keys = place.ticket("deaf", relay=True), PrivateKeys.generate()
        enrolled, certificate = await show(ticket, keys, place.address, dial)
        server = certificate.verify(ticket.federation, time.time())
        who = (keys, enrolled.client, server, certificate.federation)
        return await relays.lane_flood(place.address, *who, most_s=POURED["most_s"])

    return _poured(go())


def newcomers(place: Place) -> Came:
    """Four former members knock; five newcomers show their tickets, one after the other."""
    from attack_kit import newcomers as kit

    hostile = [place.former(f"former-{number}") for number in range(4)]

    async def go() -> Came:
        over = asyncio.Event()
        keys, server = [c.keys for c in hostile], hostile[0].server.curve
        knocking = asyncio.create_task(
            kit.knocking(place.address, keys, server, most_s=200.0, until=over)
        )
        entered, words = 0, ""
        await asyncio.sleep(KNOCK_S)
        for number in range(5):
            ticket = await asyncio.to_thread(place.ticket, f"new-{number}")
            try:
                await show(ticket, PrivateKeys.generate(), place.address, dial)
                entered += 1
            except FcilError as error:
                words = error.code
        over.set()
        said = dict(await knocking)
        more = {"in": entered, "of": 5, "last word": words, **said}
        return Came(0, said.get("up", 0) < sum(said.values()), more)

    return asyncio.run(go())


# --- strangers ------------------------------------------------------------------------------


async def _strangers(place: Place, count: int, said: list[bytes], hold_s: float) -> Came:
    """Connect so often, say something in pieces, and look how many were closed at the end."""

    async def one() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        except OSError:
            return True
        try:
            with contextlib.suppress(OSError):
                for piece in said:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(hold_s / len(said) if len(said) > 1 else 0)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(hold_s + 5):
                    while await reader.read(4096):
                        pass
        except TimeoutError:
            return False
        else:
            return True
        finally:
            writer.close()

    closed = await asyncio.gather(*(one() for _ in range(count)))
    return Came(count * sum(map(len, said)), all(closed), {"closed": sum(closed), "of": count})


def garbage(place: Place) -> Came:
    return asyncio.run(_strangers(place, 1000, [os.urandom(300)], HOLD_S))


def silent(place: Place) -> Came:
    return asyncio.run(_strangers(place, 1000, [b""], HOLD_S))


def slowloris(place: Place) -> Came:
    return asyncio.run(_strangers(place, 300, [bytes([b]) for b in GREETING], HOLD_S))


def greetings(place: Place) -> Came:
    return asyncio.run(_strangers(place, 1000, [GREETING], HOLD_S))


def giant(place: Place) -> Came:
    return asyncio.run(_strangers(place, 150, [GREETING + GIANT, bytes(MIB)], HOLD_S))


def giant_without_curve(place: Place) -> Came:
    return asyncio.run(_strangers(place, 150, [NULL + GIANT, bytes(MIB)], HOLD_S))


def unknown_keys(place: Place) -> Came:
    """Keys that nobody enrolled, each for one handshake."""
    from attack_kit import newcomers as kit

    server = place.member("witness").server.curve
    keys = [PrivateKeys.generate() for _ in range(100)]
    said = dict(asyncio.run(kit.knocking(place.address, keys, server, most_s=0.5)))
    return Came(0, "up" not in said and "message" not in said, said)


def storm(place: Place) -> Came:
    """Connect and go, as fast as it can be done."""
    made = 0
    for _ in range(3000):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", place.port), 5).close()
            made += 1
    return Came(0, refused=True, more={"connections": made})


ATTACKS: dict[str, Callable[[Place], Came]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        ticket_large, former_large, member_large, ticket_small, member_headers,
        inventories, declines, bad_signatures, junk, gone_in_the_middle, relay, newcomers,
        garbage, silent, slowloris, greetings, giant, giant_without_curve, unknown_keys, storm,
    )
}  # fmt: skip


def attack(name: str, place: Place, most_s: float) -> Came:
    """Attack from a process of its own."""
    words = [name, str(place.directory), str(place.port)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            capture_output=True, text=True, timeout=most_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Came(more={"ended": f"after {most_s:g} s, by force"})
    if done.returncode:
        last = " ".join(done.stderr.strip().splitlines()[-1:])[:200]
        return Came(more={"ended": f"with code {done.returncode}: {last}"})
    return Came(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    os.nice(5)
    came = ATTACKS[sys.argv[1]](Place(Path(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(asdict(came)))
