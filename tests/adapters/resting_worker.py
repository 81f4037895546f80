"""A worker that counts, and takes memory; run with ``python -m resting_worker``."""

import threading

import numpy as np
import psutil

from fcil_adapters.resources import memory_limit
from fcil_adapters.worker import loop as worker_ops


def steps(call):
    """Say every step; the last one comes only after as many as were asked for."""
    for number in range(call.fields["n"]):
        call.pipe.send({"progress": {"done": number, "total": call.fields["n"], "loss": None}})
        threading.Event().wait(0.001)
    return {}, ()


def hang(call):
    threading.Event().wait()


def grow(call):
    """Take as much memory as so many images do, under this process's bound."""
    memory_limit.enforce(least=call.fields.get("least", memory_limit.LEAST_ROOM))
    images = call.fields["context"]["micro_batch"] or call.fields["batch"]
    return {"bytes": np.ones(images * call.fields["each"], np.uint8).nbytes}, ()


def place(call):
    me = psutil.Process()
    return {"nice": me.nice(), "disk": [int(x) for x in me.ionice()]}, ()


if __name__ == "__main__":
    worker_ops.main({f.__name__: f for f in (steps, hang, grow, place)})
