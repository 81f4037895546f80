"""Groups of a swarm: slots, output and restarts of each. No IO."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

AGAIN = 3  # restarts of a group that was killed
KILLED = 128  # exit codes from here on name the signal that ended a process, as negative ones do
_ADDED = (
    "members", "enrolled", "connected", "fetching", "working", "sending", "counted",
    "bytes_up", "bytes_down",
)  # fmt: skip


def divide(slots: Sequence[int], groups: int) -> list[list[int]]:
    """Return the slots in this many groups, neighbours together, sizes at most one apart.

    There is no empty group: fewer slots than groups give a group each.
    """
    count = min(groups, len(slots))
    ends = [round(i * len(slots) / count) for i in range(count + 1)]
    return [list(slots[a:b]) for a, b in itertools.pairwise(ends)]


def as_text(slots: Sequence[int]) -> str:
    """Return ascending slots in the form of ``--slots``: ``0-3,7``."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class GroupShare:
    """Resources that the cluster reserves for one group: cores, and GPUs or parts of one."""

    cpus: float = 1.0
    gpus: float = 0.0

    @property
    def threads(self) -> int:
        """Threads for the group's worker."""
        return max(1, math.floor(self.cpus))

    def lacking_resources(self, groups: int, has: Mapping[str, float]) -> str:
        """Return the resources that a cluster lacks for this many groups; empty: none."""
        needs = {"CPU": groups * self.cpus, "GPU": groups * self.gpus}
        return "; ".join(
            f"{amount:g} {kind}s are needed, the cluster has {has.get(kind, 0.0):g}"
            for kind, amount in needs.items()
            if amount > has.get(kind, 0.0) + 1e-9
        )


@dataclass
class Group:
    """Some members of a swarm in one process somewhere.

    Attributes:
        number: from 0.
        slots: of the partition, as text.
        node: node of its last start.
        summary: its last report on its members (`summary_of`).
        ended: its final report, from a swarm that ended in order.
        words: the last line that was no event: an error's sentence.
        kills: number of times that it was killed.
        code: its exit code, once it is not restarted.
    """

    number: int
    slots: str
    node: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    kills: int = 0
    code: int | None = None

    def on_output(self, line: str) -> tuple[str, str] | None:
        """Process a line of its output; return a level and a sentence if it is to be shown."""
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        event = told.get("event") if isinstance(told, dict) else None
        if event == "note":
            member = f"{told['member']}: " if told["member"] else ""
            return told["level"], f"group {self.number}: {member}{told['text']}"
        if event in ("summary", "end"):
            self.summary = told
            self.ended = told if event == "end" else {}
        elif line.strip():
            self.words = line.strip()
        return None

    def left(self, code: int | None, *, stopping: bool) -> Literal["over", "again", "lost"]:
        """Return the consequence of its end; ``code`` is None if unknown.

        It is restarted if it was killed (it resumes from its homes); a group that ended by itself
        gave its reason, and would do so again.
        """
        killed = not self.ended and (code is None or code < 0 or code >= KILLED)
        if killed and not stopping:
            self.kills += 1
            if self.kills <= AGAIN:
                self.words = ""
                return "again"
        self.code = 1 if code is None or code < 0 else code
        return "lost" if killed and not stopping else "over"


def together(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the summaries of all groups as one."""
    told = [group.summary for group in groups if group.summary]
    rounds = Counter(one["round"] for one in told if one["round"])
    added: dict[str, Any] = {key: sum(one[key] for one in told) for key in _ADDED}
    failed = {name: why for one in told for name, why in one["failed"].items()}
    return added | {
        "round": rounds.most_common(1)[0][0] if rounds else None,
        "run": next((one["run"] for one in told if one["run"]), None),
        "failed": failed,
    }


def exit_code(groups: Sequence[Group]) -> int:
    """Return the worst code of all groups; one without a code counts as 1."""
    return max(1 if group.code is None else group.code for group in groups)
