"""``-c section.key=value``: one setting for one command, in TOML syntax."""

from __future__ import annotations

import tomllib
from typing import Any, Self

from fcil_protocol.errors import ConfigError


class FromVariable(str):
    """An override that an environment variable gives: errors name the variable, not its value.

    Attributes:
        variable: its name.
    """

    __slots__ = ("variable",)
    variable: str

    def __new__(cls, variable: str, key: str, value: str) -> Self:
        """Make the override ``key=value``."""
        made = super().__new__(cls, f"{key}={value}")
        made.variable = variable
        return made


def apply_override(fields: dict[str, Any], override: str) -> None:
    """Set one key in nested fields; a bare word is a string.

    Raises:
        ConfigError: it is not of the form section.key=value.
    """
    shown = override.variable if isinstance(override, FromVariable) else override[:120]
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"override {shown!r} is not of the form section.key=value.",
            action="For example: -c round.min_clients=3.",
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number too large, endless lists
        value = text.strip()  # a bare word is a string: -c method.name=pilora
    target = fields
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {shown!r}: {part!r} is not a section.")
    target[parts[-1]] = value
