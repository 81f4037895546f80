"""A relay that adds up its clients' updates and sends the server sums of them.

A client seals its update for the server and, where the run allows it, for its relay. The header
passes to the server, marked as taken; the chunks stay here. What the relay cannot add, or the
server refuses as a sum, it releases: then the server requests that update itself. The relay answers
no client and keeps no update beyond its round: each client has its own until the server's Ack.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fcil_adapters.numerics.relay_sums import MOST_SUMMED, RunningSum
from fcil_protocol.envelopes.envelope import (
    WRAP_BYTES,
    open_body,
    parse_header,
    unwrap_key,
)
from fcil_protocol.envelopes.partial_envelopes import Arriving
from fcil_protocol.envelopes.transfer import (
    IncomingEnvelope,
    Receiver,
    unrequested_chunks,
)
from fcil_protocol.envelopes.window import ASKED_BYTES, MIN_WINDOW_BYTES, share
from fcil_protocol.errors import FcilError, WireError, as_fcil_error
from fcil_protocol.ids import ClientId, FederationId, RoundKey
from fcil_protocol.messages.frames import Received
from fcil_protocol.messages.messages import (
    MAX_WANTED,
    Ack,
    Chunk,
    Decline,
    Message,
    Nack,
    Pull,
    Release,
    RoundClosed,
    RoundOpen,
    Update,
    Want,
    Welcome,
)
from fcil_protocol.payloads.payload import unpack
from fcil_protocol.process.terminal import count_of
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_server.sessions.relay.sum_sender import SumSender
from fcil_server.sessions.relay.sum_terms import RoundTerms, SumTerms

WAIT_S = 10.0  # from the first update of a sum until it is sent without those that are missing
MOST_REMEMBERED = 10_000  # released updates that are not taken again

Frames = tuple[bytes, ...]


@dataclass
class _Lane:
    """One client's connection, with a session in a run that is added up."""

    terms: SumTerms
    order: RoundTerms | None = None
    receiver: Receiver = field(default_factory=lambda: Receiver(MIN_WINDOW_BYTES))


@dataclass
class _Round:
    """The round under way.

    Attributes:
        awaited: lanes whose clients are at work on it.
        total: the updates that are added and not sent.
        due: the timer after which they are sent without others; None: there are none.
        overdue: that timer has run out.
        ends_at: the round's deadline, on the loop's clock.
    """

    order: RoundTerms
    total: RunningSum
    ends_at: float = 0.0
    awaited: set[int] = field(default_factory=set)
    due: asyncio.TimerHandle | None = None
    overdue: bool = False


