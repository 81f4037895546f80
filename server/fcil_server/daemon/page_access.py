"""Browsers' access to the dashboard: commands that make links, use them up, and sign out."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from typing import TYPE_CHECKING, Any

from fcil_protocol.errors import UsageError
from fcil_server.federation.addresses import split_address
from fcil_server.federation.page_key import renew_key
from fcil_server.web.http_server import own_names
from fcil_server.web.page.access.links import LIFE_S

if TYPE_CHECKING:
    from fcil_server.daemon.context import ServerContext

MAX_ADDRESS = 45  # characters of an IP address


def page_link(context: ServerContext, actor: str) -> dict[str, Any]:
    """Make a link that admits one browser, once; it goes only to the caller and is not stored.

    Raises:
        UsageError: no page is served.
    """
    _must_serve(context)
    token = context.links.make(time.monotonic())
    context.ledger.audit.add(actor, "page_link")
    # The part after the # is not sent: no log of any server between has it.
    url = f"{context.page.origin(_host(context))}/enter#{token}"
    return {"url": url, "expires": time.time() + LIFE_S}


def page_enter(context: ServerContext, fields: dict[str, Any], actor: str) -> dict[str, Any]:
    """Use up a link: the browser that brought it is admitted.

    Args:
        context: the server.
        fields: ``token``, and ``from``: the browser's address.
        actor: the caller, for the audit log.

    Raises:
        UsageError: no page is served.
        TrustError: the link does not exist, or no longer.
    """
    _must_serve(context)
    address = str(fields.get("from", ""))[:MAX_ADDRESS]
    token = str(fields.get("token", ""))
    context.links.check(token, time.monotonic())
    # Before it is used up: an error of a full disk costs no link.
    context.ledger.audit.add(actor, "page_enter", f"from {address}" if address else "")
    context.links.remove(token)
    return {"ok": True}


async def page_sign_out(context: ServerContext, actor: str) -> dict[str, Any]:
    """End all sessions and void all links.

    Raises:
        DiskFull, StorageError: nothing was changed.
    """
    await asyncio.to_thread(renew_key, context.federation.directory)
    context.links.void()
    context.audit_done(actor, "page_sign_out")
    return {}


def _must_serve(context: ServerContext) -> None:
    if not context.page.served:
        raise UsageError(
            "this server serves no dashboard.", action="Start it with: fcil-server serve --page"
        )


def _host(context: ServerContext) -> str:
    """Return the host name under which a browser reaches the dashboard."""
    section = context.config.federation
    names = own_names(section.page_certificate) - {"localhost"}
    whole = sorted(name for name in names if not name.startswith("*."))
    if whole:
        return whole[0]
    hosts = [split_address(a)[0] for a in (section.page, *context.addresses())]
    return next((host for host in hosts if not _is_any(host)), "localhost")


def _is_any(host: str) -> bool:
    """Return True if an address stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
