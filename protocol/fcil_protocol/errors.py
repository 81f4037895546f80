"""The errors of fcil that a person or a peer can receive.

The tree (each class says what happened, what to do, and carries a stable code):

    FcilError
    +-- ConfigError            config_invalid        4
    +-- DataError              data_invalid          4
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
    """Something failed that fcil has a name for.

    Read the sentence; it says what was expected, what was found and what to do.
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
    """A configuration file or a ``-c key=value`` override is wrong.

    Correct the named key; the message lists every fault found, and the nearest known key.
    """

    code = "config_invalid"
    exit_code = EXIT_USAGE


class DataError(FcilError):
    """The image folder or archive cannot be used as it is.

    Lay images out as ``FOLDER/<class>/<image>`` or ``FOLDER/train/<class>/<image>``.
    """

    code = "data_invalid"
    exit_code = EXIT_USAGE


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
    """Nobody answers at the server's address.

    Start the server, or correct the address; a client daemon keeps trying by itself.
    """

    code = "unreachable"


class TooManyAtOnce(LinkError):
    """The server knows the ticket, but for a minute too many others came.

    Try again in a minute; the ticket is still good.
    """

    code = "too_many_at_once"


class CutOff(LinkError):
    """The server does not hear this client for a while: too much of it was refused.

    Nothing to do if it was an accident: the client comes back by itself after the pause, and is
    a member as before. If it happens again, look for the reason of the refusals in the
    client's log, and install the version of fcil that the server has.
    """

    code = "cut_off"


class TrustError(FcilError):
    """The other side is not who it should be, or may not do this.

    Compare the fingerprints on both sides before you change anything.
    """

    code = "not_trusted"
    exit_code = EXIT_CONNECTION


class UnknownClient(TrustError):
    """The server does not know this client's key.

    Enrol the device with the server it should join; a client that was enrolled with a
    federation directory that no longer exists must be enrolled again.
    """

    code = "unknown_client"


class Revoked(TrustError):
    """The operator took this client off the allow-list, or the client left by itself.

    Ask the operator; to come back, join anew with a new ticket.
    """

    code = "revoked"


class MembershipExpired(TrustError):
    """The time for which this client was enrolled is over.

    Ask the operator for a new ticket and join with it.
    """

    code = "membership_expired"


class BadTicket(TrustError):
    """A ticket is none, was altered or cut short, or the server does not know it.

    Copy the whole line again, or ask the operator for a new one: fcil-server enrol NAME.
    """

    code = "bad_ticket"


class TicketUsed(BadTicket):
    """A ticket lets one client in, once, and another client has used this one.

    Ask the operator for a new one. If you did not expect this, tell the operator: somebody
    else may have read the ticket.
    """

    code = "ticket_used"


class TicketExpired(BadTicket):
    """The server's clock is past the time until which the ticket was good.

    Ask the operator for a new one: fcil-server enrol NAME --expires 24h.
    """

    code = "ticket_expired"


class WrongFederation(TrustError):
    """A message or a client state belongs to another federation or another run.

    Join with the join file of the federation you mean, or use another state directory.
    """

    code = "wrong_federation"


class BadSignature(TrustError):
    """A signature does not fit the bytes it came with.

    The bytes were altered, or signed by somebody else; nothing of them was used.
    """

    code = "bad_signature"


class WrongClock(TrustError):
    """The server's certificate is not valid at the time that this machine's clock shows.

    Set the clock; a client daemon goes on by itself then. If the clock is right, the server needs
    a new certificate: ``fcil-server rotate-keys``.
    """

    code = "wrong_clock"


class CannotOpen(TrustError):
    """A sealed payload cannot be opened with this key and this context.

    It was sealed for somebody else, belongs to another message, or was damaged on the way.
    """

    code = "cannot_open"


class KeyFileError(TrustError):
    """A key file is missing, damaged or readable by others.

    Restore it from a backup, or set its permissions to 0600.
    """

    code = "key_file"


class WireError(FcilError):
    """A message does not have the form that PROTOCOL.md gives it.

    Use the same fcil version on both sides.
    """

    code = "malformed"


class TooLarge(WireError):
    """A message or payload exceeds a limit of the protocol or of the round's schema.

    Check that client and server run the same method version and configuration.
    """

    code = "too_large"


class VersionMismatch(WireError):
    """The two sides share no protocol version.

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

    Report the method that produced it: only tensors named in its schema may travel.
    """

    code = "egress_refused"


