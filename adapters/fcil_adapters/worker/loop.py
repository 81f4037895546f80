"""A worker's main loop: calls come in through the pipe, results or named errors go out.

Also the two forms of a `Context`: fields for the pipe, and the object for a method's half.
Torch-free; operations import the modules they need when they are called.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fcil_adapters.contract import Context, Method, Progress, TaskInfo, registry
from fcil_adapters.contract.averaging import Averaging
from fcil_adapters.contract.backbone_info import backbone_fields, backbone_from_fields
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.contract.privacy import Privacy
from fcil_adapters.contract.source_code import own_line
from fcil_adapters.resources import memory_limit, priority
from fcil_adapters.worker.memory_files import Blob
from fcil_adapters.worker.pipe import Blobs, Fields, Pipe
from fcil_protocol.errors import (
    ConfigError,
    FcilError,
    InternalError,
    OutOfMemory,
    WireError,
    WorkerError,
    from_code,
)
from fcil_protocol.payloads.schema import Kind
from fcil_protocol.process.child import die_with_parent, end_with_parent, parent_pipe

PROGRESS_S = 0.1
ALIVE_S = 1.0  # between two signs of life

# Messages of libraries that have no exception for a lack of memory.
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory",
    "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "can't start new thread", "could not create a memory object",
)  # fmt: skip

SEE_LOG = "See the worker's log."  # an action, in which the daemon names the file

Reply = tuple[Fields, Blobs]


class Life:
    """Signs of life of a worker: a call without text sends at most one every `ALIVE_S`.

    A call with a text names work that may be silent for long from here on.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._last = float("-inf")

    def __call__(self, doing: str = "") -> None:
        """Send a sign of life."""
        now = time.monotonic()
        if doing or now - self._last >= ALIVE_S:
            self._last = now
            self._pipe.send({"alive": doing})

    def over(self) -> None:
        """End the work that may be silent for long."""
        self._pipe.send({"alive": ""})


@dataclass
class Question:
    """A request to the daemon.

    Attributes:
        answer: the reply, until it is fetched.
    """

    answer: tuple[Fields, list[Blob]] | None = None


@dataclass
class Call:
    """One current call in a worker.

    Attributes:
        fields: its arguments.
        payloads: the bytes sent with it.
        alive: signals to the daemon that the work continues.
    """

    fields: Fields
    payloads: list[Blob]
    pipe: Pipe
    _told: float = field(default=float("-inf"), repr=False)
    _asked: deque[Question] = field(default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        self.alive = Life(self.pipe)

    @property
    def method(self) -> str:
        """Name of the method that it is about; empty if it is about none."""
        return str(self.fields.get("method", ""))

    def progress(self, progress: Progress) -> None:
        """Report progress to the daemon, at most every `PROGRESS_S`, and the end."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_S or progress.done >= progress.total:
            self._told = now
            fields = {"done": progress.done, "total": progress.total, "loss": progress.loss}
            self.pipe.send({"progress": fields})

    def ask(self, fields: Fields) -> tuple[Fields, list[Blob]]:
        """Send the daemon a request in the middle of the call, and wait for the reply.

        Raises:
            FcilError: the daemon answered with this error.
        """
        return self.answer(self.ask_ahead(fields))

    def ask_ahead(self, fields: Fields) -> Question:
        """Send a request whose reply is needed later; the daemon prepares it meanwhile."""
        self.pipe.send({"request": fields})
        self._asked.append(Question())
        return self._asked[-1]

    def answer(self, question: Question) -> tuple[Fields, list[Blob]]:
        """Wait for the answer to a question and return it; it can be fetched once.

        Raises:
            FcilError: the daemon answered with this error.
        """
        while question.answer is None:
            self._receive()
        (message, payloads), question.answer = question.answer, None
        if "error" in message:
            raise from_code(message["error"], message["message"], message["action"])
        return message["reply"], payloads

    def finish(self) -> None:
        """Receive replies that are no longer needed, so that they do not block later ones."""
        while self._asked:
            self._receive().answer = None

    def _receive(self) -> Question:
        """Receive the next answer; they come in the order of the questions."""
        answer = self.pipe.recv()
        question = self._asked.popleft()
        question.answer = answer
        return question


Operation = Callable[[Call], Reply]


def serve(pipe: Pipe, operations: Mapping[str, Operation]) -> None:
    """Answer calls until the daemon closes the pipe.

    Every exception becomes an error message; exceptions other than `FcilError` also leave a
    traceback on stderr, and only there.
    """
    try:
        while True:
            message, payloads = pipe.recv()
            fields, blobs = _answer(pipe, operations, message, payloads)
            try:
                pipe.send(fields, blobs)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return
            except Exception as error:  # the result exceeds a limit of the pipe, or is invalid
                pipe.send(_error_fields(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(
    pipe: Pipe, operations: Mapping[str, Operation], message: Fields, payloads: list[Blob]
) -> Reply:
    call = None
    try:
        operation = operations.get(message["op"])
        if operation is None:
            raise InternalError(f"the worker has no operation {message['op']!r}.")
        call = Call(message["fields"], payloads, pipe)
        call.alive()
        fields, blobs = operation(call)
    except Exception as error:
        fields, blobs = _error_fields(error, "" if call is None else call.method), ()
    else:
        fields = {"result": fields}
    if call is not None:
        call.finish()
    return fields, blobs


def _error_fields(error: Exception, method: str = "") -> Fields:
    """Return the fields of an error, for the pipe; ``method`` is the one that the call names."""
    if not isinstance(error, FcilError):
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        error = _named(error, method)
    return {"error": error.code, "message": error.message, "action": error.action}


def _named(error: Exception, method: str = "") -> FcilError:
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    if _lacks_memory(error, text):
        return OutOfMemory(
            f"the worker ran out of memory ({kind}{': ' * bool(text)}{text[:120]})."
            f"{memory_limit.memory_hint(text)}",
            action="Use a smaller micro-batch or fewer threads, or free memory.",
        )
    what = f"{kind}: {text}" if text else kind
    if place := _line_of(method, error):
        return WorkerError(f"the method {method} failed with {what} ({place}).", action=SEE_LOG)
    return InternalError(f"the worker failed with {what}.", action=SEE_LOG)


def _line_of(method: str, error: Exception) -> str:
    """Return the line of a method's own package that failed; empty if that is not to blame."""
    if not method:
        return ""
    try:
        return own_line(registry.load_method(method), error)
    except ConfigError:  # it is not installed
        return ""


def _lacks_memory(error: Exception, text: str) -> bool:
    # torch.OutOfMemoryError by name: this module must not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(
        words.lower() in text.lower() for words in _NO_MEMORY
    )


