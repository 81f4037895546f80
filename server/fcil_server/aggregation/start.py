"""The LoRA of an adapter that a run begins with: read once, kept next to the run's states.

The file in the run's directory has what the server read; its digest is among the run's facts. So an
opening that is computed again gives the same bytes, wherever the adapter is then. Clients get the
LoRA with the first broadcast, as any first values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fcil_adapters.contract import BackboneInfo, Hparams, Method, State
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.export.adapter_start import read_start
from fcil_protocol.errors import ConfigError, CorruptFile
from fcil_protocol.payloads.payload import Array, Payload, pack, unpack
from fcil_protocol.storage.atomic_files import make_private, storage_errors, write_atomic

NAME = "start.safetensors"
FACT = "start"  # of the run's environment

_LORA = "lora."
_BASES = {
    "digest": "its base has the digest of the run's backbone",
    "name": "its base has the name of the run's backbone; its weights are not stated",
    "nothing": "it does not say what its base is",
}


@dataclass(frozen=True)
class NewStart:
    """An adapter, read for a run that begins.

    Attributes:
        data: the content of the file.
        facts: for the run's environment: folder, digest, places, `AdapterStart.checked`, and a
            sentence with all that.
    """

    data: bytes
    facts: dict[str, Any]

    def text(self) -> str:
        """Return a sentence for the operator."""
        return str(self.facts["text"])

    def write(self, directory: Path) -> None:
        """Write the file into the directory of the new run.

        Raises:
            DiskFull, StorageError: it cannot be written.
        """
        with storage_errors("create the run directory", directory):
            make_private(directory)
        write_atomic(directory / NAME, self.data)


def _text(facts: Mapping[str, Any]) -> str:
    head = "; its head is not used, since the run has classes of its own" if facts["head"] else ""
    return (
        f"the LoRA begins as that of {facts['adapter']} (digest {facts['digest'][:12]}, "
        f"{len(facts['places'])} of {facts['of']} places): {_BASES[facts['base']]}{head}"
    )


def check_can_begin(method: Method, hparams: Hparams) -> None:
    """Check that runs of a method can begin with an adapter.

    Raises:
        ConfigError: they cannot.
    """
    why_not = method.starts(hparams)
    if why_not:
        raise ConfigError(
            f"{method.name} cannot begin with an adapter: {why_not}.",
            action="Set run.init_from to '', or choose a method whose tasks share one LoRA, such "
            "as fedavg_lora.",
        )


def read_new(folder: str, method: Method, hparams: Hparams, info: BackboneInfo) -> NewStart:
    """Read an adapter for a new run.

    Raises:
        ConfigError: the method cannot begin with one.
        DataError: the adapter cannot be read, or does not fit.
    """
    check_can_begin(method, hparams)
    names = {
        spec.name
        for schema in method.broadcast(hparams, info).values()
        for spec in schema.tensors
        if spec.name.startswith(_LORA)
    }
    places = {name.removeprefix(_LORA).rpartition(".")[0] for name in names}
    options: Any = hparams
    found = read_start(Path(folder), places, rank=options.rank, scale=options.scale, info=info)
    data = pack(Payload(dict(found.tensors)))
    own = sorted({n.removeprefix(_LORA).rpartition(".")[0] for n in found.tensors})
    facts = {
        "adapter": str(Path(folder).absolute()),
        "digest": hashlib.sha256(data).hexdigest(),
        "places": own,
        "of": len(places),
        "base": found.checked,
        "head": "head" in found.ignored,
    }
    return NewStart(data, {**facts, "text": _text(facts)})


@dataclass(frozen=True)
class RunStart:
    """The start of a run.

    Attributes:
        path: the file.
        digest: SHA-256 of its content (hex).
    """

    path: Path
    digest: str

    @classmethod
    def of(cls, directory: Path, environment: Mapping[str, Any]) -> RunStart | None:
        """Return the start that a run's facts name; None: it began as drawn."""
        facts = environment.get(FACT)
        return cls(directory / NAME, str(facts["digest"])) if facts else None

    def into(self, opened: State, forms: Forms) -> State:
        """Return the state of the first opening with the adapter's LoRA.

        Ranks that the adapter lacks begin as drawn, with B = 0: the product is the adapter's.

        Args:
            opened: with the drawn LoRA.
            forms: the forms in which tensors travel.

        Raises:
            CorruptFile: the file is missing, or not the one that the run began with.
            StorageError: it cannot be read.
        """
        tensors: dict[str, Array] = dict(opened.tensors)
        for name, values in self.load().tensors.items():
            full = np.array(opened.f32(name))
            if name.endswith(".A"):
                full[: len(values)] = values
            else:
                full[:] = 0
                full[:, : values.shape[1]] = values
            tensors |= forms.commit_named({name: full})
        return State(tensors, opened.meta)

    def load(self) -> Payload:
        """Return the LoRA of the file.

        Raises:
            CorruptFile: it is missing, or not the one that the run began with.
            StorageError: it cannot be read.
        """
        if not self.path.exists():
            raise CorruptFile(f"{self.path}, the adapter that the run began with, is missing.")
        with storage_errors("read", self.path):
            data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise CorruptFile(f"{self.path} is not the adapter that the run began with.")
        return unpack(data)
