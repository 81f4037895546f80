"""How browsers get to see the page: the commands that make links, burn them, and sign out."""

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
    """Make a link that lets one browser in, once; it goes to whoever asked and is kept nowhere.

    Raises:
        UsageError: no page is served.
    """
    _must_serve(context)
    token = context.links.make(time.monotonic())
    context.ledger.add_audit(actor, "page_link")
    # What stands behind the # is not sent: no log of any server between has it.
    url = f"{context.page.origin(_host(context))}/enter#{token}"
    return {"url": url, "expires": time.time() + LIFE_S}


def page_enter(context: ServerContext, fields: dict[str, Any], actor: str) -> dict[str, Any]:
    """Burn a link: the browser that brought it is let in.

    Args:
        context: the server.
        fields: ``token``, and ``from``: the browser's address.
        actor: who asks, for the audit log.

    Raises:
        UsageError: no page is served.
        TrustError: there is no such link, any more.
    """
    _must_serve(context)
    address = str(fields.get("from", ""))[:MAX_ADDRESS]
    token = str(fields.get("token", ""))
    context.links.check(token, time.monotonic())
    # Before it is burnt: what a full disk refuses costs no link.
    context.ledger.add_audit(actor, "page_enter", f"from {address}" if address else "")
    context.links.burn(token)
    return {"ok": True}


async def page_sign_out(context: ServerContext, actor: str) -> dict[str, Any]:
    """End all sessions and void all links.

    Raises:
        DiskFull, StorageError: nothing was changed.
    """
    await asyncio.to_thread(renew_key, context.federation.directory)
    context.links.void()
    context.ledger.add_audit(actor, "page_sign_out")
    return {}


def _must_serve(context: ServerContext) -> None:
    if not context.page.served:
        raise UsageError(
            "this server serves no page.", action="Start it with: fcil-server serve --page"
        )


def _host(context: ServerContext) -> str:
    """Return by what name a browser gets to the page."""
    section = context.config.federation
    names = own_names(section.page_certificate) - {"localhost"}
    whole = sorted(name for name in names if not name.startswith("*."))
    if whole:
        return whole[0]
    hosts = [split_address(a)[0] for a in (section.page, *context.addresses())]
    return next((host for host in hosts if not _is_any(host)), "localhost")


def _is_any(host: str) -> bool:
    """Say whether an address stands for all that a machine has."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
