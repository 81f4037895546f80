"""The frozen backbone run by onnxruntime: its features and nothing else (torch-free).

Its graph is an ONNX file without weights; they are in the safetensors file next to it, the same
that torch loads. This module computes the digest from that file and gives the graph every weight
from it, so a digest is never merely claimed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.known import EMBEDDED_NAMES, embedded_file
from fcil_adapters.backbones.onnx_session import Runtime, open_session
from fcil_adapters.backbones.weights import WeightsFile, digest_at
from fcil_adapters.contract import BackboneInfo
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_protocol.errors import DataError, OutOfMemory, WireError, WorkerError

METADATA = "fcil_backbone"  # key of the metadata: JSON {format, backbone, resampled}
FORMAT = 1
PIXELS, FEATURES = "pixels", "features"  # names of input and output

# Images in one pass. On a processor more are slower, and take more memory
# (docs/benchmarks/client-cost.md).
MOST_IMAGES_CPU, MOST_IMAGES_GPU = 8, 64

_EXPORT = "Export it on a machine with torch: fcil-client backbone export NAME --out FOLDER"


@dataclass(frozen=True)
class Graph:
    """The files of a backbone, which can be opened again with other weights.

    Attributes:
        path: the ONNX file.
        file: the weights.
        threads: of one operator; 0: `onnx_session.default_threads`.
        replaced: weights that take the place of the file's.
    """

    path: Path
    file: WeightsFile
    threads: int
    replaced: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return all weights, those of the file as views of it."""
        return {**self.file.tensors_f32(), **self.replaced}

    def open(self, device: str, digest: str) -> Any:
        """Open a session.

        Raises:
            DataError, ConfigError: see `onnx_session.open_session`.
        """
        session, _ = open_session(
            self.path, device, self.threads, cache=digest, weights=self.weights()
        )
        return session


