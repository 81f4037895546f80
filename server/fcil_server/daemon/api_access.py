"""Programs' access to the HTTP API: commands that make and revoke tokens."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError
from fcil_server.federation.api_tokens import make_token, revoke_token
from fcil_server.ledger.ledger import Ledger

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext

MIN_TOKEN_S, MAX_TOKEN_S = 60.0, 3650 * 86_400.0

Change = tuple[dict[str, Any], str]  # the answer to the caller, and the detail for the audit log


async def token_new(context: ServerContext, fields: dict[str, Any], actor: str) -> dict[str, Any]:
    """Make a token; its text goes only to the caller and is stored nowhere.

    Raises:
        UsageError: its name, role or lifetime is wrong, or the name is taken.
        DiskFull, StorageError: nothing was changed.
    """
    told, detail = await asyncio.to_thread(_new, context.federation.directory, fields)
    context.audit_done(actor, "token_new", detail)
    return told


async def token_revoke(
    context: ServerContext, fields: dict[str, Any], actor: str
) -> dict[str, Any]:
    """Revoke a token: it is void from the next request on.

    Raises:
        UsageError: there is none of this name.
        DiskFull, StorageError: nothing was changed.
    """
    told, detail = await asyncio.to_thread(_revoke, context.federation.directory, fields)
    context.audit_done(actor, "token_revoke", detail)
    return told


def change_tokens(
    directory: Path, ledger: Ledger, op: str, fields: dict[str, Any], actor: str
) -> dict[str, Any]:
    """Make or revoke a token in the directory of a stopped server, whose lock the caller holds.

    Args:
        directory: of the federation.
        ledger: its ledger.
        op: ``token_new`` or ``token_revoke``.
        fields: ``name``; for a new token ``role``, and ``lasts_s`` if it expires.
        actor: the caller, for the audit log.

    Raises:
        As `token_new` and `token_revoke`.
    """
    told, detail = (_new if op == "token_new" else _revoke)(directory, fields)
    ledger.audit.add(actor, op, detail)
    return told


def _new(directory: Path, fields: dict[str, Any]) -> Change:
    lasts_s = _check_lifetime(fields.get("lasts_s"))
    name, role = fields.get("name"), fields.get("role")
    text, token = make_token(directory, name, role, lasts_s=lasts_s, now=time.time())
    told = {
        "name": token.name,
        "role": token.role.value,
        "token": text,
        "expires_at": token.expires_at,
    }
    return told, f"{token.name}, {token.role.value}"


def _revoke(directory: Path, fields: dict[str, Any]) -> Change:
    token = revoke_token(directory, fields.get("name"))
    return {"name": token.name, "role": token.role.value}, token.name


def _check_lifetime(lasts_s: Any) -> float | None:
    if lasts_s is None:
        return None
    number = isinstance(lasts_s, int | float) and math.isfinite(lasts_s)
    if not number or not MIN_TOKEN_S <= lasts_s <= MAX_TOKEN_S:
        raise UsageError(
            f"a token lasts 1 minute to {MAX_TOKEN_S / 86_400:.0f} days.",
            action="Give another --expires, such as 30d, or none: it does not expire then.",
        )
    return float(lasts_s)
