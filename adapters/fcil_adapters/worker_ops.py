"""A worker's main loop: calls come in through the pipe, results or named errors go out.

Also the two forms of a `Context`: fields for the pipe, and the object for a method's half.
Torch-free; operations import what they need when they are called.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fcil_adapters.averaging_rules import Averaging
from fcil_adapters.contract import Context, Method, Progress, TaskInfo
from fcil_adapters.describe import backbone_fields, backbone_from_fields
from fcil_adapters.privacy import Privacy
from fcil_adapters.worker_pipe import Blobs, Fields, Pipe
from fcil_protocol.errors import FcilError, InternalError, WireError, WorkerError, from_code

PROGRESS_S = 0.1

Reply = tuple[Fields, Blobs]


@dataclass
class Call:
    """One call under way in a worker.

    Attributes:
        fields: its arguments.
        payloads: the bytes that came with it.
    """

    fields: Fields
    payloads: list[bytes]
    pipe: Pipe
    _told: float = field(default=float("-inf"), repr=False)

    def progress(self, progress: Progress) -> None:
        """Tell the daemon how far the work is, at most every `PROGRESS_S`, and the end."""
        now = time.monotonic()
        if now - self._told >= PROGRESS_S or progress.done >= progress.total:
            self._told = now
            fields = {"done": progress.done, "total": progress.total, "loss": progress.loss}
            self.pipe.send({"progress": fields})

    def ask(self, fields: Fields) -> tuple[Fields, list[bytes]]:
        """Ask the daemon for something in the middle of the call.

        Raises:
            FcilError: what the daemon answered instead.
        """
        self.pipe.send({"request": fields})
        message, payloads = self.pipe.recv()
        if "error" in message:
            raise from_code(message["error"], message["message"], message["action"])
        return message["reply"], payloads


Operation = Callable[[Call], Reply]


def serve(pipe: Pipe, operations: Mapping[str, Operation]) -> None:
    """Answer calls until the daemon closes the pipe.

    Every exception becomes an error message; those without a name of ours also leave a
    traceback on stderr, and nowhere else.
    """
    try:
        while True:
            message, payloads = pipe.recv()
            fields, blobs = _answer(pipe, operations, message, payloads)
            try:
                pipe.send(fields, blobs)
            except FcilError as error:  # the result itself exceeds a limit of the pipe
                pipe.send(_error_fields(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(
    pipe: Pipe, operations: Mapping[str, Operation], message: Fields, payloads: list[bytes]
) -> Reply:
    try:
        operation = operations.get(message["op"])
        if operation is None:
            raise InternalError(f"the worker has no operation {message['op']!r}.")
        fields, blobs = operation(Call(message["fields"], payloads, pipe))
    except Exception as error:
        return _error_fields(error), ()
    return {"result": fields}, blobs


def _error_fields(error: Exception) -> Fields:
    if not isinstance(error, FcilError):
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        error = _named(error)
    return {"error": error.code, "message": error.message, "action": error.action}


def _named(error: Exception) -> FcilError:
    kind = type(error).__name__
    # torch.cuda.OutOfMemoryError by name: this module must not import torch.
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError":
        return WorkerError(
            "the worker ran out of memory.",
            action="Use a smaller micro-batch, or another device.",
        )
    text = " ".join(str(error).split())[:300]
    return InternalError(f"the worker failed with {kind}: {text}", action="See the worker's log.")


def main(operations: Mapping[str, Operation], arguments: Sequence[str] | None = None) -> None:
    """Run a worker process: ``--fd`` is its end of the pipe, ``--nice`` its priority."""
    parser = argparse.ArgumentParser(description="started by a daemon, not by hand")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    if options.nice:
        os.nice(options.nice)
    os.set_inheritable(options.fd, False)
    pipe = Pipe(socket.socket(fileno=options.fd))
    threading.Thread(target=_exit_with_daemon, args=(options.fd,), daemon=True).start()
    serve(pipe, operations)


def _exit_with_daemon(fd: int) -> None:
    """End the process when the daemon is gone, even in the middle of long work."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is reported without being asked for
    poll.poll()
    os._exit(0)


# --- contexts -------------------------------------------------------------------------------


def context_fields(ctx: Context) -> Fields:
    """Return what of a context travels to a worker; device and backbone are the worker's."""
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
    }


def context_from(
    fields: Mapping[str, Any],
    method: Method,
    *,
    device: str = "cpu",
    backbone: Any = None,
    progress: Callable[[Progress], None] | None = None,
) -> Context:
    """Rebuild a context from its fields and what this process adds.

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
            **({} if progress is None else {"progress": progress}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the context for the worker is malformed: {error!r}.") from error
    return ctx
