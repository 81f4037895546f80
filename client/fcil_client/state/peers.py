"""The other clients of masked rounds, as far as this one has met them, and those that are pinned.

``peers.json`` in the client's directory (0600): client id -> fingerprint of its signing key, and
whether the owner of this device has confirmed it. A server could list clients that it made up; pins
are what it cannot make up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil_adapters.masks.record import MaskList
from fcil_protocol.errors import CorruptFile, UsageError
from fcil_protocol.ids import ClientId, is_client_id
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_protocol.trust.keys import FINGERPRINT_DIGITS, fingerprint_of

NAME = "peers.json"
MOST_PEERS = 10_000
LEAST_DIGITS = 16  # of a fingerprint: fewer could be found by trying keys
_LISTED = "Without --pin and --unpin, the same command lists them."
_WHOLE = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}")


@dataclass(frozen=True)
class KnownPeer:
    """Another client.

    Attributes:
        client: its id; empty: it was pinned before it was met.
        fingerprint: of the key that signs what it sends.
        pinned: the owner of this device has confirmed the fingerprint.
    """

    client: ClientId
    fingerprint: str
    pinned: bool


class PeerBook:
    """The file of the peers that one client has met."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME

    def peers(self) -> list[KnownPeer]:
        """Return the peers, by their ids.

        Raises:
            CorruptFile, StorageError: the file cannot be read.
        """
        with storage_errors("read", self._path):
            data = self._path.read_bytes() if self._path.exists() else b"[]"
        try:
            entries: list[dict[str, Any]] = json.loads(data)
            found = [
                KnownPeer(ClientId(e["client"]), str(e["fingerprint"]), bool(e["pinned"]))
                for e in entries
            ]
            if not all(p.client == "" or is_client_id(p.client) for p in found):
                raise ValueError("client id")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFile(
                f"{self._path} is damaged ({type(error).__name__}).",
                action="Restore it from a backup, or remove it: its peers are met again in the "
                "next masked round, and are to be pinned again.",
            ) from error
        return found

    def pinned(self) -> frozenset[str]:
        """Return the pinned fingerprints."""
        return frozenset(peer.fingerprint for peer in self.peers() if peer.pinned)

    def known(self) -> dict[ClientId, str]:
        """Return client id -> fingerprint of the pinned peers that were met."""
        return {p.client: p.fingerprint for p in self.peers() if p.pinned and p.client}

    def meet(self, members: MaskList, own: ClientId) -> None:
        """Record the clients of a checked list; those that are pinned stay as they are.

        Beyond `MOST_PEERS` new clients are not recorded.

        Raises:
            CorruptFile, DiskFull, StorageError: the file cannot be read or written.
        """
        with self._turn():
            self._meet(members, own)

    def _meet(self, members: MaskList, own: ClientId) -> None:
        peers = self.peers()
        met = {p.client: p for p in peers if p.client}
        early = {p.fingerprint: p for p in peers if not p.client}  # pinned before they were met
        changed = False
        for name, key in zip(members.clients, members.signing, strict=True):
            fingerprint, before = fingerprint_of(key.tobytes()), met.get(name)
            new = before is None or (before.fingerprint != fingerprint and not before.pinned)
            if name != own and new and (before is not None or len(met) < MOST_PEERS):
                pinned = early.pop(fingerprint, None) is not None
                met[name] = KnownPeer(name, fingerprint, pinned)
                changed = True
        if changed:
            self._write([*met.values(), *early.values()])

    def pin(self, fingerprint: str, *, pinned: bool) -> None:
        """Pin a fingerprint, or take that back.

        Args:
            fingerprint: of a peer's key, or the first `LEAST_DIGITS` or more of one that was met;
                a whole one may be pinned before its owner is met.
            pinned: True to pin it.

        Raises:
            UsageError: no peer has it, or several have.
            CorruptFile, DiskFull, StorageError: the file cannot be read or written.
        """
        with self._turn():
            self._pin(fingerprint, pinned=pinned)

    def _pin(self, fingerprint: str, *, pinned: bool) -> None:
        peers, wanted = self.peers(), fingerprint.lower()
        if len(wanted) < LEAST_DIGITS:
            raise UsageError(
                f"the fingerprint {fingerprint[:40]!r} has {len(wanted)} digits, expected "
                f"{LEAST_DIGITS} or more.",
                action=_LISTED,
            )
        found = [p for p in peers if p.fingerprint.startswith(wanted)]
        if not found and pinned and _WHOLE.fullmatch(wanted):
            found = [KnownPeer(ClientId(""), wanted, pinned=False)]
        if len(found) != 1:
            raise UsageError(
                f"{len(found)} peers have a fingerprint that begins with {fingerprint[:40]!r}, "
                "expected one.",
                action=f"{_LISTED} Give {LEAST_DIGITS} digits or more, or all "
                f"{FINGERPRINT_DIGITS} of a peer that was not met yet.",
            )
        rest = [p for p in peers if p != found[0]]
        self._write([*rest, KnownPeer(found[0].client, found[0].fingerprint, pinned)])

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the daemon, or the command, that changes the file now: each rewrites it."""
        path = self._path.with_suffix(".lock")
        with storage_errors("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with storage_errors("lock", path):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, peers: Iterable[KnownPeer]) -> None:
        entries = [vars(p) for p in sorted(peers, key=lambda p: (p.client, p.fingerprint))]
        kept = [entry for entry in entries if entry["client"] or entry["pinned"]]
        write_atomic(self._path, json.dumps(kept, indent=1).encode())