def main(operations: Mapping[str, Operation], arguments: Sequence[str] | None = None) -> None:
    """Run a worker process.

    ``--fd`` is its end of the pipe, ``--nice`` its priority, ``--memory`` the bound in bytes on it
    and its daemon together, ``--others`` the bytes that the daemon takes.
    """
    parser = argparse.ArgumentParser(description="started by a daemon, not by hand")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--others", type=int, default=0)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the daemon makes a hanging worker write its stack
    priority.lower_priority(options.nice)
    priority.raise_oom_score()
    end_with_parent(parent_pipe())
    die_with_parent()  # also while it rests (`suspend`)
    memory_limit.configure(options.memory, options.others)
    os.set_inheritable(options.fd, False)
    serve(Pipe(socket.socket(fileno=options.fd)), operations)


# --- contexts -------------------------------------------------------------------------------


def context_fields(ctx: Context) -> Fields:
    """Return a context's fields that travel to a worker; device and backbone are the worker's."""
    return {
        "kind": ctx.kind,
        "task": ctx.task.index,
        "classes": list(ctx.task.classes),
        "past": list(ctx.task.past),
        "round": ctx.round,
        "rounds": ctx.rounds,
        "hparams": ctx.hparams.model_dump(mode="json"),
        "backbone_info": backbone_fields(ctx.backbone_info),
        "seed": list(ctx.seed),
        "micro_batch": ctx.micro_batch,
        "max_weight_share": ctx.max_weight_share,
        "averaging": asdict(ctx.averaging),
        "privacy": [ctx.privacy.noise_multiplier, ctx.privacy.clip],
        "half": ctx.forms.names,
        "masked_run": ctx.masked_run,
        "summed": ctx.summed,
    }


def context_from(
    fields: Mapping[str, Any],
    method: Method,
    *,
    device: str = "cpu",
    backbone: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Context:
    """Rebuild a context from its fields and this process's own objects.

    Raises:
        WireError: a field is missing or malformed.
    """
    try:
        ctx = Context(
            kind=fields["kind"],
            task=TaskInfo(fields["task"], tuple(fields["classes"]), tuple(fields["past"])),
            round=fields["round"],
            rounds=fields["rounds"],
            hparams=method.hparams.model_validate(fields["hparams"]),
            backbone_info=backbone_from_fields(fields["backbone_info"]),
            device=device,
            seed=tuple(fields["seed"]),
            backbone=backbone,
            micro_batch=fields["micro_batch"],
            max_weight_share=fields["max_weight_share"],
            averaging=Averaging(**fields["averaging"]),
            privacy=Privacy(*fields["privacy"]),  # noise is drawn where it is added
            forms=Forms(frozenset(Kind(name) for name in fields["half"])),
            masked_run=fields.get("masked_run", ""),  # a client's model may be of an older fcil
            summed=fields.get("summed", False),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the context for the worker is malformed: {error!r}.") from error
    return ctx if progress is None else replace(ctx, progress=progress)
