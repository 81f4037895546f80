"""Start of a connection to a server or relay, and the messages for its failures."""

from __future__ import annotations

from collections.abc import Callable

from fcil_protocol.errors import UnknownClient
from fcil_protocol.link.interface import COME_AGAIN, ClientLink
from fcil_protocol.link.zmq_link import Dealer, Links
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

ADDRESS_S = 1.0  # at an address that does not answer, before the next one is tried

# Message to a member at the terminal for each reason of a refused link.
REFUSALS = {
    "unknown_client": f"the server does not admit this client's key. "
    f"{UnknownClient.default_action()}",
    "wrong_server_key": "the handshake failed: the server's key is not the one from the "
    "enrolment (another server, or its keys were replaced: compare fingerprints, then enrol "
    "again), or the link needed more than 30 s for it.",
    COME_AGAIN: "the server knows this key, but not as that of a current member; within a minute "
    "it says why.",
    "not_fcil": "the program at this address is not an fcil server. Check the address.",
}


def flooded(address: str) -> str:
    """Return the message to a member at the terminal for a link that was cut for a flood."""
    return (
        f"{address} sent more than was asked for, and the connection was cut before it could fill "
        "the memory; trying again. Ask the operator of the server or relay at this address."
    )


Dial = Callable[[str, PrivateKeys, PublicKeys], ClientLink]


def dial(
    address: str, keys: PrivateKeys, peer: PublicKeys, links: Links | None = None
) -> ClientLink:
    """Start connecting to HOST:PORT, where the holder of ``peer.curve`` must answer.

    ``links`` holds the resources shared by many links of one process.
    """
    host, _, port = address.rpartition(":")
    link = Dealer(
        curve_secret=keys.curve_secret,
        curve_public=keys.public.curve,
        server_key=peer.curve,
        links=links,
    )
    link.connect(host.strip("[]"), int(port))
    return link
