"""Lanes: a relay's form of its clients' messages on its one connection to the server.

A lane is one connection of a client to the relay. The relay sends the client's own frames,
unchanged, after one more frame that names the lane; a message without other frames ends it::

    relay -> server   "lane" | number 8 | CURVE key of the client 32,  frame, frame, ...
    server -> relay   "lane" | number 8,                               frame, frame, ...

No other message begins with this mark: a body is a msgpack map, and no map begins with the letter
l. A relay may itself be the client of another one: its messages then have one such frame for each
relay on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcil_protocol.errors import WireError
from fcil_protocol.trust.keys import CURVE_BYTES

MARK = b"lane"
MOST_RELAYS = 3  # one behind the other, between a client and the server
_NUMBER_BYTES = 8
_DOWN_BYTES = len(MARK) + _NUMBER_BYTES
_UP_BYTES = _DOWN_BYTES + CURVE_BYTES


@dataclass(frozen=True)
class Laned:
    """A message of a lane; no ``frames``: the lane's end.

    Attributes:
        number: lane number, given by the relay; a later lane has a higher one.
        key: the client's CURVE key, as reported by the relay; empty from server to relay.
        head: the frame that named the lane.
    """

    number: int
    key: bytes
    frames: tuple[bytes, ...]
    head: bytes


def up(number: int, key: bytes, frames: Sequence[bytes] = ()) -> list[bytes]:
    """Return a relay's message for a client; without frames, the client is gone."""
    return [MARK + number.to_bytes(_NUMBER_BYTES, "big") + key, *frames]


def down(number: int, frames: Sequence[bytes] = ()) -> list[bytes]:
    """Return the server's message to a client behind a relay; without frames, cut the lane."""
    return [MARK + number.to_bytes(_NUMBER_BYTES, "big"), *frames]


def is_laned(frames: Sequence[bytes]) -> bool:
    """Return True if a message belongs to a lane, and not to the connection itself."""
    return bool(frames) and frames[0].startswith(MARK)


def innermost(frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return the frames of a client's own message, however many relays carry it."""
    heads = next((n for n, f in enumerate(frames) if not f.startswith(MARK)), len(frames))
    return frames[heads:]


def read_up(frames: Sequence[bytes]) -> Laned:
    """Read a lane's message from a relay.

    Raises:
        WireError: the head has another length.
    """
    return _read(frames, _UP_BYTES)


def read_down(frames: Sequence[bytes]) -> Laned:
    """Read a lane's message from the server; raises like `read_up`."""
    return _read(frames, _DOWN_BYTES)


def _read(frames: Sequence[bytes], size: int) -> Laned:
    head = frames[0]
    if len(head) != size:
        raise WireError(f"the head of a lane has {size} bytes, got {len(head)}.")
    number = int.from_bytes(head[len(MARK) : _DOWN_BYTES], "big")
    return Laned(number, head[_DOWN_BYTES:], tuple(frames[1:]), head)
