"""The rounds that replace an additive exchange: keys, shares, masked sums, votes, unmasking.

Each is a round of the run like any other: asked for, answered, on disk before its Ack, closed with
a new state. So a server that is killed anywhere repeats the same round, and nothing is only in
memory.

1. `KEYS`: each client sends two fresh public keys, signed. The state has their list.
2. `SHARES`: each client sends its neighbours shares of its two secrets, sealed for them.
3. The method's own kind: each client sends its masked sums, and signs the set of clients that have
   sent shares. The state has the total, and the *survivors* whose sums are in it.
4. `VOTE`: each client signs the set of survivors, once. So all that follows is about one set.
5. `UNMASK`: each client that sees enough of these signatures gives one share for each neighbour, as
   the set says. The server removes the masks and hands the sums to the method, as one update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fcil_adapters.contract import BackboneInfo, Exchange, Hparams, Method, TaskInfo
from fcil_adapters.contract.averaging import ABOUT, HIDDEN, Additive
from fcil_adapters.masks.shares import KEYS_BYTES, LETTER_BYTES, PAIR_BYTES, SHARE_BYTES
from fcil_protocol.errors import ConfigError
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from fcil_protocol.trust.keys import SIGNATURE_BYTES, SIGNING_BYTES

KEYS, SHARES, VOTE, UNMASK = "mask_keys", "mask_shares", "mask_vote", "unmask"
MASKING = (KEYS, SHARES, VOTE, UNMASK)  # rounds without images
AFTER_KEYS = (SHARES, VOTE, UNMASK)  # those of them that go to the clients of the list alone
# Kinds of parts.
LIST, NAMES, SETS, VOTES, LETTERS = (
    "mask_list",
    "mask_names",
    "mask_sets",
    "mask_votes",
    "letters",
)
PARTS = (LIST, NAMES, SETS, VOTES, LETTERS)

MOST_MEMBERS = 1000
MOST_NAMES = 100_000  # of a task's classes, aliases included
ID_BYTES = 26
DIGEST_BYTES = 32


def _bytes(name: str, rows: int | str, width: int) -> TensorSpec:
    return TensorSpec(name, Kind.MASK, (rows, width), "U8")


def _counts(name: str, rows: int | str) -> TensorSpec:
    return TensorSpec(name, Kind.COUNT, (rows,), "I64", non_negative=True)


_ONE = _counts("n", 1)  # always 1: the number of images is hidden too
_MEMBERS = (("members", "most_members"),)

KEYS_UPLOAD = PayloadSchema(
    (
        _bytes("keys", 1, KEYS_BYTES),
        _bytes("signing", 1, SIGNING_BYTES),
        _bytes("signature", 1, SIGNATURE_BYTES),
        _ONE,
    )
)
SHARES_UPLOAD = PayloadSchema(
    (
        _bytes("letters", "members", LETTER_BYTES),
        _bytes("committed", "members", 2 * DIGEST_BYTES),
        _bytes("pairs", "higher", PAIR_BYTES),
        _bytes("signed", "members", SIGNATURE_BYTES),
        _bytes("own", 1, DIGEST_BYTES),
        _ONE,
    ),
    at_most=(*_MEMBERS, ("higher", "most_members")),
)
VOTE_UPLOAD = PayloadSchema((_bytes("signature", 1, SIGNATURE_BYTES), _ONE))
UNMASK_UPLOAD = PayloadSchema(
    (_counts("owners", "members"), _bytes("shares", "members", SHARE_BYTES), _ONE),
    at_most=_MEMBERS,
)
BROADCAST: Mapping[str, PayloadSchema] = {
    LIST: PayloadSchema(
        (
            _bytes("clients", "members", ID_BYTES),
            _bytes("keys", "members", KEYS_BYTES),
            _bytes("signing", "members", SIGNING_BYTES),
            _bytes("signatures", "members", SIGNATURE_BYTES),
            _counts("cycle", 1),
        ),
        at_most=_MEMBERS,
    ),
    SETS: PayloadSchema(
        (
            _counts("delivered", "members"),
            _counts("survivors", "members"),
            _bytes("hidden", "counted", SIGNATURE_BYTES),
            _bytes("about", 1, DIGEST_BYTES),
        ),
        at_most=(*_MEMBERS, ("counted", "most_members")),
    ),
    NAMES: PayloadSchema(
        (_bytes("names", "named", DIGEST_BYTES), _counts("places", "named")),
        at_most=(("named", "most_names"),),
    ),
    VOTES: PayloadSchema(
        (_counts("voted", "members"), _bytes("signatures", "votes", SIGNATURE_BYTES)),
        at_most=(*_MEMBERS, ("votes", "most_members")),
    ),
    LETTERS: PayloadSchema(
        (
            _counts("senders", "members"),
            _bytes("letters", "members", LETTER_BYTES),
            _bytes("committed", "members", 2 * DIGEST_BYTES),
            _bytes("signed", "members", SIGNATURE_BYTES),
            _counts("lower", "pairs"),
            _bytes("pairs", "pairs", PAIR_BYTES),
        ),
        at_most=(*_MEMBERS, ("pairs", "most_members")),
    ),
}


_MASKING_UPLOADS = {
    KEYS: KEYS_UPLOAD,
    SHARES: SHARES_UPLOAD,
    VOTE: VOTE_UPLOAD,
    UNMASK: UNMASK_UPLOAD,
}


def masked_upload(additive: Additive) -> PayloadSchema:
    """Return the schema of masked sums: 64-bit numbers that are uniform to all but their sender.

    With them travels its signature of all that they are about, and of the clients it hides among.
    """
    sums = tuple(TensorSpec(s.name, Kind.MASKED, s.shape, "I64") for s in additive.sums)
    signed = (_bytes(ABOUT, 1, DIGEST_BYTES), _bytes(HIDDEN, 1, SIGNATURE_BYTES))
    return PayloadSchema((*sums, *signed, _ONE))


def kinds_without_sums(method: Method, hparams: Hparams, backbone: BackboneInfo) -> list[str]:
    """Return the kinds of a method's rounds in which the server needs each client's own update."""
    exchanges = method.exchanges(hparams, backbone)
    return [e.kind for e in exchanges if e.additive is None or e.keeps_state]


def check_masks(method: Method, hparams: Hparams, backbone: BackboneInfo) -> None:
    """Check that a method's updates are sums.

    Raises:
        ConfigError: some are not.
    """
    if kinds := kinds_without_sums(method, hparams, backbone):
        raise ConfigError(
            f"privacy.secure is 'masks', but the server of the method {method.name} with these "
            f"options needs each client's own update in its rounds: {', '.join(kinds)}.",
            action="Set privacy.secure to 'off', or choose a method whose updates are sums "
            "(docs/secure-aggregation.md lists them).",
        )


def is_summed_once(method: Method, exchange: Exchange) -> bool:
    """Return True if an update is the same whenever it is made: a statistic of a client's images.

    Of two sums of it with and without a client, the difference is that client's. Trained tensors
    differ from round to round.
    """
    frozen = method.frozen or not method.needs_backbone
    return not exchange.trains and (exchange.rounds == 1 or frozen)


def fewest_classes(method: Method, exchanges: Iterable[Exchange]) -> int:
    """Return the fewest classes of a task in which these exchanges can take place.

    Two, where training is masked: a task of one class has no loss to train by, and clients send
    the mean of its images instead, the same in each round. Of two sums with and without a client,
    the difference would be that client's.
    """
    own = (e for e in exchanges if e.masking and e.kind not in MASKING)
    return 2 if any(not is_summed_once(method, e) for e in own) else 1


def in_terms(method: Method, terms: PrivacyTerms) -> Method:
    """Return the method with the rounds that a run's terms ask for."""
    return with_masks(method) if terms.masks else method


