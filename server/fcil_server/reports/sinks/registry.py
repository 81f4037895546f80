"""Lookup of sinks by name, built-in and third-party alike, through entry points."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from fcil_protocol.errors import ConfigError
from fcil_protocol.process.round_spans import is_installed
from fcil_server.reports.sinks.contract import Options, Sink

GROUP = "fcil.sinks"
PARTS = ("name", "packages", "extra", "Options", "open")  # of `contract.Sink`


@dataclass(frozen=True)
class Chosen:
    """A sink with its options, checked."""

    sink: Sink
    options: Options


def names() -> list[str]:
    """Return the names of all installed sinks, sorted."""
    return sorted({e.name for e in entry_points(group=GROUP)})


def load(name: str) -> Sink:
    """Load a sink.

    Raises:
        ConfigError: none has this name, or it cannot be loaded, or is no sink.
    """
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = names()
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f", did you mean {near[0]!r}?" if near else "."
        raise ConfigError(
            f"there is no sink {name!r}{hint}",
            action=f"Installed are: {', '.join(known) or 'none'} (docs/sinks.md).",
        )
    try:
        sink: Sink = found[0].load()
    except (Exception, SystemExit) as error:  # third-party code may fail in any way
        raise ConfigError(
            f"the sink {name!r} cannot be loaded: {type(error).__name__}: {error}",
            action="Install its package again, or take it out of [sinks].",
        ) from error
    _check(name, sink)
    return sink


def _check(name: str, sink: Sink) -> None:
    lacks = [word for word in PARTS if not hasattr(sink, word)]
    fault = f"lacks {', '.join(lacks)}" if lacks else f"calls itself {sink.name!r}"
    if lacks or sink.name != name:
        raise ConfigError(
            f"the entry point {name!r} of {GROUP} leads to no sink of this name: it {fault}.",
            action="Install its package in another version, or take it out of [sinks].",
        )


def choose(name: str, given: dict[str, Any]) -> Chosen:
    """Check a sink's options and packages.

    Raises:
        ConfigError: one message that names every fault.
    """
    sink = load(name)
    missing = [p for p in sink.packages if not is_installed(p)]
    if missing:
        way = f"pip install 'fcil[{sink.extra}]'" if sink.extra else f"pip install {missing[0]}"
        raise ConfigError(
            f"sinks.{name} needs the packages {', '.join(missing)}.",
            action=f"Install them with: {way}",
        )
    try:
        return Chosen(sink, sink.Options.model_validate(given))
    except ValidationError as error:
        faults = "; ".join(_fault(name, sink, dict(e)) for e in error.errors(include_url=False))
        raise ConfigError(f"{faults}.") from error


def _fault(name: str, sink: Sink, error: dict[str, Any]) -> str:
    where = ".".join(str(x) for x in ("sinks", name, *error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}; it has {', '.join(sink.Options.model_fields) or 'none'}"
    # No value: an address may hold a password, and errors go to logs.
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"
