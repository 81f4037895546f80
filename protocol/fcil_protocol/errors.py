"""The errors of fcil that a person or a peer can receive.

The tree (each class says what happened, what to do, and carries a stable code):

    FcilError
    +-- ConfigError            config_invalid        4
    +-- DataError              data_invalid          4
    |   +-- NothingLeft        nothing_left          4
    +-- UsageError             usage                 4
    +-- LinkError              link_failed           2
    |   +-- PortInUse          port_in_use           2
    |   +-- Unreachable        unreachable           2
    |   +-- TooManyAtOnce      too_many_at_once      2
    |   +-- CutOff             cut_off               2
    +-- TrustError             not_trusted           2
    |   +-- UnknownClient      unknown_client        2
    |   +-- Revoked            revoked               2
    |   +-- MembershipExpired  membership_expired    2
    |   +-- BadTicket          bad_ticket            2
    |   |   +-- TicketUsed     ticket_used           2
    |   |   +-- TicketExpired  ticket_expired        2
    |   +-- WrongFederation    wrong_federation      2
    |   +-- BadSignature       bad_signature         2
    |   +-- WrongClock         wrong_clock           2
    |   +-- CannotOpen         cannot_open           2
    |   +-- KeyFileError       key_file              2
    +-- WireError              malformed             1
    |   +-- TooLarge           too_large             1
    |   +-- VersionMismatch    version_mismatch      1
    |   +-- SchemaMismatch     schema_mismatch       1
    |   +-- EgressRefused      egress_refused        1
    |   +-- PrivacyRefused     privacy_refused       1
    |   +-- MethodMismatch     method_mismatch       1
    |   +-- BackboneMismatch   backbone_mismatch     1
    |   +-- StaleUpdate        stale_update          1
    |   +-- AlreadyHave        already_have          1
    |   +-- RoundClosed        round_closed          1
    |   |   +-- Surplus        surplus               1
    +-- StorageError           storage_failed        1
    |   +-- DiskFull           disk_full             1
    |   +-- CommitUnknown      commit_unknown        1
    |   +-- CorruptFile        corrupt_file          1
    |   +-- Locked             locked                2
    +-- WorkerError            worker_failed         1
    |   +-- DoesNotFit         does_not_fit          1
    |   +-- OutOfMemory        out_of_memory         1
    |   +-- WorkerDied         worker_died           1
    |   |   +-- WorkerStalled  worker_stalled        1
    +-- NotNow                 not_now               1
    +-- RunFailed              run_failed            1
    +-- Timeout                timeout               3
    |   +-- Starting           starting              3
    +-- NotYet                 not_yet               3
    +-- InternalError          internal              5

``docs/errors.md`` is generated from these classes by ``scripts/errorlist``.
The first paragraph of a docstring says what happened, the second what to do.
Codes travel in Nacks and in ``--json`` output and never change their meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import ClassVar

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_CONNECTION = 2
EXIT_TIMEOUT = 3
EXIT_USAGE = 4
EXIT_INTERNAL = 5


class FcilError(Exception):
    """A failure that fcil has a name for.

    Read the message: it says what was expected, what was found and what to do.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = EXIT_RUN_FAILED

    def __init__(self, message: str, *, action: str = "") -> None:
        """Keep the sentence and the next action apart, so that both can be shown."""
        super().__init__(message)
        self.message = message
        self.action = action

    def __str__(self) -> str:
        return f"{self.message} {self.action}".strip()

    @classmethod
    def default_action(cls) -> str:
        """Return the second paragraph of the class docstring, on one line."""
        paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        # Terminals show one backtick, as in all other sentences.
        return " ".join(paragraphs[1].split()).replace("``", "`") if len(paragraphs) > 1 else ""


class ConfigError(FcilError):
    """A configuration file, a ``-c key=value`` override or an environment variable is wrong.

    Correct the named key; the message lists every fault, and the nearest known key.
    """

    code = "config_invalid"
    exit_code = EXIT_USAGE


class DataError(FcilError):
    """The image folder, archive, list or data set cannot be used.

    Lay images out as ``FOLDER/<class>/<image>`` or ``FOLDER/train/<class>/<image>``; docs/data.md
    has further forms.
    """

    code = "data_invalid"
    exit_code = EXIT_USAGE


class NothingLeft(DataError):
    """No image is left to count: all that this client has for the round are counted, or too few.

    Nothing is wrong; the client is asked again when it has other images.
    """

    code = "nothing_left"


class UsageError(FcilError):
    """A command was called with arguments that do not fit together.

    Run the command with ``--help``.
    """

    code = "usage"
    exit_code = EXIT_USAGE


class LinkError(FcilError):
    """The connection could not be made or kept.

    Check the address and that the server runs.
    """

    code = "link_failed"
    exit_code = EXIT_CONNECTION


