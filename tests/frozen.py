"""The frozen vectors of `tests/vectors`: bytes as earlier versions wrote them, and what they hold."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcil_protocol.errors import FcilError
from fcil_protocol.payloads.payload import WIRE_DTYPES, Payload
from fcil_protocol.trust.keys import PrivateKeys

ROOT = Path(__file__).parent / "vectors"
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir())


class Vectors:
    """The vectors of one protocol version."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self._scratch = scratch

    def content(self, name: str) -> dict[str, Any]:
        """Return what a vector is stated to hold."""
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def data(self, file: str) -> bytes:
        """Return a vector's bytes; those of a .gz file unpacked."""
        data = (self.folder / file).read_bytes()
        return gzip.decompress(data) if file.endswith(".gz") else data

    def placed(self, file: str, name: str) -> Path:
        """Return a private copy of a vector under another name, as programs find it."""
        path = self._scratch / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(self.data(file))
        path.chmod(0o600)
        return path

    def keys(self, who: str) -> PrivateKeys:
        """Return somebody's private keys, which everybody knows."""
        return PrivateKeys.load(self.placed(f"test-only-keys.{who}", f"{who}.keys"))


def payload_of(said: dict[str, Any]) -> Payload:
    """Return the payload that is described."""
    tensors = {}
    for name, t in said["tensors"].items():
        numbers = t["first"] + t["step"] * np.arange(int(np.prod(t["shape"])))
        tensors[name] = numbers.astype(WIRE_DTYPES[t["dtype"]]).reshape(t["shape"])
    return Payload(tensors, said["meta"])


def same(a: Payload, b: Payload) -> bool:
    """Say whether two payloads hold the same, to the bit."""
    arrays = [
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in ((a.tensors[n], b.tensors.get(n, np.empty(0))) for n in a.tensors)
    ]
    return all(arrays) and a.tensors.keys() == b.tensors.keys() and a.meta == b.meta


def shown(value: Any) -> Any:
    """Return a value as the vectors state it: bytes as {"hex": ...} or by size and SHA-256."""
    if isinstance(value, bytes):
        digest = {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
        return {"hex": value.hex()} if len(value) <= 64 else digest
    if isinstance(value, dict):
        return {key: shown(one) for key, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list | tuple) else value


def frames_of(message: dict[str, Any]) -> list[bytes]:
    """Return the frames of a stated message."""
    return [base64.b64decode(frame) for frame in message["frames"]]


def flipped(data: bytes, count: int = 40) -> Iterator[bytes]:
    """Yield copies with one bit flipped each, evenly spread, the first and last byte's too."""
    last = len(data) - 1
    for i in range(count):
        spoilt = bytearray(data)
        spoilt[last * i // (count - 1)] ^= 1 << i % 8
        yield bytes(spoilt)


def refused_when_flipped(data: bytes, read: Callable[[bytes], object], count: int = 40) -> None:
    """Every flipped bit of these bytes ends in a named error."""
    for spoilt in flipped(data, count):
        with pytest.raises(FcilError):
            read(spoilt)
