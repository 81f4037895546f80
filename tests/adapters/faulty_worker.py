"""A worker that fails in every way a worker can; run with ``python -m faulty_worker``."""

import os
import resource
import socket
import threading
from pathlib import Path

from fcil_adapters.contract import Progress
from fcil_adapters.worker import loop as worker_ops
from fcil_adapters.worker import pipe as worker_pipe
from fcil_protocol.errors import DataError


def echo(call):
    return {**call.fields, "pid": os.getpid()}, call.payloads


def refuse(call):
    raise DataError("no such image.", action="Look again.")


def raise_unexpected(call):
    raise ValueError("something\nwith two lines")


def run_out_of_memory(call):
    raise MemoryError


def end(call):
    call.progress(Progress(0, 2))
    if call.fields["signal"]:
        os.kill(os.getpid(), call.fields["signal"])
    os._exit(call.fields["code"])


def hang(call):
    call.progress(Progress(1, 2, loss=0.5))
    threading.Event().wait()


def load(call):
    call.alive("loading nothing")
    threading.Event().wait()


def murmur(call):
    """Say a word every so often, for longer than silence is allowed."""
    for _ in range(call.fields["n"]):
        threading.Event().wait(call.fields["every_s"])
        call.pipe.send({"alive": ""})
    return {}, ()


def ask_and_wait(call):
    call.ask({"update": 0})
    return {}, ()


def allocate(call):
    """Take memory for so many images under a limit that holds for this process alone."""
    import numpy as np

    if call.fields["torch"]:
        import torch
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    images = call.fields["context"]["micro_batch"] or call.fields["batch"]
    kept = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + call.fields["room"], kept[1]))
    try:
        if call.fields["torch"]:
            torch.empty(images * call.fields["each"], dtype=torch.uint8)
        else:
            np.empty(images * call.fields["each"], np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)
    return {"images": images, "pid": os.getpid()}, ()


def nothing_to_send(call):
    return {}, [None]


def count(call):
    for i in range(call.fields["n"]):
        call.progress(Progress(i + 1, call.fields["n"]))
    return {}, ()


def gather(call):
    got = []
    for _ in range(2):
        for i in range(call.fields["n"]):
            fields, payloads = call.ask({"update": i})
            got.append([fields["i"], bytes(payloads[0])])
    return {"got": got}, ()


def ask_twice(call):
    try:
        call.ask({"update": 0})
    except DataError:
        call.ask({"update": 1})
    return {}, ()


def too_large(call):
    return {"text": "x" * (worker_pipe.MAX_MESSAGE_BYTES + 1)}, ()


def garbage(call):
    socket.socket(fileno=os.dup(call.pipe.fileno())).sendall(call.fields["data"])
    threading.Event().wait()


def environment(call):
    return {
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "extra": os.environ.get("FCIL_TEST"),
        "nice": os.nice(0),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()),
        "session": os.getsid(0) == os.getpid(),
        "files": [_target(n) for n in os.listdir("/proc/self/fd")],
    }, ()


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the one that listed the folder
        return ""


def talk(call):
    print("x" * call.fields["n"], flush=True)  # noqa: T201
    return {}, ()


if __name__ == "__main__":
    worker_ops.main(
        {
            f.__name__: f
            for f in (
                echo, refuse, raise_unexpected, run_out_of_memory, end, hang, count, gather,
                ask_twice, too_large, garbage, environment, talk, load, murmur, ask_and_wait,
                allocate, nothing_to_send,
            )
        }
    )  # fmt: skip
