"""The words that columns of the ledger hold. They stay as they are: older ledgers hold them too.

How people read some of them is in `words`.
"""

from __future__ import annotations

from enum import StrEnum

OPENING = "open"  # the "kind" of the state that a task begins with
CENTRAL = "central"  # stands for the server's own test folder in `Evaluation.client`


class RunStatus(StrEnum):
    """Where a run stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Outcome(StrEnum):
    """How a round ended; ``REOPENED`` marks one that is open again after it came up short."""

    DONE = "done"
    SHORT = "short"
    REOPENED = "reopened"
    SKIPPED = "skipped"


class UpdateStatus(StrEnum):
    """What became of an update after its Ack."""

    ACCEPTED = "accepted"
    COUNTED = "counted"
    EXCLUDED = "excluded"


class Answer(StrEnum):
    """Why an asked client gave no update; ``SURPLUS`` was not waited for: others were faster."""

    DECLINED = "declined"
    STRAGGLER = "straggler"
    LOST = "lost"
    SURPLUS = "surplus"


class Direction(StrEnum):
    """Seen from the clients: up to the server, down from it."""

    UP = "up"
    DOWN = "down"


class Cause(StrEnum):
    """What bytes were spent on; ``CONNECTION`` is all of a connection, as the kernel counts."""

    UPDATE = "update"
    BROADCAST = "broadcast"
    CATCH_UP = "catch_up"
    HANDSHAKE = "handshake"
    CONTROL = "control"
    CONNECTION = "connection"


class Source(StrEnum):
    """Who counted the wire bytes: the exact prediction, or the kernel (TCP_INFO)."""

    PREDICTED = "predicted"
    KERNEL = "kernel"


class Role(StrEnum):
    """What a member does: learn and test, or pass on what others say."""

    CLIENT = "client"
    RELAY = "relay"


# Codes of refusals after which a client tries again, or has what it wants: not worth a word.
HARMLESS = ("not_yet", "already_have")
