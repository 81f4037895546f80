"""A client's part in masked rounds: pure functions of its secrets and what the server published."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fcil_adapters.contract.averaging import ABOUT, HIDDEN, Sums, SumSpec
from fcil_adapters.masks.graph import degree, is_together, threshold, votes_needed
from fcil_adapters.masks.record import (
    HIDING,
    I64,
    SHARED,
    SIGNED,
    U8,
    VOTED,
    Letters,
    MaskList,
    about_owner,
    as_rows,
    ballot,
    hiding,
    letter,
    name_digest,
    share_name,
    statement,
    tied,
)
from fcil_adapters.masks.shares import (
    PAIR_BYTES,
    SHARE_BYTES,
    RoundSecrets,
    add_stream,
    commitment,
    mask_key,
    pair_seed,
    seal,
    split,
    stream_of_pair,
    stream_of_self,
    unseal,
)
from fcil_adapters.numerics.fixed_point import to_fixed_point
from fcil_adapters.numerics.weighted_sums import dense
from fcil_protocol.errors import BadSignature, TrustError
from fcil_protocol.ids import ClientId
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys, fingerprint_of, verify_signature

MOST_UNPINNED = 1 / 3  # of a client's neighbours, once its owner has pinned some


def _one() -> I64:
    return np.ones(1, np.int64)


def keys_upload(
    secrets: RoundSecrets, keys: PrivateKeys, run: str, task: int, cycle: int, client: ClientId
) -> Payload:
    """Return a client's public keys of a masked round, signed with its identity."""
    public = secrets.public()
    signature = keys.sign(SIGNED, statement(run, task, cycle, client, public))
    return Payload(
        {
            "keys": as_rows([public]),
            "signing": as_rows([keys.public.signing]),
            "signature": as_rows([signature]),
            "n": _one(),
        }
    )


