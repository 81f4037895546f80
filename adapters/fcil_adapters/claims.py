"""What papers say their methods send, so that reports can show it beside what is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A paper's figure for one client and one round, in the paper's setting.

    Attributes:
        said: the figure as the paper gives it.
        up_bytes, down_bytes: the same in bytes of float32; None where nothing is said.
        leaves_out: what the figure does not count, one phrase.
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
