"""Former members that knock at the gate without end, to keep newcomers out."""

import asyncio
import time
from collections import Counter

from fcil_protocol.link.interface import LinkNews
from fcil_protocol.link.zmq_link import Dealer


async def knocking(address, keys, server_key, *, every_s=0.1, most_s=60.0, until=None):
    """Connect with each of these keys again and again; returns what the gate said, counted.

    Args:
        address: HOST:PORT of the server.
        keys: private keys of former members, or of tickets.
        server_key: the server's 32-byte CURVE key.
        every_s: pause between two handshakes of one key.
        most_s: when to end.
        until: an `asyncio.Event` that ends it earlier.
    """
    said = Counter()
    ends = time.monotonic() + most_s
    until = until or asyncio.Event()
    await asyncio.gather(
        *(_knock(address, k, server_key, every_s, ends, until, said) for k in keys)
    )
    return said


async def _knock(address, keys, server_key, every_s, ends, until, said):
    host, _, port = address.rpartition(":")
    while time.monotonic() < ends and not until.is_set():
        link = Dealer(
            curve_secret=keys.curve_secret,
            curve_public=keys.public.curve,
            server_key=server_key,
            retry_s=3600.0,
        )
        try:
            link.connect(host, int(port))
            news = await asyncio.wait_for(link.recv(), 5.0)
            said[news.reason or news.state if isinstance(news, LinkNews) else "message"] += 1
        except TimeoutError:
            said["silence"] += 1
        finally:
            link.close()
        await asyncio.sleep(every_s)