class OnnxBackbone:
    """A loaded backbone that computes features (`frozen_features.Extractor`).

    Attributes:
        info: its description.
        device: where torch would compute for the methods that take part: the CPU.
        runtime: the onnxruntime provider and device that compute it.
        alive: called at the beginning of every pass.
        variant: the last result of `with_weights`.

    Args:
        session: of its graph.
        graph: opens it again.
    """

    device = "cpu"

    def __init__(self, session: Any, info: BackboneInfo, runtime: Runtime, graph: Graph) -> None:
        self.info = info
        self.runtime = runtime
        self.alive: Callable[[], None] = _nobody
        self.variant: OnnxBackbone | None = None
        self._session = session
        self._graph = graph

    def __repr__(self) -> str:
        return f"OnnxBackbone({self.info.name}, {self.description}, {self.info.digest[:12]})"

    @property
    def description(self) -> str:
        """The device and library that compute it, for people."""
        return self.runtime.description

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight, by its name in torch's state dict."""
        return self._graph.weights()[name]

    def with_weights(self, weights: Mapping[str, NDArray[np.float32]], digest: str) -> OnnxBackbone:
        """Return a backbone with some weights replaced, on the same device.

        This one's session is closed, since two may not fit at once; it opens again when it is
        needed.

        Args:
            weights: by their names in torch's state dict.
            digest: of its description.

        Raises:
            DataError: the graph has no such weight, or one of another shape.
        """
        self._session = self.variant = None
        graph = replace(self._graph, replaced={**self._graph.replaced, **weights})
        session = graph.open(self.runtime.device, digest)
        made = OnnxBackbone(session, replace(self.info, digest=digest), self.runtime, graph)
        made.alive = self.alive
        self.variant = made
        return made

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the frozen CLS features (B, d) of preprocessed images (B, S, S, 3).

        Raises:
            OutOfMemory: a pass does not fit into memory.
            WorkerError: onnxruntime failed otherwise.
        """
        features = np.empty((len(images), self.info.dim), dtype=np.float32)
        most = MOST_IMAGES_CPU if self.runtime.device == "cpu" else MOST_IMAGES_GPU
        for start in range(0, len(images), most):
            some = slice(start, start + most)
            self.alive()
            features[some] = self._pass(images[some])
        return features

    def _pass(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        if self._session is None:
            self._session = self._graph.open(self.runtime.device, self.info.digest)
        try:
            (features,) = self._session.run([FEATURES], {PIXELS: images})
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise _failed(error) from error
        expected = (len(images), self.info.dim)
        if np.shape(features) != expected:  # numpy would repeat a single row
            raise WorkerError(
                f"the backbone's graph gave features of shape {np.shape(features)}, expected "
                f"{expected}.",
                action=_EXPORT,
            )
        return np.asarray(features, dtype=np.float32)


def _nobody() -> None:
    return None


def load_onnx_backbone(
    name: str = "embedded",
    weights: Path | None = None,
    device: str = "auto",
    threads: int = 0,
    image_size: int | None = None,
) -> OnnxBackbone:
    """Load a frozen backbone to run with onnxruntime.

    Args:
        name: ``embedded``, or the server's name for it.
        weights: an exported graph (``.onnx``), or the safetensors file next to it. None: the
            embedded backbone's.
        device: auto, cpu, cuda, cuda:N or tensorrt.
        threads: of one operator; 0: `onnx_session.default_threads`.
        image_size: side of the images in pixels that the graph must take; None: any.

    Raises:
        DataError: graph and weights cannot be used; the message says what to give.
        ConfigError: onnxruntime is missing, or cannot compute on such a device.
    """
    graph = _graph_path(name, weights)
    if not graph.is_file():
        raise DataError(f"there is no graph {graph}.", action=f"Give the path of one. {_EXPORT}")
    path = graph.with_suffix(".safetensors")
    if not path.is_file():
        raise DataError(
            f"the weights of the graph {graph} are missing: there is no {path}.",
            action="Copy both files, the .onnx and the .safetensors, into one folder.",
        )
    file = WeightsFile.open(path)
    digest = file.digest()
    session, runtime = open_session(
        graph, device, threads, cache=digest, weights=file.tensors_f32()
    )
    info, resampled = _claim(graph, session.get_modelmeta().custom_metadata_map.get(METADATA))
    size = info.preprocessing.size
    found = digest_at(digest, size if resampled else None)
    if found != info.digest:
        raise DataError(
            f"the graph {graph} was exported with the weights {info.digest[:12]}, and {path.name} "
            f"next to it holds {found[:12]}.",
            action="Copy the two files that were exported together.",
        )
    if image_size not in (None, size):
        raise DataError(
            f"the graph {graph} takes images of {size} pixels, and the run's have {image_size}.",
            action=f"{_EXPORT} --image-size {image_size}",
        )
    return OnnxBackbone(session, info, runtime, Graph(graph, file, threads))


def _graph_path(name: str, weights: Path | None) -> Path:
    if weights is not None:
        if weights.suffix == ".onnx":
            return weights
        graph = weights.with_suffix(".onnx")
        if not graph.is_file():
            raise DataError(
                f"onnxruntime needs a graph next to the weights, but there is no {graph}.",
                action=_EXPORT,
            )
        return graph
    if name in EMBEDDED_NAMES:
        return embedded_file(".onnx")
    raise DataError(
        f"onnxruntime needs the exported graph of the backbone {name[:80]!r}.",
        action=f"Give it with --weights {name[:80]}.onnx. {_EXPORT}",
    )


def _claim(graph: Path, text: str | None) -> tuple[BackboneInfo, bool]:
    """Read a graph's description of itself, and whether its positions are resampled."""
    if text is None:
        raise DataError(
            f"the graph {graph} does not say which backbone it is: it has no metadata "
            f"{METADATA!r}.",
            action=_EXPORT,
        )
    try:
        fields = json.loads(text)
        written = fields["format"]
        info = backbone_from_fields(fields["backbone"]) if written == FORMAT else None
        resampled = fields.get("resampled", False) is True
    except (ValueError, KeyError, TypeError, RecursionError, WireError) as error:
        raise DataError(
            f"the metadata of the graph {graph} is malformed.", action=_EXPORT
        ) from error
    if info is None:
        raise DataError(
            f"the graph {graph} has the format {str(written)[:20]}, this fcil reads {FORMAT}.",
            action="Export it again with this version of fcil.",
        )
    return info, resampled


def _failed(error: Exception) -> WorkerError:
    text = " ".join(str(error).split())[:200]
    if any(words in text.lower() for words in ("allocat", "out of memory")):
        return OutOfMemory(
            f"onnxruntime ran out of memory ({text}).",
            action="Use a smaller micro-batch or fewer threads, or free memory.",
        )
    return WorkerError(f"onnxruntime failed: {text}.", action="See the worker's log.")
