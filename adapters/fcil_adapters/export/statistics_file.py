"""Class statistics of a run as one safetensors file: means, prototypes, Gaussians (torch-free).

docs/export.md has the schema. A file holds one row for each class, over all clients together, and
no client's name. The row of a class that one client alone holds is that client's own statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fcil_adapters.contract import Context, Method, Preprocessing, State
from fcil_adapters.export.exported_model import (
    BackboneName,
    Origin,
    RunExport,
    check_classes,
    origin_fields,
)
from fcil_adapters.toolkit.closed_form.sums import ProductSums
from fcil_adapters.toolkit.gaussians.gaussian import Gaussian, stored_gaussians
from fcil_protocol.errors import CorruptFile, DataError, InternalError
from fcil_protocol.payloads.payload import Array, Payload
from fcil_protocol.payloads.schema import Kind, PayloadSchema
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

F64 = NDArray[np.float64]

FORMAT = 1
KEY = "fcil"  # of the metadata
_SUMS = "total"  # prefix of `ProductSums` in a state
_STORED = ("count", "mean", "rest", "rows", "factor")  # of `gaussian.store_gaussians`

Source = Literal["means", "prototypes", "gaussians", "sums"]
Form = Literal["full", "lowrank", "diag", "none"]


class StatisticsInfo(RunExport):
    """Description of a file of statistics, JSON in its metadata.

    Attributes:
        source: what the run has: class ``means``, trained ``prototypes``, ``gaussians`` or
            ``sums`` of features.
        covariance: form of the covariances that clients sent; ``none``: there are none.
        features: space of the rows: ``frozen`` features of the backbone, ``learned`` ones, of the
            backbone as the run has changed it, or ``pixels``.
        unit: True if each feature was divided by its length before it was added.
        dim: length of a row.
        sha256: SHA-256 of the tensors: of all bytes after the header (hex).
        created: ISO 8601, UTC.
    """

    format: int = FORMAT
    source: Source
    covariance: Form
    features: Literal["frozen", "learned", "pixels"]
    unit: bool
    dim: int
    sha256: str
    preprocessing: Preprocessing
    backbone: BackboneName
    created: str


@dataclass(frozen=True)
class Statistics:
    """Statistics by class.

    Attributes:
        tensors: as in a file: ``classes``, ``mean``, perhaps ``count``, and of Gaussians ``rest``,
            ``rows`` and ``factor``.
    """

    source: Source
    covariance: Form
    tensors: Mapping[str, Array]


def export_statistics(
    method: Method,
    ctx: Context,
    state: State | None,
    parts: Mapping[str, Payload],
    origin: Origin,
    target: Path,
) -> StatisticsInfo:
    """Write the statistics of a state, or of its broadcast, as one file; all of it or nothing.

    Args:
        method: the method of the run.
        ctx: needs no backbone, only its description.
        state: the server's; None: a client, which has the broadcast alone.
        parts: the broadcast, in float32.
        origin: goes into the metadata.
        target: the file (`check_target`); an existing one is replaced.

    Raises:
        DataError: the method has none, or no class has any yet.
        DiskFull, StorageError: it cannot be written.
    """
    found = find_statistics(method, ctx, state, parts)
    classes = tuple(int(c) for c in found.tensors["classes"])
    check_classes(classes)
    info = StatisticsInfo.model_validate(
        {
            **origin_fields(method, ctx, classes, origin),
            "source": found.source,
            "covariance": found.covariance,
            "features": _features(method),
            "unit": found.source == "sums",
            "dim": found.tensors["mean"].shape[1],
            "sha256": _digest(safetensors.numpy.save(dict(found.tensors))),
        }
    )
    text = json.dumps(info.model_dump(mode="json"), ensure_ascii=False)
    content = safetensors.numpy.save(dict(found.tensors), {KEY: text})
    if (fault := _difference(content, info, found)) != "":
        raise InternalError(f"the file as it is read differs in {fault}. It was not written.")
    write_atomic(target, content, mode=0o644)
    return info


def read_statistics(path: Path) -> tuple[StatisticsInfo, dict[str, Array]]:
    """Read a file of statistics: its description and its tensors.

    Raises:
        CorruptFile: it is none, or has changed.
        DataError: a newer fcil wrote it.
        StorageError: it cannot be read.
    """
    with storage_errors("read", path):
        content = path.read_bytes()
    return _parse(content, path)


def find_statistics(
    method: Method, ctx: Context, state: State | None, parts: Mapping[str, Payload]
) -> Statistics:
    """Return what a run knows of each class.

    Args:
        method: of the run; its schemas say which tensors of a broadcast are prototypes.
        ctx: options and backbone of the run.
        state: the server's, which has more than a broadcast; None on a client.
        parts: the broadcast.

    Raises:
        DataError: the method has no statistics of classes, or not in a broadcast.
    """
    if state is not None and (tasks := _tasks_with_gaussians(state)):
        return _gaussians(state, tasks, getattr(ctx.hparams, "cov", "lowrank"))
    if state is not None and f"{_SUMS}.sum" in state.tensors:
        sums = ProductSums.read(state.tensors, _SUMS)
        if getattr(ctx.hparams, "features", "linear") != "relu_projection":
            return _sums(sums, ctx.backbone_info.dim)
    schemas = method.broadcast(ctx.hparams, ctx.backbone_info)
    rows = list(_rows(schemas, parts))
    if not rows:
        where = "has" if state is not None else "sends its clients"
        raise DataError(
            f"{method.name} {where} no means, prototypes or Gaussians of classes.",
            action="Export the whole model: --onnx model.onnx"
            if state is not None
            else "They may be on the server: fcil-server export --statistics FILE",
        )
    names = {name for name, _ in rows}
    merged = {
        key: np.concatenate([tensors[key] for _, tensors in rows])
        for key in ("classes", "mean", "count")
        if all(key in tensors for _, tensors in rows)
    }
    return Statistics("prototypes" if names == {"proto"} else "means", "none", merged)


def _rows(
    schemas: Mapping[str, PayloadSchema], parts: Mapping[str, Payload]
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield a part's prototypes with their classes, of those that any client had.

    They are the tensor of the kind ``prototype`` with as many rows as the part's ``classes``.
    """
    for part_name in sorted(parts, key=_place):
        part, schema = parts[part_name], schemas.get(part_name.partition("/")[0])
        specs = {spec.name: spec for spec in schema.tensors} if schema else {}
        if "classes" not in specs or "classes" not in part.tensors:
            continue
        for name, spec in specs.items():
            fits = spec.kind is Kind.PROTOTYPE and spec.shape[0] == specs["classes"].shape[0]
            if not fits or name not in part.tensors:
                continue
            classes = part.i64("classes")
            known = np.ones(len(classes), dtype=bool)
            for flag in ("seen", "count"):
                if flag in part.tensors:
                    known &= part.i64(flag) > 0
            found: dict[str, Array] = {"classes": classes[known], "mean": part.f32(name)[known]}
            if "count" in part.tensors:
                found["count"] = part.i64("count")[known].astype(np.float64)
            yield name, found


