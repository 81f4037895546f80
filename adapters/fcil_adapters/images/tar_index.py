"""An index of the plain files in a tar: names, offsets, sizes; nothing is extracted.

The library's reader follows links and sparse maps, keeps every header in memory, and in the oldest
Pythons that fcil runs on, a crafted header makes it read without end. A shard needs only the
names, offsets and sizes of plain files, in the three dialects that programs write: ustar, GNU, pax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, NamedTuple

BLOCK = 512
MAX_EXTRA_BYTES = 64 << 10  # of a long name or the records of a pax header
_FILES = (b"0", b"\0", b"7")
_NO_BODY = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes


class TarMember(NamedTuple):
    """A plain file in a tar, without its content; offset and size in bytes."""

    name: str
    offset: int
    size: int


class DamagedTar(Exception):
    """Why the rest of a tar cannot be read."""


def members(file: IO[bytes], end: int) -> Iterator[TarMember]:
    """Yield the plain files of a tar, in order.

    Args:
        file: the tar; its position is set before each read.
        end: its size in bytes.

    Raises:
        DamagedTar: the rest cannot be read; the members before are good.
    """
    at = 0
    extra: dict[str, bytes] = {}  # of the next member: its long name, its records
    while header := _header(file, at):
        kind, body = header[156:157], at + BLOCK
        size = _number(header[124:136])
        if "size" in extra and kind in _FILES:
            size = _number(extra["size"], 10)
        if kind in _NO_BODY:
            size = 0
        if body + size > end:
            raise DamagedTar("it ends within a member")
        if kind in (b"x", b"L"):
            if size > MAX_EXTRA_BYTES:
                raise DamagedTar("the name of a member is too long")
            file.seek(body)
            content = file.read(size)
            extra |= _records(content) if kind == b"x" else {"path": content}
        elif kind not in (b"g", b"K"):
            if kind in _FILES and not any(key.startswith("GNU.sparse") for key in extra):
                yield TarMember(_name(header, extra), body, size)
            extra = {}
        at = body + -(-size // BLOCK) * BLOCK


def _header(file: IO[bytes], at: int) -> bytes:
    """Return the header at an offset; empty at the end."""
    file.seek(at)
    header = file.read(BLOCK)
    if not header:
        raise DamagedTar("it ends without the zeros of a tar's end")
    if not header.strip(b"\0"):
        return b""
    if len(header) < BLOCK:
        raise DamagedTar("it ends within a header")
    if sum(header[:148]) + sum(header[156:]) + 8 * 32 != _number(header[148:156]):
        raise DamagedTar("the checksum of a header is wrong")
    return header


def _number(field: bytes, base: int = 8) -> int:
    """Return a number >= 0, of digits or in GNU's binary form of large ones."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0") or b"0"
    if len(text) > 20 or not text.isdigit() or (base == 8 and max(text) > ord("7")):
        raise DamagedTar("a number of a header is wrong")
    return int(text, base)


def _records(content: bytes) -> dict[str, bytes]:
    """Return the records of a pax header: ``LENGTH KEY=VALUE`` and a line end, each."""
    found: dict[str, bytes] = {}
    while content:
        digits, _, _ = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = content[len(digits) + 1 : length].partition(b"=")
        if not equals or length > len(content) or not value.endswith(b"\n"):
            raise DamagedTar("a record of a header is wrong")
        found[key.decode("utf-8", "replace")] = value[:-1]
        content = content[length:]
    return found


def _name(header: bytes, extra: dict[str, bytes]) -> str:
    name = extra.get("path")
    if name is None:
        name = header[:100].split(b"\0")[0]
        if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0")[0]):
            name = prefix + b"/" + name
    # No file has a NUL in its name, and such a name may become that of a copy.
    return name.split(b"\0")[0].decode("utf-8", "surrogateescape")
