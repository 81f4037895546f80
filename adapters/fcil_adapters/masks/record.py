"""The list of a masked round's clients and their letters, in the state and in its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Part, State
from fcil_adapters.masks.exchanges import (
    DIGEST_BYTES,
    LETTERS,
    LIST,
    NAMES,
    PARTS,
    SETS,
    SHARES,
    VOTES,
)
from fcil_adapters.masks.graph import circle, degree, is_together, threshold, with_enough_holders
from fcil_adapters.masks.shares import LETTER_BYTES, PAIR_BYTES
from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.ids import ClientId, is_client_id, sha256_of
from fcil_protocol.payloads.payload import Array, Payload, pieces
from fcil_protocol.payloads.schema import class_key
from fcil_protocol.trust.keys import SEALING_BYTES, SIGNATURE_BYTES, verify_signature

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

PREFIX = "masks."  # of the state's tensors
# Purposes of signatures.
SIGNED, SHARED, HIDING, VOTED = "mask_keys", "mask_shares", "mask_sums", "mask_vote"


def statement(run: str, task: int, cycle: int, client: ClientId, keys: bytes) -> bytes:
    """Return what a client signs: its keys, for one masked round."""
    return f"{run}/{task}/{cycle}/{client}\0".encode() + keys


def letter(
    digest: bytes, owner: int, holder: int, sealed: bytes, both: bytes, pair: bytes
) -> bytes:
    """Return what the sender of a letter signs: all that is in it, from whom and for whom."""
    return b"\0".join((tied(digest, owner, holder), sealed, both, pair))


def context_of(
    kind: str,
    number: int,
    rounds: int,
    seed: int,
    schema_digest: str,
    classes: Sequence[int],
    past: Sequence[int],
    parts: Mapping[str, Payload],
) -> bytes:
    """Return a digest of all that the sums of a round are about, for all clients the same.

    A server that gave one client another model, another place in the schedule, or other ids for
    its classes, would find that client's part in the total.

    Args:
        kind: of the round.
        number: of the round, within (task, kind).
        rounds: their number, on which the learning rate depends.
        seed: of the run.
        schema_digest: of the run.
        classes: ids of the task's classes.
        past: ids of earlier ones.
        parts: of the broadcast; those of masks, but for the names of classes, differ and do not
            count.
    """
    words = [
        kind,
        str(number),
        str(rounds),
        str(seed),
        schema_digest,
        ",".join(map(str, classes)),
        ",".join(map(str, past)),
    ]
    own = sorted(name for name in parts if name == NAMES or not is_of_masks(name))
    words += [f"{name} {sha256_of(*pieces(parts[name]))}" for name in own]
    return hashlib.sha256("\n".join(words).encode()).digest()


def names_part(digest: bytes, names: Mapping[str, int], classes: Sequence[int]) -> Part:
    """Return all names of a task's classes, as salted digests, with their places in the task.

    All clients get the same, so a name has the same id for each of them.

    Args:
        digest: of the list, as salt.
        names: name -> id; a class may have several, or none.
        classes: ids of the task's classes.
    """
    at = {number: place for place, number in enumerate(classes)}
    rows = sorted((name_digest(digest, name), at[number]) for name, number in names.items())
    digests = [np.frombuffer(row, np.uint8) for row, _ in rows]
    places = np.array([place for _, place in rows], np.int64)
    return Part(NAMES, Payload({"names": _stacked(digests, DIGEST_BYTES), "places": places}))


def name_digest(digest: bytes, name: str) -> bytes:
    """Return the salted digest of a class's name."""
    return hashlib.sha256(digest + class_key(name).encode()).digest()


def hiding(digest: bytes, delivered: I64, about: bytes) -> bytes:
    """Return what a client signs with its masked sums.

    Args:
        digest: of the list.
        delivered: the clients that have sent shares, among which it hides.
        about: `context_of` the round.
    """
    return digest + delivered.astype("u1").tobytes() + about


def ballot(digest: bytes, delivered: I64, survivors: I64) -> bytes:
    """Return what a client signs: the set of survivors, and the set that it was chosen from."""
    return digest + delivered.astype("u1").tobytes() + survivors.astype("u1").tobytes()


def tied(digest: bytes, owner: int, holder: int) -> bytes:
    """Return what ties a letter or a share to a list, its owner and its holder."""
    return digest + f"{owner}/{holder}".encode()


