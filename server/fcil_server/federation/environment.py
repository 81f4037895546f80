"""Settings in environment variables: each is a ``-c`` option before those of the command line."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from fcil_protocol.errors import ConfigError
from fcil_protocol.process.overrides import FromVariable
from fcil_server.federation.config import Config, known_keys

PREFIX = "FCIL_"
_OPEN = ("method", "sinks", "webhooks")  # sections whose keys are names


def environment_settings(environ: Mapping[str, str] = os.environ) -> tuple[FromVariable, ...]:
    """Return the settings in environment variables, as overrides to put before those of ``-c``.

    ``FCIL_ROUND_MIN_CLIENTS=3`` sets ``round.min_clients``. In the options of a method or a sink
    two underscores stand for a dot: ``FCIL_METHOD_ADAPT__ROUNDS``. An empty variable counts as
    unset. Names that begin with ``FCIL_`` and a section are reserved; others are ignored, unless
    they resemble a setting's.

    Raises:
        ConfigError: names every variable that should be a setting and is none.
    """
    found, faults = [], []
    for name, value in sorted(environ.items()):
        key, fault = _read(name)
        if key and value.strip():
            found.append(FromVariable(name, key, value))
        elif fault and value.strip():
            faults.append(fault)
    if faults:
        raise ConfigError(
            f"{'; '.join(faults)}.", action="Correct or unset it; docs/configuration.md has all."
        )
    return tuple(found)


def without_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment without settings, for the servers that fcil starts for itself."""
    return {name: value for name, value in environ.items() if not any(_read(name))}


def variables_in_force(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the variables that no later override replaces, sorted."""
    last = {override.partition("=")[0].strip(): override for override in overrides}
    return tuple(sorted(o.variable for o in last.values() if isinstance(o, FromVariable)))


@contextlib.contextmanager
def naming_variables(overrides: Sequence[str]) -> Iterator[None]:
    """Name the variables in force in an error: any of them may be at fault."""
    try:
        yield
    except ConfigError as error:
        if names := ", ".join(variables_in_force(overrides)):
            action = error.action or error.default_action()
            error.action = f"{action} Set in the environment: {names}.".lstrip()
        raise


def _read(name: str) -> tuple[str, str]:
    """Return the key that a variable sets, or its fault; neither for one of another program."""
    section, _, rest = name.removeprefix(PREFIX).lower().partition("_")
    if not name.startswith(PREFIX) or not rest:
        return "", ""
    names = _names()
    if name in names:
        return names[name], ""
    near = difflib.get_close_matches(name, names, 1, 0.93 if section in _OPEN else 0.85)
    if section in _OPEN and not near:
        return f"{section}.{rest.replace('__', '.')}", ""
    if near or section in Config.model_fields:
        hint = f" (did you mean {near[0]}?)" if near else ""
        return "", f"the environment variable {name} is no setting{hint}"
    return "", ""


@cache
def _names() -> dict[str, str]:
    return {PREFIX + key.replace(".", "_").upper(): key for key in known_keys() if "." in key}