def with_masks(method: Method) -> Method:
    """Return a method with masked rounds in place of its own, and the rounds and parts of masks.

    Raises:
        ConfigError: an exchange has no sums (`check_masks` says so first).
    """

    def exchanges(hparams: Any, backbone: BackboneInfo) -> tuple[Exchange, ...]:
        check_masks(method, hparams, backbone)
        own = [_masked(method, e) for e in method.exchanges(hparams, backbone)]
        masking = (
            Exchange(kind, upload, rounds=0, masking=True)
            for kind, upload in _MASKING_UPLOADS.items()
        )
        return (*own, *masking)

    def broadcast(hparams: Any, backbone: BackboneInfo) -> dict[str, PayloadSchema]:
        return {**method.broadcast(hparams, backbone), **BROADCAST}

    def dims(hparams: Any, backbone: BackboneInfo, task: TaskInfo) -> dict[str, int]:
        return {
            **method.dims(hparams, backbone, task),
            "most_members": MOST_MEMBERS,
            "most_names": MOST_NAMES,
        }

    return replace(method, exchanges=exchanges, broadcast=broadcast, dims=dims, plain=method)


def _masked(method: Method, exchange: Exchange) -> Exchange:
    assert exchange.additive is not None, "check_masks"
    return Exchange(
        exchange.kind,
        masked_upload(exchange.additive),
        rounds=1 if is_summed_once(method, exchange) else exchange.rounds,
        first_task=exchange.first_task,
        trains=exchange.trains,
        additive=exchange.additive,
        masking=True,
    )
