"""Late images: of classes that earlier tasks learned, left alone or counted (torch-free).

A method whose state is a sum over images can take them whenever they come: the result is that of
clients that never slept. A client sends each image in one update of a run at most
(`Exchange.counts_once`): its state names the counted ones, and holds once the server has counted
the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from pydantic import Field

from fcil_adapters.contract.context import Context, Hparams, TaskInfo
from fcil_adapters.contract.manifest import Exchange
from fcil_protocol.payloads.builtin import LATE
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.payloads.schema import PayloadSchema

Check = Callable[[Payload, TaskInfo], list[str]]


class LateHparams(Hparams):
    """The option of methods that can count images late."""

    late: Literal["off", "count"] = Field(
        default="off",
        description="Images of learned classes that came after their task, or whose client did: "
        "not used, or counted in rounds of their own, each image once.",
    )

    @property
    def counts_late(self) -> bool:
        """True if late images are counted."""
        return self.late == "count"

    @property
    def least_images(self) -> int:
        """Number of images below which nothing of a class enters an upload."""
        return 1

    def with_late_exchange(self, exchange: Exchange, upload: PayloadSchema) -> tuple[Exchange, ...]:
        """Return a task's exchange, and that of late images if they are counted.

        Args:
            exchange: the task's; if late images are counted, it has one round and keeps the state.
            upload: the same upload, with rows for all classes learned so far.
        """
        if not self.counts_late:
            return (exchange,)
        least = self.least_images
        once = replace(exchange, rounds=1, keeps_state=True, counts_once=True, least_images=least)
        check = check_of_all_classes(exchange.check)
        return once, replace(once, kind=LATE, upload=upload, check=check)


def check_of_all_classes(check: Check) -> Check:
    """Return the check of an upload on all classes learned so far, as on those of one task."""

    def checked(payload: Payload, task: TaskInfo) -> list[str]:
        return check(payload, TaskInfo(task.index, task.seen))

    return checked


def late_cap_ignored_reason(hparams: LateHparams) -> str:
    """Return why weights are not capped where late images are counted; empty: they are capped."""
    if not hparams.counts_late:
        return ""
    return (
        'with method.late = "count" every image counts once, whenever it comes, and a cap would '
        "depend on who else is in its round"
    )


def weight_cap(ctx: Context) -> float:
    """Return the largest share of one client's weight; 1, none, where late images are counted."""
    return 1.0 if ctx.hparams.counts_late else ctx.max_weight_share


def classes_of(kind: str, task: TaskInfo) -> tuple[int, ...]:
    """Return the classes that an upload describes: the task's, or all so far in a late round."""
    return task.seen if kind == LATE else task.classes


def tasks_of(kind: str, task: TaskInfo) -> range:
    """Return the tasks of these classes."""
    return range(0 if kind == LATE else task.index, task.index + 1)
