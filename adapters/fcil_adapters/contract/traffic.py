"""A manifest's statements about a method's bytes (torch-free).

`Cadence` and `Largest`: when parts of a broadcast change, and the sizes that the schemas leave
open, so that the bytes are known before anything runs. `Claim`: a paper's own figure, which reports
show next to the bytes sent. `Economy`: a step towards fewer bytes and its price. A manifest lists
its economies from the least to the most costly in accuracy; a server with a budget takes them in
this order until a round fits (`fcil_server.reports.traffic.budget`). Half precision is not among
them: it is the default ([wire] half).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cadence(StrEnum):
    """Times of new parts of a kind, and the fate of the older ones.

    A client fetches each part once, so this decides the cost of a kind of part.
    """

    ROUND = "round"  # one part, replaced by every round and by every task that opens
    COUNTED = "counted"  # one part, replaced by rounds alone; they bring the rows of classes
    LOG = "log"  # every round adds one; all since the last base are needed
    BASE = "base"  # replaces the log once the log is as large; without a log, every round
    TASK = "task"  # every finished task adds one, with all its classes; late images replace it
    OWN = "own"  # a part for each task: its rounds replace it, later ones leave it; all are needed
    TRAINED = "trained"  # one part, replaced by ``train`` rounds alone
    OPENING = "opening"  # one part, replaced when a task opens
    LEARNED = "learned"  # one part, replaced when a task opens and by ``train`` rounds
    FINISHED = "finished"  # one part, replaced by ``finish`` rounds; they bring the rows of classes
    CLOSED = "closed"  # every ``finish`` round adds one, with its task's classes; all are needed
    RUN = "run"  # one part, the same from the first round to the last


@dataclass(frozen=True)
class Largest:
    """Largest traffic in one task with a given number of clients, where the schemas allow more.

    Attributes:
        sizes: free symbol of a schema -> its largest value, instead of its ``at_most`` bound.
        without_tensors: optional tensors that no client sends.
        without_parts: kinds of parts that are not broadcast.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    without_tensors: tuple[str, ...] = ()
    without_parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A paper's figure for one client and one round, in the paper's setting.

    Attributes:
        said: the figure as the paper gives it.
        up_bytes, down_bytes: the same in bytes of float32; None where the paper gives none.
        leaves_out: the bytes that the figure does not count, one phrase.
        backbone: timm name.
        classes: of a task.
        clients: that answer a round.
    """

    said: str
    up_bytes: int | None
    down_bytes: int | None
    leaves_out: str
    backbone: str = "vit_base_patch16_224"
    classes: int = 10
    clients: int = 10


@dataclass(frozen=True)
class Economy:
    """One step towards fewer bytes.

    Attributes:
        what: the step in a few words, such as "diagonal covariances".
        gives_up: its price, in a few words.
        options: option of the method -> value; it replaces those of earlier steps.
    """

    what: str
    gives_up: str
    options: Mapping[str, Any]