def _place(part: str) -> tuple[bool, int]:
    """Sort ``task/0``, ``task/1``, ..., and then those without a number."""
    number = part.partition("/")[2]
    return (not number.isdigit(), int(number) if number.isdigit() else 0)


def _sums(sums: ProductSums, d: int) -> Statistics:
    """Return the mean features of length 1: the first d columns of the summed features."""
    known = sums.counts > 0
    counts = sums.counts[known]
    mean = sums.sums[known][:, :d] / counts[:, None]
    return Statistics(
        "sums",
        "none",
        {"classes": sums.classes[known], "mean": mean.astype(np.float32), "count": counts},
    )


# --- Gaussians ------------------------------------------------------------------------------


def _tasks_with_gaussians(state: State) -> list[int]:
    places = (name.split(".") for name in state.tensors)
    return sorted(int(p[1]) for p in places if len(p) == 3 and (p[0], p[2]) == ("gauss", "mean"))


def _gaussians(state: State, tasks: Sequence[int], form: Form) -> Statistics:
    """Return one Gaussian for each described class: that of all clients' images together."""
    by_class: dict[int, list[Gaussian]] = {}
    for t in tasks:
        own = {name: state.tensors[f"gauss.{t}.{name}"] for name in _STORED}
        labels = state.i64(f"gauss.{t}.label").tolist()
        for label, gaussian in zip(labels, stored_gaussians(own), strict=True):
            by_class.setdefault(label, []).append(gaussian)
    pooled = [pool(many, diagonal=form == "diag") for many in by_class.values()]
    d = next((state.tensors[f"gauss.{t}.mean"].shape[1] for t in tasks), 0)
    none = np.zeros((0, d))
    tensors: dict[str, Array] = {
        "classes": np.array(list(by_class), dtype=np.int64),
        "mean": np.stack([g.mean for g in pooled] or [np.zeros(d)])[: len(pooled)],
        "count": np.array([g.count for g in pooled], dtype=np.float64),
        "rest": np.stack([g.rest for g in pooled] or [np.zeros(d)])[: len(pooled)],
        "rows": np.array([len(g.factor) for g in pooled], dtype=np.int64),
        "factor": np.concatenate([none, *(g.factor for g in pooled)]),
    }
    exact = ("classes", "count", "rows")
    return Statistics(
        "gaussians",
        form,
        {n: a if n in exact else a.astype(np.float32) for n, a in tensors.items()},
    )


