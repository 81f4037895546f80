"""Completions for a shell: clients and runs of a federation, methods, settings.

A completion that cannot be computed is empty: a shell has no place for a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fcil_protocol.errors import FcilError

if TYPE_CHECKING:
    from fcil_server.ledger.ledger import Ledger


def complete_client(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of clients in the ledger of the directory that the command names."""
    return _of_ledger(ctx, incomplete, lambda ledger: [row.name for row in ledger.clients.all()])


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ids of runs, the newest first."""
    return _of_ledger(
        ctx, incomplete, lambda ledger: [row.run_id for row in reversed(ledger.runs.all())]
    )


def complete_method(incomplete: str) -> list[str]:
    """Return names of installed methods."""
    from fcil_adapters.contract.registry import method_names

    return _starting(incomplete, method_names())


def complete_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return keys of ``federation.toml`` and options of the method, each with its ``=``."""
    from fcil_server.federation.config import known_keys

    if "=" in incomplete:
        return []
    keys = [key for key in known_keys() if "." in key]
    with contextlib.suppress(FcilError):
        keys += [f"method.{name}" for name in _method_options(ctx)]
    return _starting(incomplete, [f"{key}=" for key in keys])


def _method_options(ctx: typer.Context) -> Iterable[str]:
    """Return the options of the method that the command line names, else of the configured one."""
    from fcil_adapters.contract.registry import load_method
    from fcil_server.federation.config import merged
    from fcil_server.federation.directory import CONFIG

    path = _directory(ctx) / CONFIG
    given = [text for text in ctx.params.get("settings") or () if "=" in text]
    fields = merged(path if path.exists() else None, given)
    method: Any = load_method(str(fields.get("method", {}).get("name", "pilora")))
    return list(method.hparams.model_fields)


def _directory(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("directory") or "federation")


def _of_ledger(
    ctx: typer.Context, incomplete: str, names: Callable[[Ledger], Iterable[str]]
) -> list[str]:
    from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

    try:
        with Ledger(_directory(ctx) / LEDGER_NAME, read_only=True) as ledger:
            return _starting(incomplete, names(ledger))
    except FcilError:
        return []


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
