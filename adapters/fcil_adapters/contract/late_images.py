"""Images of classes that earlier tasks learned: left alone, or counted late (torch-free).

A method whose state is a sum over images can take them whenever they come: the result is that of
clients that never slept. A client sends each image in one update of a run at most
(`Exchange.once`): its state names the counted ones, and holds once the server has counted the
update.
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

    late: Literal["refuse", "count"] = Field(
        default="refuse",
        description="Images of learned classes that were not there, or whose client was not, in "
        "their task: left alone, or counted between rounds, each once.",
    )

    @property
    def counts_late(self) -> bool:
        """True if images of learned classes are counted."""
        return self.late == "count"

    @property
    def least_images(self) -> int:
        """Number of images below which nothing of a class enters an upload."""
        return 1

    def counting_late(self, exchange: Exchange, late: PayloadSchema) -> tuple[Exchange, ...]:
        """Return a task's exchange, and that of late images if they are counted.

        Args:
            exchange: the task's, of one round, without trained tensors.
            late: the same upload, with rows for all classes learned so far.
        """
        if not self.counts_late:
            return (exchange,)
        least = self.least_images
        once = replace(exchange, rounds=1, keeps_state=True, once=True, least_images=least)
        check = of_all_classes(exchange.check)
        return once, replace(once, kind=LATE, upload=late, check=check, late=True)


def of_all_classes(check: Check) -> Check:
    """Return the check of an upload on all classes learned so far, as on those of one task."""

    def checked(payload: Payload, task: TaskInfo) -> list[str]:
        return check(payload, TaskInfo(task.index, task.seen))

    return checked


def cap_ignored(hparams: LateHparams) -> str:
    """Return why a method that counts late images ignores a cap on weights, if it does."""
    if not hparams.counts_late:
        return ""
    return (
        'with method.late = "count" every image counts once, whenever it comes, and a cap would '
        "depend on who else is in its round"
    )


def described_classes(ctx: Context) -> tuple[int, ...]:
    """Return the classes that uploads of a round are about: the task's, or all for late images."""
    return ctx.task.seen if ctx.kind == LATE else ctx.task.classes