def pool(many: Sequence[Gaussian], *, diagonal: bool) -> Gaussian:
    """Return the Gaussian of all images behind several: their mean and unbiased covariance.

    ``(sum_k (n_k - 1) S_k + n_k (m_k - m)(m_k - m)^T) / (N - 1)``: exact if every S_k is.

    Args:
        many: of one class, of different images.
        diagonal: keep the diagonal alone, as the S_k have no more.
    """
    counts = np.array([g.count for g in many], dtype=np.float64)
    total = float(counts.sum())
    means = np.stack([g.mean for g in many]).astype(np.float64)  # (K, d)
    mean: F64 = counts @ means / total
    freedom = max(total - 1, 1.0)
    apart = np.sqrt(counts / freedom)[:, None] * (means - mean)  # (K, d)
    own = np.maximum(counts - 1, 0) / freedom  # (K,)
    rest = own @ np.stack([g.rest for g in many]).astype(np.float64)
    if diagonal:
        return Gaussian(int(total), mean, np.zeros((0, len(mean))), rest + np.square(apart).sum(0))
    scaled = [w**0.5 * g.factor.astype(np.float64) for w, g in zip(own, many, strict=True)]
    if len(many) == 1:
        return Gaussian(int(total), mean, scaled[0], rest)
    return Gaussian(int(total), mean, _mixed(np.concatenate([*scaled, apart])), rest)


def _mixed(factor: F64) -> F64:
    """Return the factor with the same product that this product alone determines.

    Its rows are the principal axes of ``F^T F``, each times its standard deviation, so no row is a
    client's; those without any effect are left out.
    """
    if len(factor) > factor.shape[1]:  # a smaller one, whose axes are found sooner
        factor = np.asarray(np.linalg.qr(factor, mode="r"))
    _, sizes, axes = np.linalg.svd(factor, full_matrices=False)
    known = sizes > sizes.max(initial=0.0) * max(factor.shape) * np.finfo(np.float64).eps
    mixed: F64 = sizes[known, None] * axes[known]
    return mixed


# --- reading --------------------------------------------------------------------------------


def _features(method: Method) -> str:
    if not method.needs_backbone:
        return "pixels"
    return "frozen" if method.frozen and not method.changes else "learned"


def _parse(content: bytes, path: Path) -> tuple[StatisticsInfo, dict[str, Array]]:
    try:
        fields = json.loads(json.loads(content[8 : _begin(content)])["__metadata__"][KEY])
        number = fields["format"]
        tensors: dict[str, Array] = safetensors.numpy.load(content)
        if number == FORMAT:
            info = StatisticsInfo.model_validate(fields)
            if len(tensors["mean"]) != len(info.classes):
                raise ValueError("there are not as many rows as classes")
            if info.sha256 != _digest(content):
                raise ValueError("its SHA-256 does not match")
            return info, tensors
    except (
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        safetensors.SafetensorError,
    ) as error:
        raise CorruptFile(
            f"{path} is no file of statistics, or has changed since it was written "
            f"({' '.join(str(error).split())[:120]}).",
            action="Export it again: fcil-server export --statistics FILE",
        ) from error
    raise DataError(
        f"{path} has format {number!r}, this fcil reads format {FORMAT}.",
        action="Install the version of fcil that exported it, or export it again.",
    )


def _begin(content: bytes) -> int:
    """Return where the tensors begin: after the length of the header, and the header."""
    return 8 + int.from_bytes(content[:8], "little")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content[_begin(content) :]).hexdigest()


def _difference(content: bytes, info: StatisticsInfo, found: Statistics) -> str:
    """Return how a file as it is read differs from the statistics; empty: not at all."""
    read, tensors = _parse(content, Path("the file"))
    if read != info:
        return "its metadata"
    if tensors.keys() != found.tensors.keys():
        return "its names"
    faults: list[Any] = [
        name for name, array in found.tensors.items() if not np.array_equal(tensors[name], array)
    ]
    return ", ".join(faults)
