"""An enrolled relay that floods the server with lanes of keys that nobody knows, and reads nothing."""

import asyncio
import os

import fcil_protocol
from attack_kit.pouring import Hose
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.link.zmq_link import Dealer
from fcil_protocol.messages import relay_frames
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Uplink
from fcil_protocol.messages.signed_session import Channel

WAIT_S = 60.0


async def lane_flood(
    address, keys, relay, server, federation, *, most_bytes=3_000_000, most_s=60.0, reads=False
):
    """Open lanes for keys that are not enrolled behind the relay; returns a `Poured`.

    Args:
        address: HOST:PORT of the server.
        keys, relay: the relay's private keys and id.
        server: the server's public keys.
        federation: its id.
        most_bytes, most_s: where it ends.
        reads: whether the relay reads what it is answered.
    """
    channel = Channel(keys, server)
    host, _, port = address.rpartition(":")
    # libzmq aborts the process where a heartbeat is due on a connection that was reset while
    # messages of it lay unread ("Assertion failed: !_io_error"): here none is due.
    link = Dealer(
        curve_secret=keys.curve_secret,
        curve_public=keys.public.curve,
        server_key=server.curve,
        heartbeat_s=600.0,
    )
    link.connect(host, int(port))
    while await asyncio.wait_for(link.recv(), WAIT_S) != LinkNews("up"):
        pass
    versions = {
        "protocol": fcil_protocol.PROTOCOL_VERSION,
        "oldest": fcil_protocol.OLDEST_PROTOCOL_VERSION,
    }
    uplink = Uplink(
        nonce=channel.nonce, package="0", federation=federation, relay=relay,
        address="127.0.0.1:1", **versions,
    )  # fmt: skip
    link.send(channel.frames(uplink))
    answer = parse(await asyncio.wait_for(link.recv(), WAIT_S)).message
    assert answer.type == "admit", answer
    hose = Hose(link, most_bytes=most_bytes, most_s=most_s, reads=reads)
    number = 0
    while hose.goes_on:
        number += 1
        await hose.send(relay_frames.up(number, os.urandom(32), [b"x"]))
    return await hose.close()