def about_owner(digest: bytes, owner: int) -> bytes:
    """Return what ties a self-mask to a list and its owner."""
    return digest + f"{owner}".encode()


def share_name(*, survived: bool) -> str:
    """Return the name of the share that a holder gives of a client."""
    return "own share" if survived else "key share"


def as_rows(values: Sequence[bytes]) -> U8:
    """Return byte strings of one length as rows."""
    return np.stack([np.frombuffer(value, np.uint8) for value in values])


@dataclass(frozen=True)
class MaskList:
    """The clients of a masked round, by their keys.

    Attributes:
        cycle: number of the masked round within its task, from 0.
        clients: (n,), sorted.
        keys: (n, 2432), of masks and of letters.
        signing: (n, 32), the keys that signed them.
        signatures: (n, 64).
    """

    cycle: int
    clients: tuple[ClientId, ...]
    keys: U8
    signing: U8
    signatures: U8

    @classmethod
    def read(cls, payload: Payload) -> MaskList:
        """Read the list of a part or state.

        Raises:
            WireError: its clients are not sorted ids.
        """
        names = [bytes(row).decode("ascii", "replace") for row in payload.tensors["clients"]]
        if not all(map(is_client_id, names)) or names != sorted(set(names)):
            raise WireError("the list of mask keys: expected sorted client ids.")
        return cls(
            int(payload.i64("cycle")[0]),
            tuple(ClientId(name) for name in names),
            *(np.asarray(payload.tensors[n], np.uint8) for n in ("keys", "signing", "signatures")),
        )

    def payload(self) -> Payload:
        """Return the list as a part has it."""
        return Payload(
            {
                "clients": as_rows([c.encode() for c in self.clients]),
                "keys": self.keys,
                "signing": self.signing,
                "signatures": self.signatures,
                "cycle": np.array([self.cycle], np.int64),
            }
        )

    def digest(self, run: str, task: int) -> bytes:
        """Return the SHA-256 that stands for this list in all its masks, shares and letters."""
        sha = hashlib.sha256(
            f"fcil/1/masks/{run}/{task}/{self.cycle}/{len(self.clients)}\0".encode()
        )
        for name in self.clients:
            sha.update(name.encode())
        for rows in (self.keys, self.signing, self.signatures):
            sha.update(np.ascontiguousarray(rows).tobytes())
        return sha.digest()

    def around(self, digest: bytes) -> tuple[tuple[int, ...], ...]:
        """Return the positions of each client's neighbours."""
        return circle(self.clients, digest)

    def mask_public(self, index: int) -> bytes:
        """Return the public half of a client's mask key."""
        return self.keys[index, :SEALING_BYTES].tobytes()

    def letters_public(self, index: int) -> bytes:
        """Return the public key that letters to a client are sealed for."""
        return self.keys[index, SEALING_BYTES:].tobytes()

    def fault(self, run: str, task: int, index: int) -> str:
        """Return why a client's keys are not signed as they must be; empty: they are."""
        signed = statement(run, task, self.cycle, self.clients[index], self.keys[index].tobytes())
        try:
            verify_signature(
                self.signing[index].tobytes(), SIGNED, signed, self.signatures[index].tobytes()
            )
        except BadSignature as error:
            return error.message
        return ""


@dataclass(frozen=True)
class Letters:
    """The letters of a client's neighbours, which it alone can read.

    Attributes:
        senders: (m,) positions in the list.
        letters: (m, 1200), each with two shares.
        committed: (m, 64), the digests of these shares.
        signed: (m, 64), the senders' signatures of all that.
        lower: (p,) positions of those neighbours that drew the masks of a pair.
        pairs: (p, 1168), the sealed seeds of these masks.
    """

    senders: I64
    letters: U8
    committed: U8
    signed: U8
    lower: I64
    pairs: U8

    @classmethod
    def read(cls, payload: Payload) -> Letters:
        """Read the letters of a part."""
        return cls(
            payload.i64("senders"),
            np.asarray(payload.tensors["letters"], np.uint8),
            np.asarray(payload.tensors["committed"], np.uint8),
            np.asarray(payload.tensors["signed"], np.uint8),
            payload.i64("lower"),
            np.asarray(payload.tensors["pairs"], np.uint8),
        )

    def seeds(self) -> dict[int, bytes]:
        """Return the sealed seed of each lower neighbour's masks, by its position."""
        return {int(i): row.tobytes() for i, row in zip(self.lower, self.pairs, strict=True)}