@dataclass(frozen=True)
class Bounds:
    """The demands of a client on a masked round.

    Attributes:
        terms: the run's, with the least number of clients of a sum.
        pinned: fingerprints of the signing keys that the owner of the device has confirmed; none:
            any client counts.
        known: client id -> pinned fingerprint, of the clients that were met with it.
    """

    terms: PrivacyTerms
    pinned: Collection[str] = ()
    known: Mapping[ClientId, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One client of a masked round, with the list that it has checked.

    Attributes:
        secrets: its own.
        members: the list.
        digest: of the list.
        own: its position there.
        bounds: its demands.
    """

    secrets: RoundSecrets
    members: MaskList
    digest: bytes
    own: int
    bounds: Bounds

    @classmethod
    def of(
        cls,
        secrets: RoundSecrets,
        members: MaskList,
        run: str,
        task: int,
        client: ClientId,
        bounds: Bounds,
    ) -> Member:
        """Check a list, and return this client's place in it.

        Args:
            secrets: drawn for this list.
            members: as the server published it.
            run: id of the run.
            task: index of the task.
            client: this one.
            bounds: its demands.

        Raises:
            TrustError: the list is not one that this client may hide among.
        """
        count, least = len(members.clients), bounds.terms.secure_min_clients
        if count < least:
            raise _refused(f"the list has {count} clients, expected {least} or more")
        if client not in members.clients:
            raise _refused("this client is not in the list")
        own = members.clients.index(client)
        if members.keys[own].tobytes() != secrets.public():
            raise _refused("the list has other keys of this client than it sent")
        for rows in (members.keys, members.signing):
            if len({row.tobytes() for row in rows}) < count:
                raise _refused("two clients of the list have the same key")
        for index, name in enumerate(members.clients):
            if fault := members.fault(run, task, index):
                raise _refused(f"the keys of client {name} are not signed by it: {fault}")
        member = cls(secrets, members, members.digest(run, task), own, bounds)
        member._check_pins()
        return member

    def _check_pins(self) -> None:
        if not self.bounds.pinned:
            return
        for index, name in enumerate(self.members.clients):
            if name in self.bounds.known and index != self.own and not self._is_known(index):
                raise _refused(
                    f"client {name} is pinned with another key",
                    "If its owner says that it has a new one, unpin it (fcil-client peers).",
                )
        around = self.neighbours
        unknown = sum(not self._is_known(i) for i in around)
        if unknown > MOST_UNPINNED * len(around):
            raise _refused(
                f"{unknown} of this client's {len(around)} neighbours are not among its pinned "
                "peers, and a third of them may be others",
                _ASK_OWNERS,
            )

    def _is_known(self, index: int) -> bool:
        """Return True if a client is this one or pinned; without pins, always."""
        pinned = self.bounds.pinned
        return (
            index == self.own
            or not pinned
            or fingerprint_of(self.members.signing[index].tobytes()) in pinned
        )

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Positions of the clients that this one shares masks with, ascending."""
        return self.members.around(self.digest)[self.own]

    @property
    def threshold(self) -> int:
        """Number of neighbours whose shares give a secret."""
        return threshold(degree(len(self.members.clients)))

    def shares_upload(self, keys: PrivateKeys) -> Payload:
        """Return the shares of this client's two secrets, each sealed for one neighbour.

        Args:
            keys: this client's; each letter is signed, or the server could write its own.
        """
        around, own = self.neighbours, self.own
        of_self = split(self.secrets.own, self.threshold, len(around))
        of_key = split(self.secrets.mask, self.threshold, len(around))
        letters, committed, pairs, signed = [], [], [], []
        for other, a, b in zip(around, of_self, of_key, strict=True):
            info, pair = tied(self.digest, own, other), b""
            letters.append(seal(self._letters_key(other), a + b, info))
            committed.append(
                commitment(a, info, share_name(survived=True))
                + commitment(b, info, share_name(survived=False))
            )
            if other > own:
                seed = pair_seed(self.secrets.mask, self.digest, *self._names(other))
                pair = seal(self._mask_key(other), seed, info)
                pairs.append(pair)
            said = letter(self.digest, own, other, letters[-1], committed[-1], pair)
            signed.append(keys.sign(SHARED, said))
        return Payload(
            {
                "letters": as_rows(letters),
                "committed": as_rows(committed),
                "pairs": as_rows(pairs) if pairs else np.zeros((0, PAIR_BYTES), np.uint8),
                "signed": as_rows(signed),
                "own": as_rows(
                    [commitment(self.secrets.own, about_owner(self.digest, own), "own")]
                ),
                "n": _one(),
            }
        )

    def check_names(
        self,
        names: U8,
        places: I64,
        own: Mapping[str, int],
        held: Collection[str],
        classes: Sequence[int],
    ) -> None:
        """Check that this client's classes have the ids that they have for all clients.

        A server that names each client one of its classes alone would get rows of one client each.

        Args:
            names: (m, 32), salted digests of all names of the task's classes.
            places: (m,) of their classes in the task.
            own: name -> id, as the server gave them to this client.
            held: the classes with images that this client has announced.
            classes: ids of the task's classes.

        Raises:
            TrustError: a class has another id or none, or two classes have the same name.
        """
        if not all(place < len(classes) for place in places.tolist()):
            raise _refused("a name belongs to no class of the task")
        ids = {row.tobytes(): classes[i] for row, i in zip(names, places.tolist(), strict=True)}
        if len(ids) != len(names):
            raise _refused("two classes of the task have the same name")
        task = set(classes)
        for name, number in own.items():
            if number in task and ids.get(name_digest(self.digest, name)) != number:
                raise _refused(f"class {name!r} has another id for this client than for others")
        for name in held:
            listed = ids.get(name_digest(self.digest, name))
            if listed is not None and own.get(name) != listed:
                raise _refused(
                    f"class {name!r}, of which this client has images, is left out of its part"
                )

    def _names(self, other: int) -> tuple[ClientId, ClientId]:
        low, high = sorted((self.own, other))
        return self.members.clients[low], self.members.clients[high]

    def _letters_key(self, other: int) -> PublicKeys:
        return PublicKeys.for_sealing(self.members.letters_public(other))

    def _mask_key(self, other: int) -> PublicKeys:
        return PublicKeys.for_sealing(self.members.mask_public(other))

    # --- masked sums ------------------------------------------------------------------------

    def masked(
        self,
        sums: Sums,
        specs: Iterable[SumSpec],
        shapes: Mapping[str, tuple[int, ...]],
        delivered: I64,
        letters: Letters,
        keys: PrivateKeys,
        about: bytes,
    ) -> Payload:
        """Return sums in fixed point, with this client's masks added.

        Args:
            sums: of the method's own upload, which does not leave the client.
            specs: of all sums.
            shapes: of the sums, the same for all clients.
            delivered: (n,), 1 for clients whose shares have come.
            letters: to this client, from each of its neighbours among them.
            keys: this client's; it signs the clients that it hides among.
            about: `record.context_of` the round.

        Raises:
            DataError: a sum is larger than a client's part of the bound.
            TrustError: the sets or a letter are not what they must be.
        """
        self.check_delivered(delivered, letters)
        self.open_letters(letters)  # so that no sum is sent that the neighbours could not unmask
        count = len(self.members.clients)
        vector = {
            s.name: np.ascontiguousarray(to_fixed_point(dense(sums, s, shapes[s.name]), s, count))
            for s in specs
        }
        name = self.members.clients[self.own]
        add_stream(vector, stream_of_self(self.secrets.own, self.digest, name), 1)
        for other, pair in self._pairs(letters).items():
            sign = 1 if self.own < other else -1
            add_stream(vector, stream_of_pair(pair, self.digest, *self._names(other)), sign)
        signature = keys.sign(HIDING, hiding(self.digest, delivered, about))
        signed = {ABOUT: as_rows([about]), HIDDEN: as_rows([signature])}
        return Payload({**vector, **signed, "n": _one()})

    def _pairs(self, letters: Letters) -> dict[int, bytes]:
        """Return the seed of the masks with each neighbour that has delivered its shares."""
        key, sealed, found = mask_key(self.secrets.mask), letters.seeds(), {}
        for other in letters.senders.tolist():
            if other > self.own:
                found[other] = pair_seed(self.secrets.mask, self.digest, *self._names(other))
            elif other in sealed:
                info = tied(self.digest, other, self.own)
                found[other] = self._opened(key, sealed[other], info, other, "seed of a mask")
            else:
                raise _refused(f"client {self.members.clients[other]} has sent no seed of a mask")
        return found

    def _opened(self, key: PrivateKeys, sealed: bytes, info: bytes, of: int, what: str) -> bytes:
        try:
            return unseal(key, sealed, info)
        except TrustError as error:
            name = self.members.clients[of]
            raise _refused(f"the {what} that client {name} has signed does not open") from error

    def open_letters(self, letters: Letters) -> dict[int, tuple[bytes, bytes]]:
        """Return the shares of each sender's self-mask and mask key.

        Raises:
            TrustError: a letter does not open, or has other shares than its sender committed to.
        """
        if not set(letters.senders.tolist()) <= set(self.neighbours):
            raise _refused("letters came from clients that are no neighbours")
        reader, found = self.secrets.reader(), {}
        for sender, sealed, both in zip(
            letters.senders.tolist(), letters.letters, letters.committed, strict=True
        ):
            info = tied(self.digest, sender, self.own)
            plain = self._opened(reader, sealed.tobytes(), info, sender, "letter")
            shares = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
            digests = b"".join(
                commitment(share, info, share_name(survived=survived))
                for share, survived in zip(shares, (True, False), strict=True)
            )
            if digests != both.tobytes():
                name = self.members.clients[sender]
                raise _refused(f"the shares of client {name} are not those it committed to")
            found[sender] = shares
        return found

    # --- the sets, and unmasking ------------------------------------------------------------

    def check_delivered(self, delivered: I64, letters: Letters) -> None:
        """Check the set of clients that have sent shares, and that all their letters are here.

        Raises:
            TrustError: this client would hide among too few, or not among those that it should.
        """
        came = self._positions(delivered)
        if self.own not in came:
            raise _refused("this client's shares are not counted")
        least = self.bounds.terms.secure_min_clients
        if len(came) < least:
            raise _refused(f"{len(came)} clients have sent shares, expected {least} or more")
        around = came.intersection(self.neighbours)
        if set(letters.senders.tolist()) != around or len(letters.senders) != len(around):
            raise _refused("the letters are not those of the neighbours that have sent shares")
        self._check_signed(letters)
        if len(around) < self.threshold:
            raise _refused(
                f"only {len(around)} of this client's neighbours have sent shares, and "
                f"{self.threshold} are needed"
            )

    def _check_signed(self, letters: Letters) -> None:
        """Check that each letter and seed is from its sender: the server could write one too."""
        pairs = letters.seeds()
        rows = zip(
            letters.senders.tolist(),
            letters.letters,
            letters.committed,
            letters.signed,
            strict=True,
        )
        for sender, sealed, both, signature in rows:
            pair = pairs.get(sender, b"") if sender < self.own else b""
            said = letter(self.digest, sender, self.own, sealed.tobytes(), both.tobytes(), pair)
            self._verify(sender, SHARED, said, signature, "letter")

    def _verify(self, index: int, purpose: str, said: bytes, signature: U8, what: str) -> None:
        try:
            verify_signature(
                self.members.signing[index].tobytes(), purpose, said, signature.tobytes()
            )
        except BadSignature as error:
            name = self.members.clients[index]
            raise _refused(f"the {what} of client {name} is not signed by it") from error

    def _positions(self, flags: I64) -> set[int]:
        if flags.shape != (len(self.members.clients),) or not set(flags.tolist()) <= {0, 1}:
            raise _refused("a set of clients is not of this list")
        return set(np.flatnonzero(flags).tolist())

    def check_survivors(self, delivered: I64, survivors: I64, hidden: U8, about: bytes) -> None:
        """Check a set of clients whose sum is to be opened.

        Args:
            delivered: (n,), 1 for clients whose shares have come.
            survivors: (n,), 1 for clients whose masked sums have come.
            hidden: (s, 64), their signatures of ``delivered`` and ``about``: a client that was
                shown another set has fewer masks than this one would think.
            about: the digest of all that the sums are about; one that has sent sums compares it
                with its own.

        Raises:
            TrustError: it would be a sum of too few.
        """
        came, stayed = self._positions(delivered), self._positions(survivors)
        if not stayed <= came:
            raise _refused("a client counts that has sent no shares")
        terms, known = self.bounds.terms, sum(map(self._is_known, stayed))
        fewest = terms.fewest(len(came))
        if len(stayed) < fewest or known < terms.secure_min_clients:
            raise _refused(
                f"the sum would be of {len(stayed)} clients, {known} of them known, and {fewest} "
                "are the least"
            )
        if not is_together(self.members.around(self.digest), stayed):
            raise _refused(
                "the clients that count are not one group, or fewer than half of the neighbours of "
                "one of them count"
            )
        if len(hidden) != len(stayed):
            raise _refused("a client that counts has not signed whom it hides among")
        said = hiding(self.digest, delivered, about)
        for index, row in zip(sorted(stayed), hidden, strict=True):
            self._verify(index, HIDING, said, row, "set of clients")

    def vote_upload(self, keys: PrivateKeys, delivered: I64, survivors: I64) -> Payload:
        """Return this client's signature of a set of survivors that it has checked.

        The caller has made sure that it signs no other one.
        """
        signature = keys.sign(VOTED, ballot(self.digest, delivered, survivors))
        return Payload({"signature": as_rows([signature]), "n": _one()})

    def check_votes(self, delivered: I64, survivors: I64, voted: I64, signatures: U8) -> None:
        """Check that enough clients have signed a set of survivors, so that no other can be.

        Raises:
            TrustError: too few have.
        """
        came, voters = self._positions(delivered), self._positions(voted)
        wanted, signed = votes_needed(len(came)), ballot(self.digest, delivered, survivors)
        if not voters <= came or len(voters) < wanted or len(signatures) != len(voters):
            raise _refused(f"{len(voters)} clients have voted, and {wanted} are needed")
        for index, row in zip(sorted(voters), signatures, strict=True):
            self._verify(index, VOTED, signed, row, "vote for this set")

    def unmask_upload(self, delivered: I64, survivors: I64, letters: Letters) -> Payload:
        """Return, of each neighbour, the share of the one secret that removes its masks.

        The caller has checked the survivors and the votes for them.

        Raises:
            TrustError: a letter does not open, or is missing.
        """
        self.check_delivered(delivered, letters)
        owners, shares = letters.senders.tolist(), self.open_letters(letters)
        given = [shares[i][0 if survivors[i] else 1] for i in owners]
        return Payload(
            {"owners": np.array(owners, np.int64), "shares": as_rows(given), "n": _one()}
        )


def _refused(why: str, action: str = "") -> TrustError:
    return TrustError(
        f"masked round: {why}.",
        action=action
        or "This client sends no more in this masked round. Ask the operator; if "
        "others see the same, the server or its state is at fault.",
    )


_ASK_OWNERS = "Ask the owners of these clients, not the operator (fcil-client peers)."
