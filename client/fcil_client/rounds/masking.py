"""A client's part in masked rounds: its durable secrets, and the pure work of `masks.member`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.privacy import system_normal
from fcil_adapters.masks.exchanges import (
    KEYS,
    LIST,
    NAMES,
    SETS,
    SHARES,
    VOTE,
    VOTES,
    fewest_classes,
    is_summed_once,
)
from fcil_adapters.masks.member import Bounds, Member, keys_upload
from fcil_adapters.masks.record import Letters, MaskList, context_of, letters_part
from fcil_client.link.handshake import Terms
from fcil_client.state.home import Home
from fcil_client.state.mask_secrets import MaskFile
from fcil_client.state.peers import PeerBook
from fcil_protocol.errors import SchemaMismatch, TrustError
from fcil_protocol.ids import ClientId, seed_word, sha256_of
from fcil_protocol.messages.messages import RoundOpen
from fcil_protocol.payloads.payload import Payload, pieces, unpack
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.trust.keys import PrivateKeys

Parts = Mapping[str, Payload]
I64 = NDArray[np.int64]


class Masking:
    """The masked rounds of one client; all methods read and write the disk."""

    def __init__(self, home: Home, client: ClientId, keys: PrivateKeys) -> None:
        self.home, self.client, self.keys = home, client, keys
        self.file = MaskFile(home.directory)

    def upload(self, order: RoundOpen, terms: Terms, parts: Parts) -> Payload:
        """Return the upload of a round of keys, shares, votes or unmasking.

        Raises:
            TrustError: the server asks for what would show an update.
            SchemaMismatch: a part is missing.
            CorruptFile, DiskFull, StorageError: the secrets cannot be read or kept.
        """
        with self.file.lock:
            if order.kind == KEYS:
                secrets = self.file.begin(order.key)
                return keys_upload(
                    secrets, self.keys, order.run, order.task, order.round, self.client
                )
            member = self._member(order, terms, parts)
            keys = self._signer(member)
            if order.kind == SHARES:
                return member.shares_upload(keys)
            delivered, letters = self._letters(member, parts)
            sets = _part(parts, SETS)
            survivors, hidden = sets.i64("survivors"), np.asarray(sets.tensors["hidden"], np.uint8)
            about = np.asarray(sets.tensors["about"], np.uint8).tobytes()
            self.file.check_about(about.hex())
            member.check_survivors(delivered, survivors, hidden, about)
            self.file.settle_survivors(_digest(survivors))
            if order.kind == VOTE:
                return member.vote_upload(keys, delivered, survivors)
            votes = _part(parts, VOTES)
            signatures = np.asarray(votes.tensors["signatures"], np.uint8)
            member.check_votes(delivered, survivors, votes.i64("voted"), signatures)
            return member.unmask_upload(delivered, survivors, letters)

    def check_unused(
        self, order: RoundOpen, terms: Terms, parts: Parts, classes: Iterable[str]
    ) -> None:
        """Check, before any work, that nothing of an update is in another sum of the run.

        Raises:
            TrustError: something is, or could be.
        """
        exchange = terms.exchange(order.kind)
        assert exchange is not None, "the order is of the run's method"
        if len(order.classes) < fewest_classes(terms.method, [exchange]):
            raise TrustError(
                "masked round: it trains on a task of one class, of which each round would send "
                "the same means, and of two sums that differ by one client the difference is its "
                "update.",
                action="Nothing was sent. Ask the operator for tasks of two classes or more "
                "(tasks.min_new_classes).",
            )
        members = MaskList.read(_part(parts, LIST))
        cycle = (order.task, members.cycle)
        self.file.check_unused(order.run, cycle, _once(order, terms, classes))

    def masked(
        self,
        order: RoundOpen,
        terms: Terms,
        task: TaskInfo,
        parts: Parts,
        names: Mapping[str, int],
        held: Collection[str],
        upload: Payload,
    ) -> Payload:
        """Return the masked sums of an upload, which has passed its own checks.

        Args:
            order: of the method's own round.
            terms: the run's.
            task: of the order.
            parts: every part that the order names, those of masks included.
            names: class name -> id, as the server gave them to this client.
            held: the classes with training images of which the server knows by this client.
            upload: the method's own.

        Raises:
            DataError: a sum is too large to be masked.
            TrustError, SchemaMismatch, CorruptFile, DiskFull, StorageError: as `upload`.
        """
        exchange = terms.exchange(order.kind)
        assert exchange is not None, "the order is of the run's method"
        assert exchange.additive is not None, "its rounds are masked"
        dims, specs = terms.dims(task, order.kind), exchange.additive.sums
        shapes = {
            spec.name: tuple(size if isinstance(size, int) else dims[size] for size in spec.shape)
            for spec in specs
        }
        sums = exchange.additive.read(upload)
        classes = [name for name, number in names.items() if number in order.classes]
        with self.file.lock:
            member = self._member(order, terms, parts)
            delivered, letters = self._letters(member, parts)
            shown = _part(parts, NAMES)
            digests = np.asarray(shown.tensors["names"], np.uint8)
            member.check_names(digests, shown.i64("places"), names, held, order.classes)
            about = self._about(order, terms, parts)
            if (kept := self.file.kept(about.hex())) is not None:
                return unpack(kept)  # the bytes that its masks hide; others would show the change
            if noises_sum(terms, order.kind, task):
                fewest = terms.privacy.fewest(int(delivered.sum()))
                part = terms.privacy.noise_multiplier / np.sqrt(fewest)
                for one in exchange.additive.noised:
                    deviation = part * terms.privacy.clip**one.degree
                    values = sums[one.name]
                    sums[one.name] = values + deviation * system_normal(values.shape)
            keys = self._signer(member)
            hidden = member.masked(sums, specs, shapes, delivered, letters, keys, about)
            once = _once(order, terms, classes)
            self.file.settle_masked(b"".join(pieces(hidden)), about.hex(), once)
        return hidden

    def _about(self, order: RoundOpen, terms: Terms, parts: Parts) -> bytes:
        """Return `context_of` the order.

        Raises:
            TrustError: the random numbers of this client are not its own.
        """
        if order.seed[1:] != [seed_word(self.client)]:
            raise TrustError(
                "masked round: the seed of this client is not made of its id.",
                action="Nothing was sent. Ask the operator; if others see the same, the server is "
                "at fault.",
            )
        return context_of(
            order.kind,
            order.round,
            order.rounds,
            order.seed[0],
            terms.schema_digest,
            order.classes,
            order.past,
            parts,
        )

    def _member(self, order: RoundOpen, terms: Terms, parts: Parts) -> Member:
        members = MaskList.read(_part(parts, LIST))
        secrets = self.file.of(order.run, order.task, members.cycle)
        self.file.settle_terms(terms.schema_digest)
        book = PeerBook(self.home.directory)
        bounds = Bounds(terms.privacy, book.pinned(), book.known())
        member = Member.of(secrets, members, order.run, order.task, self.client, bounds)
        self.file.settle_members(member.digest.hex())
        book.meet(members, self.client)
        return member

    def _signer(self, member: Member) -> PrivateKeys:
        return self.file.signer(member.members.signing[member.own].tobytes(), self.keys)

    def _letters(self, member: Member, parts: Parts) -> tuple[I64, Letters]:
        """Return the checked set of clients that have sent shares, and their letters."""
        delivered = _part(parts, SETS).i64("delivered")
        part = _part(parts, letters_part(self.client))
        letters = Letters.read(part)
        member.check_delivered(delivered, letters)
        self.file.settle_delivered(sha256_of(_digest(delivered).encode(), *pieces(part)))
        return delivered, letters


def noises_sum(terms: Terms, kind: str, task: TaskInfo) -> bool:
    """Return True if clients add parts of one noise to their sums, instead of a whole one each.

    The parts of the fewest clients of an opened sum are the whole noise, since variances add up.
    Rows of classes without images get them too, since the others' rows need them.
    """
    exchange = terms.exchange(kind)
    if exchange is None or exchange.additive is None or not exchange.masking:
        return False
    statistics = terms.method.statistics(terms.hparams, kind, task)
    protected = {name for one in statistics for name in one.tensors}
    covered = {name for one in exchange.additive.noised for name in one.made_of}
    return terms.privacy.noise_multiplier > 0 and bool(protected) and protected <= covered


def _digest(flags: I64) -> str:
    return hashlib.sha256(flags.tobytes()).hexdigest()


def _once(order: RoundOpen, terms: Terms, classes: Iterable[str]) -> list[str]:
    """Return names, by this client's own folders, of what an update holds and may be summed once.

    Ids of classes and tasks are the server's, and it could give others.
    """
    exchange = terms.exchange(order.kind)
    assert exchange is not None, "the order is of the run's method"
    if not is_summed_once(terms.method, exchange):
        return []
    keys = sorted(class_key(name) for name in classes)
    return [hashlib.sha256(f"{order.kind}/{key}".encode()).hexdigest()[:32] for key in keys]


def _part(parts: Parts, name: str) -> Payload:
    if name not in parts:
        raise SchemaMismatch(f"the server's order of a masked round names no part {name!r}.")
    return parts[name]
