"""The words that columns of the ledger hold. They stay as they are: older ledgers hold them too.

How people read some of them is in `labels`.
"""

from __future__ import annotations

from enum import StrEnum

OPENING = "open"  # the "kind" of the state that a task begins with
# Reason of an update that is excluded with another one of its relay's sum.
SPLIT_SUM = "another update in the sum of its relay does not count"
CENTRAL = "central"  # stands for the server's own test folder in `Evaluation.client`


class RunStatus(StrEnum):
    """Statuses of a run."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Outcome(StrEnum):
    """Results of a round."""

    DONE = "done"
    SHORT = "short"  # fewer updates than the quorum, by configuration
    REOPENED = "reopened"  # marks one that came up short and is open again; no round ends so
    SKIPPED = "skipped"  # too few updates, or none: the state stays, the round counts


class UpdateStatus(StrEnum):
    """Fates of an update after its Ack."""

    ACCEPTED = "accepted"
    COUNTED = "counted"
    EXCLUDED = "excluded"


class Answer(StrEnum):
    """Answers of an asked client in a round; the ledger holds those of `SILENT` alone."""

    NONE = "none"
    UPDATED = "updated"
    DECLINED = "declined"
    STRAGGLER = "straggler"  # silent at the deadline
    LOST = "lost"  # gone for longer than the grace period
    SURPLUS = "surplus"  # at work when as many others as are taken had answered: no fault of its

    @property
    def word(self) -> str:
        """Its word in messages and in the live status, where a straggler is late."""
        return "late" if self is Answer.STRAGGLER else self.value


# Why an asked client gave no update.
SILENT = (Answer.DECLINED, Answer.STRAGGLER, Answer.LOST, Answer.SURPLUS)


class Direction(StrEnum):
    """Seen from the clients: up to the server, down from it."""

    UP = "up"
    DOWN = "down"


class Cause(StrEnum):
    """Causes of traffic; ``CONNECTION`` is all of a connection, as the kernel counts.

    ``OBJECT_STORE`` is what a client fetched elsewhere, as it says itself.
    """

    UPDATE = "update"
    BROADCAST = "broadcast"
    CATCH_UP = "catch_up"
    HANDSHAKE = "handshake"
    CONTROL = "control"
    CONNECTION = "connection"
    OBJECT_STORE = "object_store"


class CountSource(StrEnum):
    """Sources of byte counts: the exact prediction, the kernel (TCP_INFO), or the client's word."""

    PREDICTED = "predicted"
    KERNEL = "kernel"
    REPORTED = "reported"


class Role(StrEnum):
    """Roles of a member: learn and test, or relay messages."""

    CLIENT = "client"
    RELAY = "relay"


# Codes of refusals after which a client tries again, or has what it wants: not worth a word.
HARMLESS = ("not_yet", "already_have")
