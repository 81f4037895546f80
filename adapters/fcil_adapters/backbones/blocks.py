"""Type and check of the option ``blocks``: the blocks with a method's adapters (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, Field

from fcil_adapters.contract import BackboneInfo
from fcil_protocol.errors import ConfigError


def _different(blocks: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(blocks)) != len(blocks) or min(blocks) < 0:
        raise ValueError(f"blocks must be different numbers >= 0, got {list(blocks)}")
    return blocks


# Type of the option ``blocks``: at least one, all different, counted from 0.
Blocks = Annotated[tuple[int, ...], Field(min_length=1), AfterValidator(_different)]


def check_blocks(method: str, blocks: Iterable[int], backbone: BackboneInfo) -> None:
    """Refuse blocks that the backbone lacks.

    Raises:
        ConfigError: the option ``blocks`` of the method names one.
    """
    beyond = [b for b in blocks if b >= backbone.depth]
    if beyond:
        raise ConfigError(
            f"option 'blocks' of method {method}: block {beyond[0]} does not exist; the backbone "
            f"{backbone.name} has the blocks 0 to {backbone.depth - 1}.",
            action="Name existing blocks.",
        )
