"""A model in one ONNX file, as `model_file` writes it: its metadata and its scores.

Torch-free. The file is an ONNX model with the input `INPUT` and the output `OUTPUT`; the metadata
key `KEY` holds an `ExportInfo` as JSON. The last `SEAL_BYTES` of the file are one more metadata
entry, the SHA-256 of all bytes before it, so that damage is detected: ONNX itself has no checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fcil_adapters.backbones.onnx_session import Runtime, open_session
from fcil_adapters.contract import Context, Method, Predictor, Preprocessing, registry
from fcil_adapters.contract.backbone_info import backbone_fields
from fcil_protocol.errors import CorruptFile, DataError
from fcil_protocol.payloads.payload import Payload

FORMAT = 1
KEY = "fcil"
SEAL_KEY = "fcil.sha256"
INPUT = "pixels"  # uint8 (B, S, S, 3), RGB, as `images.decoding.preprocess` returns them
OUTPUT = "logits"  # float32 (B, C)

Precision = Literal["fp32", "fp16", "int8"]

_ACTION = "Give a file that fcil-server export or fcil-client export has made."
_HEX = 64  # characters of a SHA-256
_PIECE = 1 << 20


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class BackboneName(_Model):
    """The backbone inside: its name, and the digest of its weights before any merging."""

    name: str
    digest: str


class Tolerance(_Model):
    """Limits that the file had to meet before it was written.

    Attributes:
        error: largest difference of a score from the torch model's, as a share of the scores'
            spread; None: not limited in this precision.
        agreement: least share of images whose likeliest class is the torch model's.
    """

    error: float | None
    agreement: float


class Checked(_Model):
    """Result of the comparison of the file with the torch model, image by image.

    Attributes:
        images: their number.
        provider: the provider of onnxruntime that computed the file's scores.
        error, agreement: see `Tolerance`.
    """

    images: int
    provider: str
    error: float
    agreement: float


class LearningFacts(_Model):
    """Facts about the learning that led to a model, for its card.

    Attributes:
        clients: number of those whose updates are in it.
        images: they trained on, each counted once for a task and client.
        rounds: with updates.
        accuracy: in percent, over the images of all classes seen; None: this state is not tested.
        tested: number of test images; 0 without an accuracy.
        tester: holder of the test images: ``clients`` or ``server``.
        up_bytes, down_bytes: TCP payload of the run until the state was made.
    """

    clients: int = Field(ge=0)
    images: int = Field(ge=0)
    rounds: int = Field(ge=0)
    accuracy: float | None = Field(default=None, ge=0, le=100)
    tested: int = Field(default=0, ge=0)
    tester: Literal["clients", "server"] = "clients"
    up_bytes: int = Field(ge=0)
    down_bytes: int = Field(ge=0)


class RunExport(_Model):
    """The start of every export's description.

    Attributes:
        federation, run, task, state: origin of the export; the task is the last one in it.
        classes: class ids, in the order of the columns of scores, of the outputs or of the rows.
        names: of the classes; "" where the exporting side did not know one.
    """

    format: int
    method: str
    method_version: str
    federation: str
    run: str
    task: int = Field(ge=0)
    state: int = Field(ge=0)
    classes: tuple[int, ...]
    names: tuple[str, ...]


class ExportInfo(RunExport):
    """Metadata of an exported model.

    Attributes:
        temperature: divisor of the scores before a softmax; None: not measured.
        opset: of ONNX' own operators.
        created: ISO 8601, UTC.
    """

    preprocessing: Preprocessing
    backbone: BackboneName
    precision: Precision
    opset: int
    temperature: float | None = Field(default=None, gt=1e-9)  # smaller values overflow
    tolerance: Tolerance
    checked: Checked
    created: str

    @model_validator(mode="after")
    def _consistent(self) -> ExportInfo:
        if len(self.names) != len(self.classes):
            raise ValueError("there are not as many names as classes")
        if not self.classes:
            raise ValueError("there is no class")
        p = self.preprocessing
        if not 1 <= p.size <= 4096 or not 0.1 <= p.crop_pct <= 1:
            raise ValueError("images of this size are not possible")
        return self


@dataclass(frozen=True)
class Origin:
    """Origin of a model, for the metadata of its file.

    Attributes:
        task: index of the last task in it.
        state: number of the state.
        names: class id -> name, of the known ones.
        temperature: see `ExportInfo`.
        learned: facts for a model card; None: the exporting side does not know them.
    """

    federation: str
    run: str
    task: int
    state: int
    names: Mapping[int, str]
    temperature: float | None = None
    learned: LearningFacts | None = None


def origin_fields(
    method: Method, ctx: Context, classes: Sequence[int], origin: Origin
) -> dict[str, Any]:
    """Return the fields that every export's description has, and only an origin can tell."""
    backbone = ctx.backbone_info
    return {
        "method": method.name,
        "method_version": method.version,
        "federation": origin.federation,
        "run": origin.run,
        "task": origin.task,
        "state": origin.state,
        "classes": classes,
        "names": [origin.names.get(c, "") for c in classes],
        "preprocessing": backbone_fields(backbone)["preprocessing"],
        "backbone": {"name": backbone.name, "digest": backbone.digest},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def composed(method: Method, ctx: Context, parts: Mapping[str, Payload]) -> Predictor:
    """Return the model of a broadcast, to be exported.

    Raises:
        DataError: it has no classes yet.
    """
    predictor: Predictor = registry.load_half(method.model).compose(ctx, parts, ctx.backbone)
    check_classes(predictor.classes)
    return predictor


def check_classes(classes: Sequence[int]) -> None:
    """Refuse to export a model without classes.

    Raises:
        DataError: there are none.
    """
    if not classes:
        raise DataError("the model knows no class yet.", action="Export it after the first round.")


@dataclass(frozen=True)
class ExportedModel:
    """A loaded file.

    Attributes:
        runtime: the provider that computes it, and why a better one does not.
    """

    info: ExportInfo
    runtime: Runtime
    _session: Any

    @classmethod
    def load(cls, path: Path, device: str = "auto", threads: int = 0) -> ExportedModel:
        """Check a file and load it.

        Args:
            path: the ONNX file.
            device: auto, cpu, cuda, cuda:N or tensorrt; see `onnx_session.open_session`.
            threads: of one operator on the CPU; 0: this process's share.

        Raises:
            DataError: the file is missing, not an ONNX model, not exported by fcil, or of a newer
                fcil; or onnxruntime cannot use it.
            CorruptFile: it has changed since it was written.
            ConfigError: onnxruntime is missing, or has no such device.
        """
        digest = read_seal(path)
        session, runtime = open_session(path, device, threads, cache=digest)
        metadata = session.get_modelmeta().custom_metadata_map
        if KEY not in metadata:
            raise DataError(
                f"{path} is an ONNX model, but not one that fcil exported.", action=_ACTION
            )
        info = read_info(metadata[KEY], path)
        if not digest:
            raise _changed(path)
        if not _fits(session, info):
            raise CorruptFile(
                f"the graph in {path} does not match the metadata in the file.",
                action=_ACTION,
            )
        return cls(info, runtime, session)

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Score preprocessed images (B, S, S, 3): (B, C), larger is likelier."""
        if not len(images):  # some operators reject an empty batch
            return np.zeros((0, len(self.info.classes)), np.float32)
        scores: NDArray[np.float32] = self._session.run([OUTPUT], {INPUT: images})[0]
        return scores


def _fits(session: Any, info: ExportInfo) -> bool:
    """Return True if a graph takes the pixels and returns the scores that its metadata declares."""
    size = info.preprocessing.size
    takes = [(i.name, i.type, i.shape[1:]) for i in session.get_inputs()]
    gives = [(o.name, o.type, len(o.shape), o.shape[-1:]) for o in session.get_outputs()]
    return takes == [(INPUT, "tensor(uint8)", [size, size, 3])] and gives == [
        (OUTPUT, "tensor(float)", 2, [len(info.classes)])
    ]


def check_target(target: Path) -> None:
    """Refuse a path to which no model file can be written, before any work.

    Raises:
        DataError: it is something else than a file, such as a device or a link, or its folder is
            missing.
    """
    try:
        free = target.parent.is_dir() and not target.is_symlink()
        free = free and (target.is_file() or not target.exists())
    except OSError:  # too long a name, or one that this user may not see
        free = False
    if not free:
        raise DataError(
            f"{str(target)[:200]} cannot be written: expected a file in a folder that exists.",
            action="Give the path of a file: --onnx model.onnx",
        )


def read_info(text: str, path: Path) -> ExportInfo:
    """Read the metadata of a file.

    Raises:
        DataError: a newer fcil wrote it.
        CorruptFile: it is not an `ExportInfo`.
    """
    try:
        fields = json.loads(text)
        number = fields["format"]
        if number == FORMAT:
            return ExportInfo.model_validate(fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # also pydantic's and JSON's
        reason = (
            "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
            if isinstance(error, ValidationError)
            else repr(error)[:200]
        )
        raise CorruptFile(f"the metadata of {path} cannot be read ({reason}).") from error
    raise DataError(
        f"{path} has format {number!r}, this fcil reads format {FORMAT}.",
        action="Install the version of fcil that exported it, or export the model again.",
    )


# --- the seal -------------------------------------------------------------------------------


def seal(digest: str) -> bytes:
    """Return the end of a file whose bytes before have this SHA-256 (hex).

    It is the field 14 (``metadata_props``) of an ONNX ``ModelProto``: fields of a protobuf
    message may come in any order, so this one is simply appended.
    """
    key, value = SEAL_KEY.encode(), digest.encode()
    entry = b"\x0a" + bytes([len(key)]) + key + b"\x12" + bytes([len(value)]) + value
    return b"\x72" + bytes([len(entry)]) + entry


SEAL_BYTES = len(seal("0" * _HEX))


def with_seal(*pieces: bytes) -> tuple[bytes, ...]:
    """Return the pieces of a file with its seal as the last one."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return (*pieces, seal(sha.hexdigest()))


def read_seal(path: Path) -> str:
    """Return the SHA-256 (hex) that a file ends with, after comparing it; "" if it has none.

    Raises:
        DataError: the file cannot be read.
        CorruptFile: the SHA-256 is not that of its bytes.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - SEAL_BYTES, 0))
            end = file.read()
            file.seek(0)
            if end[:-_HEX] != seal("0" * _HEX)[:-_HEX]:
                return ""
            sha, left = hashlib.sha256(), size - SEAL_BYTES
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                sha.update(piece)
                left -= len(piece)
    except OSError as error:
        raise DataError(
            f"the model file {path} cannot be read: {error.strerror or error}.",
            action=_ACTION,
        ) from error
    if end != seal(sha.hexdigest()):
        raise _changed(path)
    return sha.hexdigest()


def _changed(path: Path) -> CorruptFile:
    return CorruptFile(
        f"the model file {path} has changed since it was written.",
        action="Copy or export it again.",
    )
