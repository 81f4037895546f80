"""The parts of a server that serve its run, and the run's access to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.messages.messages import Message
from fcil_server.daemon.context import ServerContext
from fcil_server.daemon.cut_offs import CutOffs
from fcil_server.daemon.dispatch import Dispatch
from fcil_server.daemon.flush import LedgerFlusher
from fcil_server.daemon.live import LiveReports
from fcil_server.daemon.sessions import ClientSessions
from fcil_server.event_loop import Lag, LagMeter
from fcil_server.runs.export_jobs import ExportJobs
from fcil_server.runs.run_queue import RunQueue
from fcil_server.sessions.conduct import ANNOUNCED
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.run_ports import RunPorts
from fcil_server.sessions.uploads import Accepted


@dataclass(frozen=True)
class ServerParts:
    """The parts that serve the run."""

    context: ServerContext
    sessions: ClientSessions
    cut_offs: CutOffs
    dispatch: Dispatch
    live: LiveReports
    flusher: LedgerFlusher
    exports: ExportJobs


@dataclass(frozen=True, kw_only=True)
class ServerPorts(RunPorts):
    """The run's access to the parts that serve it.

    Attributes:
        meter: measures how late the loop is.
        stop: ends the server. failed: the same, with an error. ended: the run is complete.
        queue: the runs that wait.
        parts: returns the parts, which are made once the run is open.
    """

    meter: LagMeter
    stop: Callable[[], None]
    failed: Callable[[FcilError], None]
    ended: Callable[[], None]
    queue: RunQueue
    parts: Callable[[], ServerParts]

    def send(self, peer: Peer, message: Message, *blobs: bytes) -> bool:
        return self.parts().sessions.send(peer, message, *blobs)

    def summing_relay(self, peer: Peer) -> ClientId | None:
        relay = self.parts().context.link.summing_relay(peer.conn)
        return None if relay is None else relay.client_id

    def lag(self) -> Lag:
        return self.meter.take()

    async def drain(self) -> None:
        await self.parts().context.intake.drain()

    async def round_opens(self, key: RoundKey, new_parts: set[str]) -> None:
        context = self.parts().context
        await context.byte_meter.begin(key, new_parts)
        if context.intake_pool is not None:
            coordinator, parts = context.run.coordinator, context.run.publisher.small_parts()
            late, base = coordinator.context.is_asynchronous(key.kind), coordinator.progress.base
            context.intake_pool.open_round(None if late else key, base, parts)
        self.parts().live.round_opens(key)

    async def round_closed(self, key: RoundKey) -> None:
        coordinator = self.parts().context.run.coordinator
        step = coordinator.progress.step
        continues = step is not None and coordinator.context.continues_after(step)
        context = self.parts().context
        senders = [*self.peers, *context.link.summing_relays()]
        context.intake.sweep(senders, key if continues else None)
        await self.parts().flusher.close_round(key)

    def drained(self) -> None:
        text = "no client is at work; once restarted, the server continues"
        self.notify("info", "drained", text)
        self.stop()

    def another_waits(self) -> bool:
        return self.queue.next() is not None

    def done(self) -> None:
        self.ended()

    async def flush_bytes(self) -> None:
        await self.parts().flusher.wait_until_settled()
        await self.parts().context.byte_meter.flush_settled()

    def announced(self, peer: Peer) -> None:
        self.parts().cut_offs.count_needless(peer.client, ANNOUNCED)

    def opened(self, accepted: Accepted) -> None:
        self.parts().live.opened(accepted)

    def stored(self, accepted: Accepted) -> None:
        self.parts().context.byte_meter.tensors_up(accepted.client, accepted.tensor_bytes)

    def count_refusal(self, peer: Peer, error: FcilError) -> None:
        self.parts().sessions.count_refusal(peer, error)

    def fail(self, error: FcilError) -> None:
        self.failed(error)
