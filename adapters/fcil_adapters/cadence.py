"""When the parts of a broadcast change, and what the schemas' bounds leave open (torch-free).

A manifest states both, so that the bytes of a method can be told before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Cadence(StrEnum):
    """When there is a new part of a kind, and what becomes of the older ones.

    A client fetches each part once, so this decides what a kind of part costs.
    """

    ROUND = "round"  # one part, replaced by every round and by every task that opens
    COUNTED = "counted"  # one part, replaced by rounds alone; they bring the rows of classes
    LOG = "log"  # every round adds one; all since the last base are needed
    BASE = "base"  # replaces the log once the log is as large; without a log, every round
    TASK = "task"  # every finished task adds one, with all its classes; all are needed
    OWN = "own"  # a part for each task: its rounds replace it, later ones leave it; all are needed
    TRAINED = "trained"  # one part, replaced by ``train`` rounds alone
    OPENING = "opening"  # one part, replaced when a task opens
    LEARNED = "learned"  # one part, replaced when a task opens and by ``train`` rounds
    FINISHED = "finished"  # one part, replaced by ``finish`` rounds; they bring the rows of classes
    CLOSED = "closed"  # every ``finish`` round adds one, with its task's classes; all are needed
    RUN = "run"  # one part, the same from the first round to the last


@dataclass(frozen=True)
class Largest:
    """What can travel in one task with so many clients, where the schemas would allow more.

    Attributes:
        sizes: free symbol of a schema -> its largest value, instead of its ``at_most`` bound.
        without_tensors: optional tensors that nobody sends.
        without_parts: kinds of parts that are not broadcast.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    without_tensors: tuple[str, ...] = ()
    without_parts: tuple[str, ...] = ()