class PortInUse(LinkError):
    """Another program listens on the port that the server should use.

    Stop that program, or choose another port with ``--port`` or ``[federation] listen``.
    """

    code = "port_in_use"


class Unreachable(LinkError):
    """No server answers at the address.

    Start the server, or correct the address; a client daemon keeps trying.
    """

    code = "unreachable"


class TooManyAtOnce(LinkError):
    """The server knows the ticket, but too many others have connected in the last minute.

    Try again in a minute; the ticket is still valid. ``join`` does so by itself.
    """

    code = "too_many_at_once"


class CutOff(LinkError):
    """The server ignores this client for a while, after refusing too many of its messages.

    If this was an accident, do nothing: the client reconnects after the pause and is still a
    member. If it happens again, look for the reason of the refusals in the client's log, and
    install the server's version of fcil.
    """

    code = "cut_off"


class TrustError(FcilError):
    """The other side does not have the expected identity, or may not do this.

    Compare the fingerprints on both sides before you change anything.
    """

    code = "not_trusted"
    exit_code = EXIT_CONNECTION


class UnknownClient(TrustError):
    """The server does not know this client's key.

    Enrol the device with the server that it should join; if the federation directory in which
    it was enrolled no longer exists, enrol it again.
    """

    code = "unknown_client"


class Revoked(TrustError):
    """The operator revoked this client, or the client left.

    Ask the operator; to come back, join again with a new ticket.
    """

    code = "revoked"


class MembershipExpired(TrustError):
    """This client's enrolment has expired.

    Ask the operator for a new ticket and join with it.
    """

    code = "membership_expired"


class BadTicket(TrustError):
    """A ticket is invalid, was altered or cut short, or is unknown to the server.

    Copy the complete line again, or ask the operator for a new one: fcil-server enrol NAME.
    """

    code = "bad_ticket"


class TicketUsed(BadTicket):
    """A ticket enrols one client, once, and another client has used this one.

    Ask the operator for a new one. If you did not expect this, tell the operator: another
    person may have read the ticket.
    """

    code = "ticket_used"


class TicketExpired(BadTicket):
    """The ticket has expired by the server's clock.

    Ask the operator for a new one: fcil-server enrol NAME --expires 24h.
    """

    code = "ticket_expired"


class WrongFederation(TrustError):
    """A message or a client state belongs to another federation or another run.

    Join with the join file of the federation you mean, or use another state directory.
    """

    code = "wrong_federation"


class BadSignature(TrustError):
    """A signature or a MAC does not match its bytes.

    The bytes were altered, or signed with another key; none of them was used.
    """

    code = "bad_signature"


class WrongClock(TrustError):
    """The server's certificate is not valid at the time of this machine's clock.

    Set the clock; a client daemon then continues on its own. If the clock is right, the server
    needs a new certificate: ``fcil-server rotate-keys``.
    """

    code = "wrong_clock"


class CannotOpen(TrustError):
    """A sealed payload cannot be opened with this key and this context.

    It was sealed for another recipient, belongs to another message, or was damaged in transit.
    """

    code = "cannot_open"


class KeyFileError(TrustError):
    """A key file is missing, damaged or readable by others.

    Restore it from a backup, or set its permissions to 0600.
    """

    code = "key_file"


class WireError(FcilError):
    """A message does not have the format that PROTOCOL.md defines.

    Use the same fcil version on both sides.
    """

    code = "malformed"


class TooLarge(WireError):
    """A message or payload exceeds a limit of the protocol or of the round's schema.

    Check that client and server run the same method version and configuration.
    """

    code = "too_large"


class VersionMismatch(WireError):
    """The two sides share no protocol version, or the client cannot read the run's payloads.

    Install the fcil version that the message names.
    """

    code = "version_mismatch"


class SchemaMismatch(WireError):
    """A payload has tensors or fields that the schema of this exchange does not allow.

    Check that client and server run the same method version and configuration; the
    message lists every difference.
    """

    code = "schema_mismatch"


class EgressRefused(WireError):
    """The client's guard stopped a tensor that must not leave the device.

    Report the method that produced it: only tensors named in its schema may travel. If only its
    numbers are too large, its training has diverged: ask the operator for smaller steps.
    """

    code = "egress_refused"


class PrivacyRefused(WireError):
    """The client refuses to send data under the server's privacy terms.

    The message says which terms are too weak, or how much of the budget is spent. Ask the
    operator for stricter terms, or join with other limits; ``fcil-client privacy`` shows both.
    """

    code = "privacy_refused"


class MethodMismatch(WireError):
    """The client cannot run the server's method.

    Install the same version of the method's package on the client.
    """

    code = "method_mismatch"


class BackboneMismatch(WireError):
    """The client's frozen backbone and the server's compute different features.

    Use the same weights file and the same preprocessing on every device.
    """

    code = "backbone_mismatch"