_FLAGS = ("delivered", "survivors", "voted")
_ROWS = ("letters", "committed", "signed", "pairs", "own", "hidden", "about", "votes")


@dataclass(frozen=True)
class MaskRecord:
    """All that a state holds between the first and the last of a masked round's rounds.

    Attributes:
        members: the list.
        delivered: (n,), 1 for clients whose shares have come; none before `SHARES`.
        survivors: (n,), 1 for clients whose masked sums are in the total.
        letters: (m, k, 1200) of each client that has delivered, to its neighbours in order.
        committed: (m, k, 64).
        signed: (m, k, 64).
        pairs: (p, 1168), to its higher neighbours in order, client after client.
        own: (m, 32), commitments to self-masks.
        hidden: (s, 64), the survivors' signatures of the set that they hide among.
        about: (1, 32), the digest of all that the sums are about.
        voted: (n,), 1 for clients that have signed the set of survivors.
        votes: (v, 64), their signatures.
        total: the sum of the masked vectors.
        of: the round that they are of: kind and number, with a slash.
        run: id of the run; of a fork, that of its parent.
    """

    members: MaskList
    delivered: I64
    survivors: I64
    letters: U8
    committed: U8
    signed: U8
    pairs: U8
    own: U8
    hidden: U8
    about: U8
    voted: I64
    votes: U8
    total: Mapping[str, Array]
    run: str
    of: str = ""

    @classmethod
    def new(cls, members: MaskList, run: str) -> MaskRecord:
        """Return the record of a list whose clients have delivered nothing yet."""
        none, empty = np.zeros(len(members.clients), np.int64), np.zeros((0, 0), np.uint8)
        unsigned = np.zeros((0, SIGNATURE_BYTES), np.uint8)
        nothing = np.zeros((1, DIGEST_BYTES), np.uint8)
        return cls(members, none, none, *(empty,) * 5, unsigned, nothing, none, unsigned, {}, run)

    @classmethod
    def read(cls, state: State) -> MaskRecord | None:
        """Read the record of a state; None: it has none."""
        own = {
            name.removeprefix(PREFIX): array
            for name, array in state.tensors.items()
            if name.startswith(PREFIX)
        }
        if not own:
            return None
        payload = Payload(own)
        rows = {name: np.asarray(own[name], np.uint8) for name in (*_ROWS, "run", "of")}
        fields: dict[str, Any] = {name: payload.i64(name) for name in _FLAGS} | rows
        fields |= {name: rows[name].tobytes().decode() for name in ("run", "of")}
        return cls(
            members=MaskList.read(payload),
            **fields,
            total={n.removeprefix("total."): a for n, a in own.items() if n.startswith("total.")},
        )

    def can_be_opened(self, digest: bytes, holders: Collection[ClientId]) -> bool:
        """Return True if some clients hold enough shares of each client that has sent some.

        Args:
            digest: of the list.
            holders: the clients.
        """
        around, there = self.members.around(digest), np.flatnonzero(self.delivered).tolist()
        held = {i for i, client in enumerate(self.members.clients) if client in holders}
        least = threshold(degree(len(self.members.clients)))
        return all(len(held.intersection(around[owner])) >= least for owner in there)

    def holders_suffice(self, digest: bytes, fewest: int, clients: Collection[ClientId]) -> bool:
        """Return True if the shares of some clients are enough for a masked sum of this size.

        Args:
            digest: of the list.
            fewest: clients of the sum.
            clients: those that have sent shares.
        """
        came = [i for i, client in enumerate(self.members.clients) if client in clients]
        return len(with_enough_holders(self.members.around(digest), came)) >= fewest

    def votes_suffice(self, digest: bytes, votes: int, clients: Collection[ClientId]) -> bool:
        """Return True if some clients are enough to vote, and could open the sum afterwards."""
        return len(clients) >= votes and self.can_be_opened(digest, clients)

    def sum_suffices(self, digest: bytes, fewest: int, clients: Collection[ClientId]) -> bool:
        """Return True if some clients would open the sum of theirs, and can without the others.

        Args:
            digest: of the list.
            fewest: clients of the sum.
            clients: those whose masked sums have come.
        """
        around = self.members.around(digest)
        stayed = {i for i, client in enumerate(self.members.clients) if client in clients}
        together = is_together(around, stayed)
        return len(stayed) >= fewest and together and self.can_be_opened(digest, clients)

    def into(self, state: State) -> State:
        """Return the state with this record in place of its own."""
        named: dict[str, Array] = {
            **self.members.payload().tensors,
            **{name: getattr(self, name) for name in (*_FLAGS, *_ROWS)},
            "run": np.frombuffer(self.run.encode(), np.uint8),
            "of": np.frombuffer(self.of.encode(), np.uint8),
            **{f"total.{name}": array for name, array in self.total.items()},
        }
        kept = without_record(state)
        return replace(
            kept, tensors={**kept.tensors, **{PREFIX + n: array for n, array in named.items()}}
        )

    def parts(self, digest: bytes) -> list[Part]:
        """Return the parts of a broadcast: the list, the sets, the votes, and all letters.

        Args:
            digest: of the list.
        """
        sets = Payload(
            {
                "delivered": self.delivered,
                "survivors": self.survivors,
                "hidden": self.hidden,
                "about": self.about,
            }
        )
        found = [Part(LIST, self.members.payload())]
        if self.delivered.any():
            found.append(Part(SETS, sets))
            if self.voted.any():
                votes = Payload({"voted": self.voted, "signatures": self.votes})
                found.append(Part(VOTES, votes))
            mail = self._mail(digest)
            found += [
                Part(letters_part(self.members.clients[index]), payload)
                for index, payload in sorted(mail.items())
            ]
        return found

    def rows(self) -> dict[int, int]:
        """Return the row of each client that has delivered: position in the list -> row."""
        return {own: row for row, own in enumerate(np.flatnonzero(self.delivered).tolist())}

    def sealed_seeds(self, digest: bytes) -> dict[tuple[int, int], U8]:
        """Return the sealed seed of each pair's masks: (lower, higher) position -> (1168,)."""
        around = self.members.around(digest)
        named = [(own, other) for own in self.rows() for other in around[own] if other > own]
        return dict(zip(named, self.pairs, strict=True))

    def _mail(self, digest: bytes) -> dict[int, Payload]:
        """Return, for each client that has delivered, what the others have written to it."""
        around, rows, seeds = self.members.around(digest), self.rows(), self.sealed_seeds(digest)
        found = {}
        for to in rows:
            senders = [i for i in around[to] if i in rows]
            at = [(rows[i], around[i].index(to)) for i in senders]
            lower = [i for i in senders if i < to]
            found[to] = Payload(
                {
                    "senders": np.array(senders, np.int64),
                    "letters": _stacked([self.letters[one] for one in at], LETTER_BYTES),
                    "committed": _stacked([self.committed[one] for one in at], 2 * DIGEST_BYTES),
                    "signed": _stacked([self.signed[one] for one in at], SIGNATURE_BYTES),
                    "lower": np.array(lower, np.int64),
                    "pairs": _stacked([seeds[i, to] for i in lower], PAIR_BYTES),
                }
            )
        return found


