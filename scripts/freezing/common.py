"""Who takes part in the frozen vectors, and the folder that they go to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fcil_protocol.ids import RunId, named_client_id
from fcil_protocol.payloads.payload import WIRE_DTYPES, Payload, dtype_name
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys

NOW = 1_767_322_800  # of every clock: 2 January 2026
RUN = RunId("r20260102-030405-abcd")
CLIENT = named_client_id("test vectors")
SCHEMA = hashlib.sha256(b"a schema").hexdigest()
PASSPHRASE = "test vectors, never a secret"


def secret(name: str) -> bytes:
    """Return a private key that everybody knows."""
    return hashlib.sha256(f"fcil test vectors, never use: {name}".encode()).digest()


def keys_of(who: str) -> PrivateKeys:
    kinds = ("curve", "signing", "sealing")
    return PrivateKeys(**{kind: secret(f"{who} {kind}") for kind in kinds})


ROOT, SERVER, CLIENT_KEYS = RootKey(secret("root")), keys_of("server"), keys_of("client")
NEXT, RELAY = keys_of("client, next"), keys_of("relay")


def shown(value: Any) -> Any:
    """Return a value as JSON has it: bytes as {"hex": ...}, long ones by size and SHA-256."""
    if isinstance(value, bytes):
        digest = {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
        return {"hex": value.hex()} if len(value) <= 64 else digest
    if isinstance(value, Mapping):
        return {key: shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    return value


class Folder:
    """Where vectors go; what exists is left as it is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.written: list[str] = []

    def has(self, name: str) -> bool:
        """Say whether it is frozen already."""
        return (self.directory / f"{name}.json").exists()

    def add(self, name: str, content: Mapping[str, Any], **files: bytes) -> None:
        """Freeze a vector: its files, and in NAME.json what they hold."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for suffix, data in files.items():
            with (self.directory / f"{name}.{suffix}").open("xb") as file:
                file.write(data)
        text = json.dumps(shown(content), indent=1, ensure_ascii=False) + "\n"
        with (self.directory / f"{name}.json").open("x", encoding="utf-8") as file:
            file.write(text)
        self.written.append(name)


def line(dtype: str, *shape: int, first: int = 0, step: float = 1) -> dict[str, Any]:
    """Describe a tensor whose numbers, in order, are first, first + step, ..."""
    return {"dtype": dtype, "shape": list(shape), "first": first, "step": step}


def payload_of(tensors: Mapping[str, dict[str, Any]], meta: Mapping[str, Any]) -> Payload:
    made = {}
    for name, t in tensors.items():
        numbers = t["first"] + t["step"] * np.arange(int(np.prod(t["shape"])))
        made[name] = numbers.astype(WIRE_DTYPES[t["dtype"]]).reshape(t["shape"])
        assert dtype_name(name, made[name]) == t["dtype"]
    return Payload(made, dict(meta))


STATE = {
    "tensors": {"w": line("F32", 3, 4, step=0.25), "count": line("I64", 2, first=5)},
    "meta": {"step": 1},
}