class StaleUpdate(WireError):
    """An update starts from a state that the round does not take: another one, or one too old.

    Do nothing: the client fetches the current broadcast and trains again.
    """

    code = "stale_update"


class AlreadyHave(WireError):
    """The server already holds an accepted update of this client for this round.

    Do nothing: the first update counts, and the client drops the other.
    """

    code = "already_have"


class RoundClosed(WireError):
    """The update arrived after its round had closed.

    The client drops it and takes part in the next round; if this happens often, raise
    ``[round] deadline_s``.
    """

    code = "round_closed"


class Surplus(RoundClosed):
    """The round already has the updates that it takes; other clients were faster.

    Do nothing: the client drops the update, and the server asks it again in the next round.
    """

    code = "surplus"


class StorageError(FcilError):
    """A file could not be read or written.

    Check the path, its permissions and the free space on its disk.
    """

    code = "storage_failed"


class DiskFull(StorageError):
    """The disk has no space left for data that must be kept.

    Free space on the named disk; no acknowledged update is lost.
    """

    code = "disk_full"


class CommitUnknown(StorageError):
    """The connection to the ledger was lost during a commit, which may hold or not.

    Start the server again once Postgres answers: it finds out, and no acknowledged update is lost.
    """

    code = "commit_unknown"


class CorruptFile(StorageError):
    """A file's content does not match its checksum or its format.

    Restore it from a backup; if there is an older valid version, fcil uses that one.
    """

    code = "corrupt_file"


class Locked(StorageError):
    """Another process works in this directory.

    Stop the other process, or use another directory.
    """

    code = "locked"
    exit_code = EXIT_CONNECTION


class WorkerError(FcilError):
    """The worker process reported a failure of its computation.

    The message names the cause; the daemon keeps running.
    """

    code = "worker_failed"


class DoesNotFit(WorkerError):
    """A number is too large for the precision in which it is sent.

    Half precision ends at 65,504; training has probably diverged. If such numbers are meant,
    remove the kind from ``[wire] half`` and start a new run.
    """

    code = "does_not_fit"


class OutOfMemory(WorkerError):
    """The machine or its GPU has too little memory for the work.

    Free memory, or use ``--device cpu`` or fewer threads: a client has already tried smaller
    passes, down to one image. On a server: use another device, or add memory.
    """

    code = "out_of_memory"


class WorkerDied(WorkerError):
    """The worker process ended without an answer.

    It was killed, perhaps for memory: use a smaller micro-batch or fewer threads.
    """

    code = "worker_died"


class WorkerStalled(WorkerDied):
    """The worker process made no progress for too long and was ended.

    Look at its log, its device and its disk. If the machine is only slow, raise the limit:
    ``fcil-client join --work-timeout``, on a server ``[run] work_timeout_s``.
    """

    code = "worker_stalled"


class NotNow(FcilError):
    """This cannot be done now; it can be later.

    A server names the act under way: try again after it. A device may not work now (on battery,
    in use, outside its hours, or too hot): do nothing, since its client announces itself again;
    ``fcil-client status`` on the device shows what it waits for.
    """

    code = "not_now"


class RunFailed(FcilError):
    """The run cannot continue.

    The message names the cause; correct it and start the server again.
    """

    code = "run_failed"


class Timeout(FcilError):
    """There was no progress for longer than the limit.

    Look at the status of both sides; limits apply to progress, never to size.
    """

    code = "timeout"
    exit_code = EXIT_TIMEOUT


class Starting(Timeout):
    """A daemon or a command uses the directory and takes no commands yet, or is ending.

    Try again in a moment; a server that recomputes a state after a kill takes longer.
    """

    code = "starting"


class NotYet(FcilError):
    """No round takes this update now: the server has just started, or the next round is not open.

    Do nothing: the client keeps its update and offers it again.
    """

    code = "not_yet"
    exit_code = EXIT_TIMEOUT


class InternalError(FcilError):
    """Something happened that should be impossible: a defect in fcil.

    Report it with the file that the message names, or the log; no acknowledged update is lost.
    """

    code = "internal"
    exit_code = EXIT_INTERNAL


def all_errors() -> Iterator[type[FcilError]]:
    """Yield every error class once, parents before children."""
    queue: list[type[FcilError]] = [FcilError]
    while queue:
        cls = queue.pop(0)
        yield cls
        queue[:0] = cls.__subclasses__()


def as_fcil_error(error: Exception) -> FcilError:
    """Return an error that a peer may see; details of our own defects stay in the log."""
    if isinstance(error, FcilError):
        return error
    wrapped = InternalError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def from_code(code: str, message: str, action: str = "") -> FcilError:
    """Rebuild an error that a peer reported by its stable code."""
    for cls in all_errors():
        if cls.code == code:
            return cls(message, action=action)
    return FcilError(message, action=action)
