"""Completions for a shell: clients and runs of a federation, methods, settings and their values.

They may fail in any way: the command line then offers nothing (`fcil_protocol.process.completion`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from fcil_server.ledger.ledger import Ledger


def complete_client(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of clients in the ledger of the directory that the command names."""
    return _of_ledger(ctx, incomplete, lambda ledger: [row.name for row in ledger.clients.all()])


def complete_member(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of clients that are not revoked."""

    def names(ledger: Ledger) -> list[str]:
        return [row.name for row in ledger.clients.all() if row.revoked_at is None]

    return _of_ledger(ctx, incomplete, names)


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
    """Return keys of ``federation.toml`` and options of the method, or a key's values."""
    fields = _fields()
    with contextlib.suppress(Exception):  # the configuration may not be readable
        fields |= {f"method.{name}": field for name, field in _method_options(ctx).items()}
    return _settings(incomplete, fields)


def complete_weights(incomplete: str) -> list[str]:
    """Return the only setting of an export."""
    return _settings(incomplete, {key: f for key, f in _fields().items() if key == "run.weights"})


def _settings(incomplete: str, fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return each fitting key with its ``=``.

    A single key comes with its values too, or its default: a shell ends the word after the only
    completion, and a value follows the ``=`` without a space.
    """
    typed, equals, _ = incomplete.partition("=")
    keys = [key for key in fields if (key == typed if equals else key.startswith(typed))]
    if len(keys) != 1:
        return [f"{key}=" for key in keys]
    values = [*([] if equals else [""]), *_values(keys[0], fields[keys[0]])]
    return _starting(incomplete, [f"{keys[0]}={value}" for value in values])


def _values(key: str, field: FieldInfo) -> list[str]:
    """Return the values that a setting can have, else its default, in the syntax of ``-c``."""
    if key == "method.name":
        return complete_method("")
    choices = [field.get_default(call_default_factory=True)]
    if field.annotation is bool:
        choices = [True, False]
    elif get_origin(field.annotation) is Literal:
        choices = list(get_args(field.annotation))
    plain = [one for one in choices if isinstance(one, str | int | float | list)]
    return [one if one and isinstance(one, str) else json.dumps(one) for one in plain]


def _fields() -> dict[str, FieldInfo]:
    from fcil_server.federation.config import Config

    return {
        f"{section}.{key}": field
        for section, part in Config.model_fields.items()
        for key, field in getattr(part.annotation, "model_fields", {}).items()
    }


def _method_options(ctx: typer.Context) -> dict[str, FieldInfo]:
    """Return the options of the method that the command line names, else of the configured one."""
    from fcil_adapters.contract.registry import load_method
    from fcil_server.federation.config import merged
    from fcil_server.federation.directory import CONFIG
    from fcil_server.federation.environment import environment_settings

    path = Path(ctx.params.get("config") or _directory(ctx) / CONFIG).expanduser()
    given = [text for text in ctx.params.get("settings") or () if "=" in text]
    fields = merged(path if path.exists() else None, (*environment_settings(), *given))
    method: Any = load_method(str(fields.get("method", {}).get("name", "pilora")))
    return dict(method.hparams.model_fields)


def _directory(ctx: typer.Context) -> Path:
    # A shell expands no tilde for a completion.
    return Path(ctx.params.get("directory") or "federation").expanduser()


def _of_ledger(
    ctx: typer.Context, incomplete: str, names: Callable[[Ledger], Iterable[str]]
) -> list[str]:
    from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

    with Ledger(_directory(ctx) / LEDGER_NAME, read_only=True) as ledger:
        return _starting(incomplete, names(ledger))


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
