"""Lanes: how a relay carries its clients' messages over its one connection to the server.

A lane is one connection of a client to the relay. What travels is the client's own frames,
untouched, behind one more frame that names the lane; a message without other frames ends it::

    relay -> server   "lane" | number 8 | CURVE key of the client 32,  frame, frame, ...
    server -> relay   "lane" | number 8,                               frame, frame, ...

No message begins like that: a body is a msgpack map, and no map begins with the letter l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcil_protocol.errors import WireError
from fcil_protocol.trust.keys import CURVE_BYTES

MARK = b"lane"
_NUMBER_BYTES = 8
_DOWN_BYTES = len(MARK) + _NUMBER_BYTES
_UP_BYTES = _DOWN_BYTES + CURVE_BYTES


@dataclass(frozen=True)
class Laned:
    """What came over a lane; no ``frames``: its end.

    Attributes:
        number: of the lane, given by the relay; a later lane has a higher one.
        key: the client's CURVE key, as the relay says; empty on the way down.
        head: the frame that named the lane.
    """

    number: int
    key: bytes
    frames: tuple[bytes, ...]
    head: bytes


def up(number: int, key: bytes, frames: Sequence[bytes] = ()) -> list[bytes]:
    """Return what a relay sends for a client; without frames, that the client is gone."""
    return [MARK + number.to_bytes(_NUMBER_BYTES, "big") + key, *frames]


def down(number: int, frames: Sequence[bytes] = ()) -> list[bytes]:
    """Return what the server sends to a client behind a relay; without frames: cut it."""
    return [MARK + number.to_bytes(_NUMBER_BYTES, "big"), *frames]


def is_laned(frames: Sequence[bytes]) -> bool:
    """Say whether a message belongs to a lane, and not to the connection itself."""
    return bool(frames) and frames[0].startswith(MARK)


def read_up(frames: Sequence[bytes]) -> Laned:
    """Read what a relay sent.

    Raises:
        WireError: the head has another length.
    """
    return _read(frames, _UP_BYTES)


def read_down(frames: Sequence[bytes]) -> Laned:
    """Read what the server sent to a relay; raises like `read_up`."""
    return _read(frames, _DOWN_BYTES)


def _read(frames: Sequence[bytes], size: int) -> Laned:
    head = frames[0]
    if len(head) != size:
        raise WireError(f"the head of a lane has {size} bytes, got {len(head)}.")
    number = int.from_bytes(head[len(MARK) : _DOWN_BYTES], "big")
    return Laned(number, head[_DOWN_BYTES:], tuple(frames[1:]), head)