class PrivacyRefused(WireError):
    """The client does not send what the server's terms of privacy would let leave.

    The message says which terms are too weak, or how much of the budget is spent. Ask the
    operator for stricter terms, or join with other limits; ``fcil-client privacy`` shows both.
    """

    code = "privacy_refused"


class MethodMismatch(WireError):
    """The client cannot run the method that the server runs.

    Install the same version of the method's package on the client.
    """

    code = "method_mismatch"


class BackboneMismatch(WireError):
    """The client's frozen backbone computes other features than the server's.

    Use the same weights file and the same preprocessing on every device.
    """

    code = "backbone_mismatch"


class StaleUpdate(WireError):
    """An update was made from a state that the round does not start from.

    The client fetches the current broadcast and trains again; nothing needs to be done.
    """

    code = "stale_update"


class AlreadyHave(WireError):
    """The server already holds an accepted update of this client for this round.

    The first one counts; the client drops the other.
    """

    code = "already_have"


class RoundClosed(WireError):
    """The update came after its round had been closed.

    The client drops it and takes part in the next round; raise ``[round] deadline_s``
    if this happens often.
    """

    code = "round_closed"


class Surplus(RoundClosed):
    """The round has as many updates as it takes; others were faster.

    Nothing to do: the client drops the update and is asked again in the next round.
    """

    code = "surplus"


class StorageError(FcilError):
    """A file could not be read or written.

    Check the path, its permissions and the free space on its disk.
    """

    code = "storage_failed"


class DiskFull(StorageError):
    """There is no space left for something that must be kept.

    Free space on the named disk; nothing that was acknowledged is lost.
    """

    code = "disk_full"


class CorruptFile(StorageError):
    """A file's content does not match its checksum or its format.

    Restore it from a backup; the newest valid version, where there is one, is used.
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

    The message names the cause; the daemon goes on.
    """

    code = "worker_failed"


class DoesNotFit(WorkerError):
    """A number is too large for the form in which it is to travel.

    Half precision ends at 65,504; training has probably diverged. If such numbers are meant,
    leave the kind out of ``[wire] half`` and start a new run.
    """

    code = "does_not_fit"


class OutOfMemory(WorkerError):
    """The memory of the machine, or of its GPU, does not suffice for the work.

    A client tries again with fewer images in one pass, down to one, before it says this: free
    memory, use ``--device cpu`` or fewer threads. On a server: another device, or more memory.
    """

    code = "out_of_memory"


class WorkerDied(WorkerError):
    """The worker process ended without an answer.

    It was killed, perhaps for memory: use a smaller micro-batch or fewer threads.
    """

    code = "worker_died"


class WorkerStalled(WorkerDied):
    """The worker process made no progress for too long and was ended.

    Look at its log, its device and its disk. On a machine that is only slow, raise the limit:
    ``fcil-client join --work-timeout``, on a server ``[run] work_timeout_s``.
    """

    code = "worker_stalled"


class NotNow(FcilError):
    """The device may not work now: on battery, in use, outside its hours, or too hot.

    Nothing to do: it asks in again by itself when it may; ``fcil-client status`` on the device
    says what it waits for.
    """

    code = "not_now"


class RunFailed(FcilError):
    """The run cannot go on.

    The message names the cause; correct it and start the server again.
    """

    code = "run_failed"


class Timeout(FcilError):
    """Nothing moved for longer than the limit.

    Look at the status of both sides; limits are about progress, never about size.
    """

    code = "timeout"
    exit_code = EXIT_TIMEOUT


class Starting(Timeout):
    """A daemon, or a command, works in the directory and takes no commands yet, or no more.

    Try again in a moment; a server that computes a state again after a kill takes longer.
    """

    code = "starting"


class NotYet(FcilError):
    """The server has just been started and has not come to the open round.

    Nothing is to be done: the client keeps its update and offers it again.
    """

    code = "not_yet"
    exit_code = EXIT_TIMEOUT


class InternalError(FcilError):
    """Something happened that should be impossible; this is a defect in fcil.

    Report it with the file that the sentence names, or the log; nothing that was acknowledged
    is lost.
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


def from_code(code: str, message: str, action: str = "") -> FcilError:
    """Rebuild an error that a peer reported by its stable code."""
    for cls in all_errors():
        if cls.code == code:
            return cls(message, action=action)
    return FcilError(message, action=action)
