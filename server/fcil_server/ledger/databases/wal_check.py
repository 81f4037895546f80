"""Detection of a damaged frame in the ledger's log, which SQLite skips in silence.

SQLite reads its write-ahead log up to the first frame whose checksum is wrong. That is right
for the tail that a kill leaves half written; but if one bit has changed further ahead, commits
that were on the disk, and acknowledged, are passed over too. This finds them, by the form that
https://sqlite.org/fileformat2.html#the_write_ahead_log describes:

- a header of 32 bytes: magic, version, page size, checkpoint number, two salts, two checksums;
- frames: a header of 24 bytes (page number, pages after a commit or 0, the salts, two
  checksums) and a page. Each checksum continues from the one before it.

Frames of an earlier use of the log stay behind the newer ones; they have other salts.
Damage in the last commit cannot be distinguished from the tail of a kill.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_LITTLE, _BIG = 0x377F0682, 0x377F0683  # which byte order the checksums are taken in
_PAGE_BYTES = 4096  # SQLite's default and ours, for a header that cannot be trusted
_MASK = 0xFFFFFFFF

Pair = tuple[int, int]


class _Frame(NamedTuple):
    commit: bool
    salts: Pair
    stored: Pair
    summed: bytes  # what its checksum is taken over


def lost_frames(log: bytes) -> int:
    """Return how many frames after a damaged one SQLite will pass over, up to the last commit.

    0 for a log that is whole, empty, or cut anywhere.
    """
    if len(log) < _HEADER_BYTES + _FRAME_BYTES:
        return 0
    magic, _, page, _ = struct.unpack_from(">4I", log)
    salts: Pair = struct.unpack_from(">2I", log, 16)
    stored: Pair = struct.unpack_from(">2I", log, 24)
    whole = magic in (_LITTLE, _BIG) and stored == _checksum(log[:24], (0, 0), magic == _BIG)
    frames = _frames(log, page if whole else _PAGE_BYTES)
    if whole:
        return _lost(frames, salts, stored, big=magic == _BIG)
    if not frames:
        return 0
    # Without its header the whole log is passed over; its frames still know their salts.
    orders = (magic == _BIG, magic != _BIG)
    return max(_lost(frames, frames[0].salts, None, big=big) for big in orders)


def _frames(log: bytes, page: int) -> list[_Frame]:
    size = _FRAME_BYTES + page
    found = []
    for at in range(_HEADER_BYTES, len(log) - size + 1, size):
        _, pages, *rest = struct.unpack_from(">6I", log, at)
        summed = log[at : at + 8] + log[at + _FRAME_BYTES : at + size]
        found.append(_Frame(pages != 0, (rest[0], rest[1]), (rest[2], rest[3]), summed))
    return found


def _lost(frames: list[_Frame], salts: Pair, before: Pair | None, *, big: bool) -> int:
    """Count the frames behind the first bad one, up to the last whole commit among them.

    ``before`` is what the first checksum goes on from; None if the header is damaged.
    """
    bad = None if before is not None else -1
    last = None
    for number, frame in enumerate(frames):
        # The stored sum of the frame before, right or not, is what this one went on from.
        whole = (
            frame.salts == salts
            and before is not None
            and frame.stored == _checksum(frame.summed, before, big)
        )
        before = frame.stored
        if not whole and bad is None:
            bad = number
        if whole and bad is not None and frame.commit:
            last = number
    return 0 if bad is None or last is None else last - bad


def _checksum(data: bytes, start: Pair, big: bool) -> Pair:
    words = struct.unpack(f"{'>' if big else '<'}{len(data) // 4}I", data)
    one, two = start
    for even, odd in zip(words[::2], words[1::2], strict=True):
        one = (one + even + two) & _MASK
        two = (two + odd + one) & _MASK
    return one, two