class Summing:
    """Takes, opens and adds up updates, and sends sums, in one session of a relay.

    Args:
        keys, client_id: the relay's. server: the keys for which sums are sealed.
        credit: bytes of one client that may be requested and not yet received.
        incoming: folder for large updates that are being received.
        push: sends the server a message of the relay's own.
        pull: sends a client of a lane a message.
        key_of: returns the CURVE key of a lane's client.
        notify: shows a note: level, text.
        counts: totals: ``sums`` that the server has, and updates ``added`` in them.
    """

    def __init__(
        self,
        keys: PrivateKeys,
        client_id: ClientId,
        federation: FederationId,
        server: PublicKeys,
        *,
        credit: int,
        incoming: Path,
        push: Callable[..., None],
        pull: Callable[[int, Message], None],
        key_of: Callable[[int], bytes],
        notify: Callable[[str, str], None],
        counts: Counter[str],
        wait_s: float = WAIT_S,
    ) -> None:
        self._keys = keys
        self._federation = federation
        self._sender = SumSender(keys, client_id, server, push)
        self._credit = credit
        self._push = push
        self._pull = pull
        self._key_of = key_of
        self._notify = notify
        self._counts = counts
        self._wait_s = wait_s
        with contextlib.suppress(OSError):  # without it, updates that need a file pass
            incoming.mkdir(mode=0o700, exist_ok=True)
        self._arriving = Arriving(incoming, per_client=1)
        self._known: dict[tuple[str, str], SumTerms | None] = {}  # of the newest run and schema
        self._lanes: dict[int, _Lane] = {}
        self._round: _Round | None = None
        self._receiving: set[int] = set()  # lanes with an update under way
        # Without an answer of the server: digest -> the lane, and the key of its client.
        self._taken: dict[str, tuple[int, bytes]] = {}
        self._newest: dict[bytes, str] = {}  # key -> digest of the client's newest taken update
        self._released: dict[str, None] = {}  # in order
        self._waiting: deque[tuple[int, IncomingEnvelope]] = deque()  # complete, to be opened
        self._adding = ""  # digest of the update that a thread opens
        self._opener: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop; nothing is lost: the clients send their updates again."""
        if self._round is not None:
            self._end_round()
        tasks = [task for task in (self._opener, self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sweep("")

    # --- down: what the server says to clients -----------------------------------------------

    def on_server_message(self, number: int, message: Message) -> None:
        """Learn from a message that passes to a client."""
        match message:
            case Welcome():
                self._welcome(number, message)
            case RoundOpen():
                try:
                    self._opened(number, message)
                except Exception as error:  # of the method's own code, say
                    self._notify("warning", f"updates pass unopened: {as_fcil_error(error)}")
            case RoundClosed():
                self._closed(message.key)
            case Ack() | Nack() | Want() if self._is_own(message.digest, number):
                # A Want: the server takes this one itself, so its chunks must pass.
                self._answered(message.digest)
                self._stop_awaiting(number)

    def _is_own(self, digest: str, number: int) -> bool:
        """Return True if an update is taken, of the client of this lane."""
        return digest in self._taken and self._taken[digest][1] == self._key_of(number)

    def _welcome(self, number: int, welcome: Welcome) -> None:
        self._drop_lane(number)
        relay = welcome.summing_relay
        if relay is None or relay.signing != self._keys.public.signing:
            return
        about = (welcome.run, welcome.schema_digest)
        if about not in self._known:
            self._known = {about: None}
            try:
                self._known = {about: SumTerms.of(welcome, self._federation)}
                self._notify("info", f"adds up its clients' updates in run {welcome.run}")
            except Exception as error:  # also of the method's own code
                self._notify("warning", str(as_fcil_error(error)))
        terms = self._known[about]
        if terms is not None:
            self._lanes[number] = _Lane(terms)

    def _opened(self, number: int, message: RoundOpen) -> None:
        lane = self._lanes.get(number)
        if lane is None:
            return
        lane.order = None
        order = lane.terms.round(message)
        if order is None:
            return
        if self._round is None or not self._round.order.is_of(order):
            if self._round is not None:
                self._end_round()
            self._round = _Round(order, order.new_sum())
        now = asyncio.get_running_loop().time()
        self._round.ends_at = now + max(message.remaining_s, 0.0)
        lane.order = order
        self._round.awaited.add(number)

    def _closed(self, key: RoundKey) -> None:
        if self._round is not None and self._round.order.key == key:
            self._end_round()  # for all lanes: the server tells every client that it asked

    def _end_round(self) -> None:
        """Forget the updates of a round that is over, or of a session."""
        assert self._round is not None
        if self._round.due is not None:
            self._round.due.cancel()
        self._round = None
        for number, lane in self._lanes.items():
            self._pause(number, lane)
            lane.order = None
        self._waiting.clear()
        self._taken.clear()
        self._newest.clear()
        self._sender.drop()
        self._sweep(self._adding)

    def _sweep(self, keep: str) -> None:
        """Remove what remains of updates; what cannot be removed, the next round removes."""
        with contextlib.suppress(FcilError):
            self._arriving.sweep({keep})

    def _answered(self, digest: str) -> None:
        """Forget an update that the server has, or refuses."""
        self._forget(digest)
        under_way = self._round
        if under_way is None:
            return
        added = [update.digest for update in under_way.total.updates]
        if digest in added:  # its numbers are not kept, so it cannot be subtracted
            self._start_again()
            self._release(one for one in added if one != digest)

    def _start_again(self) -> None:
        """Begin a new sum in the round under way."""
        assert self._round is not None
        self._round.total = self._round.order.new_sum()
        if self._round.due is not None:
            self._round.due.cancel()
        self._round.due, self._round.overdue = None, False
        self._open_waiting()

    # --- up: what clients say to the server ----------------------------------------------------

    def on_client_message(self, number: int, received: Received, frames: Frames) -> Frames | None:
        """Return what passes to the server in place of a client's message; None: nothing."""
        match received.message:
            case Update() as message:
                took = self._take(number, received, message)
                if not took:  # also a list of classes, in the middle of a round: of no matter
                    self._stop_awaiting(number)
                return (*frames[:5], b"") if took else frames[:5]
            case Chunk() as message if message.digest in self._taken:
                self._chunk(number, received, message)
                return None
            case Decline():
                self._stop_awaiting(number)
        return frames

    def _stop_awaiting(self, number: int) -> None:
        if self._round is not None:
            self._round.awaited.discard(number)
        self._send_if_due()

    def on_client_left(self, number: int) -> None:
        """Forget a lane; an update that is added counts all the same."""
        self._drop_lane(number)
        self._send_if_due()

    def _drop_lane(self, number: int) -> None:
        lane = self._lanes.get(number)
        if self._round is not None:
            self._round.awaited.discard(number)
        if lane is not None:
            self._pause(number, lane)
            del self._lanes[number]

    def _pause(self, number: int, lane: _Lane) -> None:
        """End the transfer of a lane; what came stays, for its client to resume in this round."""
        self._receiving.discard(number)
        for digest in list(lane.receiver.under_way):
            lane.receiver.end(digest)
            self._taken.pop(digest, None)

    def _take(self, number: int, received: Received, message: Update) -> bool:
        """Begin to receive an update if it can be added up; True: the relay has it, or will."""
        lane, digest = self._lanes.get(number), message.digest
        wraps = received.blobs[3:]
        if self._is_own(digest, number):
            first = self._lanes.get(self._taken[digest][0])
            if first is None or digest not in first.receiver.under_way:
                self._stop_awaiting(number)
                return True  # it is complete, and offered again, perhaps by a restarted client
            if first is lane and wraps:
                self._ask(number, lane)
                return True
            self._pause(self._taken[digest][0], first)
        elif digest in self._taken or digest == self._adding:
            return False  # another client's, or refused while a thread opens it
        if lane is None or lane.order is None or not wraps or digest in self._released:
            return False
        key, (data, signature) = self._key_of(number), received.blobs[:2]
        try:
            header = parse_header(data, max_plain_bytes=1 << 40)
            if len(wraps[0]) != WRAP_BYTES or header.update_id != digest:
                return False
            if not lane.order.fits(header):
                return False
            self._pause(number, lane)
            self._give_up_older(key, digest)
            assembly = self._arriving.take(_owner(key), header)
        except Exception:
            return False  # the server says what is wrong with it
        self._newest[key], self._taken[digest] = digest, (number, key)
        now = asyncio.get_running_loop().time()
        blobs = (data, signature, wraps[0])
        unasked = min(message.unasked, unrequested_chunks(header))
        self._receiving.add(number)
        envelope = lane.receiver.begin(blobs, assembly, now, unasked=unasked)
        self._continue(number, lane, envelope)
        return True

    def _give_up_older(self, key: bytes, digest: str) -> None:
        """Release an update in place of which its client offers another one."""
        older = self._newest.get(key, "")
        if older not in self._taken or older == digest:
            return
        self._answered(older)
        self._release([older])

    def _chunk(self, number: int, received: Received, message: Chunk) -> None:
        lane = self._lanes.get(number)
        if lane is None:
            return
        now = asyncio.get_running_loop().time()
        try:
            envelope = lane.receiver.put(message.digest, message.index, received.blobs[0], now)
        except WireError:  # it does not fit: its client or the network is at fault
            self._release([message.digest])
            return
        except Exception as error:
            self._notify("warning", str(as_fcil_error(error)))
            self._release([message.digest])
            return
        if envelope is not None:
            self._continue(number, lane, envelope)

    def _continue(self, number: int, lane: _Lane, envelope: IncomingEnvelope) -> None:
        if not envelope.complete:
            self._ask(number, lane)
            return
        lane.receiver.end(envelope.digest)
        self._receiving.discard(number)
        self._waiting.append((number, envelope))
        self._open_waiting()

    def _ask(self, number: int, lane: _Lane) -> None:
        lane.receiver.pace.most_bytes = share(self._credit, len(self._receiving), ASKED_BYTES)
        for want in lane.receiver.wants(asyncio.get_running_loop().time()):
            self._pull(number, Pull(digest=want.digest, chunks=want.chunks, span=want.span))

    def revive(self) -> None:
        """Ask again for chunks that were lost on a live connection; called at intervals."""
        now = asyncio.get_running_loop().time()
        for number, lane in self._lanes.items():
            if lane.receiver.revive(now):
                self._ask(number, lane)
        self._sender.revive(now)

    def _forget(self, digest: str) -> None:
        if digest not in self._taken:
            return
        number, key = self._taken.pop(digest)
        lane = self._lanes.get(number)
        if lane is not None and lane.receiver.end(digest) is not None:
            self._receiving.discard(number)
        for one in [one for one in self._waiting if one[1].digest == digest]:
            self._waiting.remove(one)
        if digest != self._adding:  # a thread reads it
            self._drop(key, digest)

    def _drop(self, key: bytes, digest: str) -> None:
        with contextlib.suppress(FcilError):  # a bad disk: `_sweep` tries again
            self._arriving.drop(_owner(key), digest)

    def _release(self, digests: Iterable[str]) -> None:
        """Let the server request updates itself; they are not taken again."""
        released = list(digests)
        for digest in released:
            if self._round is not None and digest in self._taken:
                self._round.awaited.discard(self._taken[digest][0])
            self._forget(digest)
            self._released[digest] = None
        for digest in list(self._released)[:-MOST_REMEMBERED]:
            del self._released[digest]
        for start in range(0, len(released), MAX_WANTED):
            self._push(Release(digests=released[start : start + MAX_WANTED]))
        self._send_if_due()

    # --- adding ---------------------------------------------------------------------------------

    def _open_waiting(self) -> None:
        if self._waiting and (self._opener is None or self._opener.done()):
            self._opener = asyncio.get_running_loop().create_task(self._open_all())

    @property
    def _is_full(self) -> bool:
        return self._round is not None and len(self._round.total.updates) >= MOST_SUMMED

    async def _open_all(self) -> None:
        """Open and add the waiting updates one after the other: one in memory at a time.

        While the sum is full and another one is under way, they wait.
        """
        while self._waiting and not self._is_full:
            await self._open(*self._waiting.popleft())
            self._send_if_due()

    async def _open(self, number: int, envelope: IncomingEnvelope) -> None:
        under_way, digest = self._round, envelope.digest
        if under_way is None or digest not in self._taken:
            return
        order, total = under_way.order, under_way.total
        _, key = self._taken[digest]
        error: FcilError | None = None
        self._adding = digest
        try:
            await asyncio.to_thread(self._add, envelope, order, total)
        except Exception as fault:
            error = as_fcil_error(fault)
        finally:
            self._adding = ""
        self._drop(key, digest)
        if self._round is not under_way:
            return
        under_way.awaited.discard(number)
        if error is not None:
            self._notify("warning", f"an update is left to the server: {error.message}")
            self._release([digest])
        elif total is not under_way.total:  # which the server's answer to another one ended
            self._release([digest])
        elif digest not in self._taken:  # the server has answered meanwhile
            self._answered(digest)
        elif under_way.due is None:
            loop = asyncio.get_running_loop()
            # Early enough before the round's end to arrive.
            wait = min(self._wait_s, max(0.0, (under_way.ends_at - loop.time()) / 2))
            under_way.due = loop.call_later(wait, self._wait_no_longer, under_way)

    def _add(self, envelope: IncomingEnvelope, order: RoundTerms, total: RunningSum) -> None:
        """Open an update, check it, and add it; runs in a thread."""
        key = unwrap_key(envelope.wrap, envelope.header_bytes, self._keys)
        payload = unpack(open_body(envelope.header, key, envelope.assembly.steps()))
        order.add(total, envelope.digest, payload)

    # --- sums -----------------------------------------------------------------------------------

    def _send_if_due(self) -> None:
        """Send the sum if every client at work has answered, or has had time to, or it is full.

        One sum at a time is under way.
        """
        under_way = self._round
        if under_way is None or not (added := under_way.total.updates):
            return
        if self._adding or self._sending is not None or self._sender.waits:
            return  # once that has ended, this one's turn comes
        waits = bool(under_way.awaited or self._waiting)
        if waits and not under_way.overdue and len(added) < MOST_SUMMED:
            return
        total = under_way.total
        self._start_again()
        loop = asyncio.get_running_loop()
        self._sending = loop.create_task(self._send(under_way.order, total))
        self._sending.add_done_callback(self._sent)

    def _wait_no_longer(self, under_way: _Round) -> None:
        under_way.overdue = True
        self._send_if_due()

    def _sent(self, _task: asyncio.Task[None]) -> None:
        self._sending = None
        self._send_if_due()

    async def _send(self, order: RoundTerms, total: RunningSum) -> None:
        added = [update.digest for update in total.updates]
        try:
            made = await asyncio.to_thread(self._sender.seal, order, total)
            if self._round is None or self._round.order is not order:
                return
            left = [digest for digest in added if digest in self._taken]
            if len(left) < len(added):  # the server has answered one by itself
                self._release(left)
                return
            self._sender.send(made, asyncio.get_running_loop().time())
        except Exception as error:
            self._notify("warning", f"a sum is not sent: {as_fcil_error(error).message}")
            self._sender.drop()
            self._release(added)

    def on_want(self, message: Want) -> None:
        """Send the server the chunks of a sum that it requests."""
        self._sender.on_want(message, asyncio.get_running_loop().time())

    def on_answer(self, message: Ack | Nack) -> bool:
        """Take the server's answer to a sum; False: it is about something else."""
        answered = self._sender.on_answer(message)
        if answered is None:
            return False
        if isinstance(message, Ack):
            self._counts["sums"] += 1
            self._counts["added"] += len(answered.digests)
            for digest in answered.digests:
                self._forget(digest)
            self._send_if_due()
        else:
            many = count_of(len(answered.digests), "update")
            self._notify("warning", f"the server refuses a sum of {many}: {message.text}")
            self._release(digest for digest in answered.digests if digest in self._taken)
        return True


def _owner(key: bytes) -> ClientId:
    """Return the name under which the updates of a client that are arriving are kept."""
    return ClientId(key.hex())
