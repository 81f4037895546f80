"""Checks of single uploads of a masked round, before a server takes them.

The server refuses a wrong share or signature at once; counted, it would let a round close that
cannot be opened.
"""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract.averaging import ABOUT, HIDDEN
from fcil_adapters.masks.exchanges import KEYS, SHARES, UNMASK, VOTE
from fcil_adapters.masks.record import (
    HIDING,
    SHARED,
    VOTED,
    MaskList,
    MaskRecord,
    ballot,
    hiding,
    letter,
    share_name,
    tied,
)
from fcil_adapters.masks.shares import commitment
from fcil_protocol.errors import BadSignature, WireError
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PublicKeys, verify_signature


def upload_faults(
    record: MaskRecord | None,
    key: RoundKey,
    client: ClientId,
    signing: bytes,
    payload: Payload,
    about: bytes = b"",
) -> list[str]:
    """Return one sentence for every fault of an upload in a masked round.

    Args:
        record: of the state that the round starts from; None before there is one.
        key: of the round.
        client: the sender.
        signing: the key that signs what it sends.
        payload: the upload, which fits its schema.
        about: `record.context_of` a round of masked sums.
    """
    if key.kind == KEYS:
        return _keys_faults(key, client, signing, payload)
    if record is None or client not in record.members.clients:
        return ["it is not in the list of this masked round"]
    own, digest = record.members.clients.index(client), record.members.digest(key.run, key.task)
    if key.kind == SHARES:
        return _shares_faults(record, digest, own, payload)
    if not record.delivered[own]:
        return ["it has sent no shares in this masked round"]
    if key.kind == VOTE:
        return _vote_faults(record, digest, own, payload)
    if key.kind == UNMASK:
        return _unmask_faults(record, digest, own, payload)
    if np.asarray(payload.tensors[ABOUT], np.uint8).tobytes() != about:
        return ["'about' is not this round with this model and these classes"]
    signed = hiding(digest, record.delivered, about)
    signature = payload.tensors[HIDDEN].tobytes()
    return _signature_faults(record, own, HIDING, signed, signature, f"{HIDDEN!r}")


def _keys_faults(key: RoundKey, client: ClientId, signing: bytes, payload: Payload) -> list[str]:
    sent = (np.asarray(payload.tensors[n], np.uint8) for n in ("keys", "signing", "signature"))
    alone = MaskList(key.round, (client,), *sent)
    if alone.signing[0].tobytes() != signing:
        return ["'signing' is not the key that it signs its messages with"]
    if fault := alone.fault(key.run, key.task, 0):
        return [fault]
    try:  # all its neighbours seal for these keys
        for public in (alone.mask_public(0), alone.letters_public(0)):
            PublicKeys.for_sealing(public)
    except WireError as error:
        return [f"'keys': {error.message}"]
    return []


def _shares_faults(record: MaskRecord, digest: bytes, own: int, payload: Payload) -> list[str]:
    around = record.members.around(digest)[own]
    wanted = dict.fromkeys(("letters", "committed", "signed"), len(around))
    wanted["pairs"] = sum(i > own for i in around)
    faults = [
        f"{name!r}: expected {count} rows, got {len(payload.tensors[name])}"
        for name, count in wanted.items()
        if len(payload.tensors[name]) != count
    ]
    if faults:
        return faults
    sealed, both, pairs, signed = (
        [row.tobytes() for row in np.asarray(payload.tensors[n], np.uint8)]
        for n in ("letters", "committed", "pairs", "signed")
    )
    rest = iter(pairs)
    for place, other in enumerate(around):
        pair = next(rest) if other > own else b""
        said = letter(digest, own, other, sealed[place], both[place], pair)
        if faults := _signature_faults(record, own, SHARED, said, signed[place], "a letter"):
            return faults
    return []


def _vote_faults(record: MaskRecord, digest: bytes, own: int, payload: Payload) -> list[str]:
    signed = ballot(digest, record.delivered, record.survivors)
    signature = payload.tensors["signature"].tobytes()
    return _signature_faults(record, own, VOTED, signed, signature, "'signature'")


def _signature_faults(
    record: MaskRecord, own: int, purpose: str, signed: bytes, signature: bytes, what: str
) -> list[str]:
    """Check a signature with the key in the list: the client may have another one by now."""
    try:
        verify_signature(record.members.signing[own].tobytes(), purpose, signed, signature)
    except BadSignature as error:
        return [f"{what}: {error.message}"]
    return []


def _unmask_faults(record: MaskRecord, digest: bytes, holder: int, payload: Payload) -> list[str]:
    around = record.members.around(digest)
    owners = [i for i in around[holder] if record.delivered[i]]
    shares = np.asarray(payload.tensors["shares"], np.uint8)
    if payload.i64("owners").tolist() != owners or len(shares) != len(owners):
        return [f"expected shares of its {len(owners)} neighbours that have sent some"]
    rows, wrong = record.rows(), []
    for owner, share in zip(owners, shares, strict=True):
        both = record.committed[rows[owner], around[owner].index(holder)].tobytes()
        survived = bool(record.survivors[owner])
        wanted = both[: len(both) // 2] if survived else both[len(both) // 2 :]
        name = share_name(survived=survived)
        if commitment(share.tobytes(), tied(digest, owner, holder), name) != wanted:
            wrong.append(f"its share of client {record.members.clients[owner]} is another one")
    return wrong[:3]
