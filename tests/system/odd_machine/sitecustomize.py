"""A machine with troubles, planted from outside: ``PYTHONPATH`` and variables are enough.

``FCIL_LEARNER`` names a file of words, one a line; each round of running_mean's learner takes the
first one away: ``ok``, ``hang``, ``kill`` (its process), ``memory``, ``nan``, ``shape``, ``junk``,
``raise``. ``FCIL_AGGREGATOR`` names one of lines ``operation word client``, each of which strikes
when running_mean's aggregator next does this operation with an update of this client (``-``: of
whomever), and then goes; with ``always`` before it, it stays. ``FCIL_CLOCK`` names a file with the
seconds by which the wall clock is wrong, which may be replaced at any moment; clocks that measure
durations are right.
"""

import datetime  # noqa: ICN001 - its class is replaced in the module
import os
import signal
import sys
import threading
import time
from pathlib import Path


def plant_learner(script):
    import numpy as np

    from fcil_adapters.methods.running_mean import learner
    from fcil_protocol.payloads.payload import Payload

    real = learner.Learner.run

    def run(self, ctx, state, broadcast, data):
        word, _, rest = script.read_text().partition("\n")
        script.write_text(rest)
        state, payload = real(self, ctx, state, broadcast, data)
        if word == "hang":
            threading.Event().wait()
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "memory":
            raise MemoryError
        if word == "raise":
            raise ZeroDivisionError("planted")
        if word == "junk":
            return state, "no payload"
        tensors = dict(payload.tensors)
        if word == "nan":
            tensors["mean"] = np.full_like(tensors["mean"], np.nan)
        if word == "shape":
            tensors["mean"] = tensors["mean"][:, :-1].copy()
        return state, Payload(tensors, payload.meta)

    learner.Learner.run = run


def plant_aggregator(script):
    from fcil_adapters.methods.running_mean import aggregator
    from fcil_adapters.numerics.update_list import UpdateList

    def strike(operation, clients):
        lines = script.read_text().splitlines()
        for i, line in enumerate(lines):
            if not line:
                continue
            *always, what, word, whose = line.split()
            if what == operation and (whose == "-" or whose in clients):
                if not always:
                    script.write_text("\n".join(lines[:i] + lines[i + 1 :]))
                if word == "hang":
                    threading.Event().wait()
                os.kill(os.getpid(), signal.SIGKILL)

    def plant(operation):
        real = getattr(aggregator.Aggregator, operation)

        def planted(self, ctx, *args):
            updates = UpdateList(tuple(args[1])) if operation == "aggregate" else None
            strike(operation, updates.clients if updates else ())
            return real(self, ctx, *args[:1], *([updates] if updates else args[1:]))

        setattr(aggregator.Aggregator, operation, planted)

    for operation in ("init", "open_task", "broadcast", "aggregate"):
        plant(operation)


def plant_clock(shift):
    real_time = time.time

    def wrong():
        return real_time() + float(shift.read_text())

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(wrong(), tz)

    time.time = wrong
    datetime.datetime = Shifted


if "FCIL_CLOCK" in os.environ:
    plant_clock(Path(os.environ["FCIL_CLOCK"]))
if "FCIL_AGGREGATOR" in os.environ and "fcil_server.aggregation.worker" in sys.orig_argv:
    plant_aggregator(Path(os.environ["FCIL_AGGREGATOR"]))
if "FCIL_LEARNER" in os.environ and "fcil_client.rounds.worker" in sys.orig_argv:
    plant_learner(Path(os.environ["FCIL_LEARNER"]))