def _stacked(rows: Sequence[U8], width: int) -> U8:
    return np.stack(rows) if rows else np.zeros((0, width), np.uint8)


def letters_part(client: ClientId) -> str:
    """Return the name of the part with a client's letters."""
    return f"{LETTERS}/{client}"


def without_record(state: State) -> State:
    """Return a state as the method knows it."""
    return replace(
        state, tensors={n: a for n, a in state.tensors.items() if not n.startswith(PREFIX)}
    )


def without_masks(parts: Mapping[str, Payload]) -> dict[str, Payload]:
    """Return a broadcast as the method knows it, by the names of its parts."""
    return {name: part for name, part in parts.items() if not is_of_masks(name)}


def is_of_masks(part: str) -> bool:
    """Return True if a part of this name is of a masked round, not of the method."""
    return part.partition("/")[0] in PARTS


def is_for(part: str, client: ClientId) -> bool:
    """Return True if a client needs a part; letters are for their reader alone."""
    return not part.startswith(f"{LETTERS}/") or part == letters_part(client)


def members_of(state: State, kind: str) -> frozenset[ClientId]:
    """Return the clients that a round of a kind after `KEYS` can ask, by a state's record."""
    record = MaskRecord.read(state)
    if record is None:
        return frozenset()
    everyone = kind == SHARES
    pairs = zip(record.members.clients, record.delivered.tolist(), strict=True)
    return frozenset(client for client, came in pairs if everyone or came)
