"""A run's handling of uploads: updates for its rounds, and lists of classes."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager

from fcil_protocol.envelopes.envelope import Core
from fcil_protocol.errors import FcilError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import Message
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.process.terminal import count_of
from fcil_server.rounds.classes import refused_names
from fcil_server.rounds.coordinator import Coordinator
from fcil_server.runs.promotion import Promotion
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.run_ports import RunPorts
from fcil_server.sessions.uploads import Accepted, Expectation, IntakePorts


class RunUploads(IntakePorts):
    """Takes uploads that intake has opened.

    Args:
        coordinator: of the run.
        ports: the daemon's side of it.
        promotion: offers the promoted state to clients that are ready.
    """

    def __init__(
        self, coordinator: Coordinator, ports: RunPorts, promotion: Promotion | None = None
    ) -> None:
        self._coordinator = coordinator
        self._promotion = promotion
        self._ledger = coordinator.context.ledger
        self._ports = ports

    def expect(self, client: ClientId, core: Core) -> Expectation:
        """Return the requirements for an update with this core, or raise the reason against it."""
        return self._coordinator.reception.expect(client, core)

    def expect_sum(self, core: Core) -> Expectation:
        """Return the requirements for a relay's sum, or raise the reason against it."""
        return self._coordinator.reception.expect_sum(core)

    def summing_relay(self, peer: Peer, core: Core) -> ClientId | None:
        """Return the relay that carries a client, if it may add up its update."""
        allowed = self._coordinator.reception.may_be_summed(core.kind)
        return self._ports.summing_relay(peer) if allowed else None

    def recorded(self, digest: str) -> bool:
        """Return True if the ledger has this update, or this sum."""
        return self._coordinator.reception.recorded(digest)

    def opened(self, accepted: Accepted) -> None:
        """Note that an update is complete and valid, and not yet on disk."""
        self._ports.opened(accepted)

    def together(self) -> AbstractContextManager[None]:
        """Let all that is `stored` inside be committed at its end, or, on an error, nothing."""
        return self._ledger.transaction(waits=False)

    def stored(self, accepted: Accepted) -> None:
        """Record an update that is safe in the spool in the ledger."""
        self._coordinator.reception.stored(accepted)

    def committed(self, accepted: Accepted) -> None:
        """Note that an update was committed to the ledger."""
        self._coordinator.reception.committed(accepted)
        self._ports.stored(accepted)
        size = accepted.sealed_bytes / 1e3
        many = len(accepted.summed)
        what = f"sum of {count_of(many, 'update')}" if many else "update"
        text = f"{what} from {self._coordinator.context.name_of(accepted.client)}, {size:.1f} kB"
        self._ports.notify("info", "update", text, accepted.client)

    def wait_until_durable(self) -> None:
        """Return when all commits are on disk."""
        self._ledger.sync()

    def announced(self, peer: Peer, payload: Payload) -> None:
        """Take a client's inventory: its classes and their numbers of images."""
        if not self.is_here(peer):
            return  # it left while its list was opened, and will announce it again
        self._ports.announced(peer)
        names = [str(n) for n in payload.meta["names"]]  # type: ignore[union-attr]
        told = self._coordinator.context.classes.announce(peer.client, names)
        for text in refused_names(told.refused):
            self._ports.notify("warning", "class_refused", f"{peer.name}: {text}", peer.client)
        keys = [class_key(n) for n in names]
        # Two folders of a client may be one class in different letter case: their images add up.
        train, test = Counter[str](), Counter[str]()
        for key, n, m in zip(keys, payload.i64("train"), payload.i64("test"), strict=True):
            train[key] += int(n)
            test[key] += int(m)
        # A folder that is being filled is scanned several times, often with the same counts.
        news = peer.resting or (peer.train, peer.test) != (dict(train), dict(test))
        peer.train, peer.test = dict(train), dict(test)
        peer.names, peer.resting = tuple(names), False
        held = [n for n in peer.train.values() if n]  # of other classes it has only test images
        images, classes = count_of(sum(held), "training image"), count_of(len(held), "class")
        text = f"{peer.name} holds {images} of {classes}"
        if news:
            self._ports.notify("info", "announced", text, peer.client)
        self._coordinator.on_client_ready(peer)
        if self._promotion is not None:
            self._promotion.on_client_ready(peer)
        if self._coordinator.progress.phase == "done" and not self._ports.another_waits():
            self._ports.tell_done(peer)

    def is_here(self, peer: Peer) -> bool:
        """Return True if a session is its client's present one."""
        return self._ports.peers.by_conn(peer.conn) is peer

    def send(self, peer: Peer, message: Message) -> bool:
        """Send a message; False if the client is gone."""
        return self._ports.send(peer, message)

    def refused(self, peer: Peer, error: FcilError) -> None:
        """Count the refusal of a client's message."""
        self._ports.count_refusal(peer, error)

    def failed(self, error: FcilError) -> None:
        """End the server with this error."""
        self._ports.fail(error)
