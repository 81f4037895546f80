"""The training precision of a client: its own choice, like its device (torch-free).

Mixed precision computes a training step's matrix products with 16 bits; trained tensors, losses,
and every feature that is sent, averaged or cached stay float32.
"""

from __future__ import annotations

from typing import Literal, get_args

from fcil_protocol.errors import ConfigError

Choice = Literal["auto", "fp32", "amp"]
Precision = Literal["fp32", "bf16", "fp16"]

CHOICES: tuple[str, ...] = get_args(Choice)


def check_choice(choice: str) -> None:
    """Refuse an unknown precision.

    Raises:
        ConfigError: it is none of `CHOICES`.
    """
    if choice not in CHOICES:
        raise ConfigError(
            f"unknown precision {choice!r}; known are {', '.join(CHOICES)}.",
            action="Leave it at auto, which is fp32, or choose amp for mixed precision.",
        )
