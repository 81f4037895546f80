"""Open an ONNX file with onnxruntime on a device that really works (torch-free).

onnxruntime silently falls back to the CPU where a provider cannot be used; here that is an error if
the user chose the provider, and part of the description otherwise.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from fcil_adapters.resources import machine
from fcil_protocol.errors import ConfigError, DataError
from fcil_protocol.storage.atomic_files import make_private, storage_errors

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

THREADS_VARIABLE = "OMP_NUM_THREADS"  # set by a daemon for every numeric library of a worker
_PLACE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_OPSET = re.compile(r"Opset (\d+) is under development")
_NOWHERE = "/nonexistent"  # a folder that holds no weights
DEVICES = "auto, cpu, cuda, cuda:N or tensorrt"

Provider = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class Runtime:
    """The provider, device and threads of an onnxruntime session.

    Attributes:
        provider: its first choice, as onnxruntime names it.
        device: cpu, cuda:N or tensorrt.
        threads: of one operator on the CPU.
        passed_over: why a better provider was not taken; empty if there was none.
    """

    provider: str
    device: str
    version: str
    threads: int
    passed_over: str = ""

    @property
    def description(self) -> str:
        """The runtime as a text for people."""
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        where = f"{platform.machine()}, {threads}" if self.device == "cpu" else ""
        what = f"onnxruntime {self.version} {self.provider}"
        return f"{self.device} ({', '.join(filter(None, (where, what, self.passed_over)))})"


def default_threads() -> int:
    """Return the threads of ``OMP_NUM_THREADS`` in the environment, or this process's cores."""
    given = os.environ.get(THREADS_VARIABLE, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return machine.cores()


def open_session(
    model: Path,
    device: str = "auto",
    threads: int = 0,
    *,
    cache: str,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
) -> tuple[Any, Runtime]:
    """Open an ONNX file.

    Args:
        model: the file.
        device: auto (CUDA if it works, else the CPU), cpu, cuda, cuda:N or tensorrt.
        threads: of one operator on the CPU; 0: `default_threads`.
        cache: names the folder of TensorRT's engines, which are made for one model.
        weights: every external weight of the file, by name; they are copied, and the file gets them
            from here alone.

    Returns:
        An ``InferenceSession`` and its runtime.

    Raises:
        ConfigError: onnxruntime is missing, or cannot compute on such a device.
        DataError: it cannot use the file, or not with exactly these weights.
    """
    ort = import_onnxruntime()
    count = threads or default_threads()
    given = _read(model) if weights is not None else str(model)
    passed_over = ""
    for name, providers in _candidates(device, ort.get_available_providers(), cache):
        try:
            session = ort.InferenceSession(
                given, _options(ort, count, weights), providers=providers
            )
        except Exception as error:  # onnxruntime's exceptions have no common base
            if name == "cpu" or _is_about_the_file(error):
                raise _unusable(ort, model, error) from error
            reason = _words(error)
        else:
            taken = session.get_providers()[0]
            if taken == providers[0][0]:
                return session, Runtime(taken, name, str(ort.__version__), count, passed_over)
            reason = f"onnxruntime took {taken} instead; its own message is in the log"
        if device != "auto":
            raise ConfigError(
                f"the device {device!r} cannot be used with onnxruntime: {reason}.",
                action="Look for missing CUDA, cuDNN or TensorRT libraries, or choose --device "
                "cpu.",
            )
        passed_over = f"{providers[0][0]} does not work here"
    raise AssertionError("the CPU comes last")


def _read(model: Path) -> bytes:
    try:
        return model.read_bytes()
    except OSError as error:
        raise DataError(
            f"the graph {model} cannot be read: {error.strerror}.",
            action="Give the path of an ONNX file.",
        ) from error


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    if found := _OPSET.search(text):
        return f"it does not know opset {found[1]}"
    return _PLACE.sub("", text)[:300].rstrip(".")


def _is_about_the_file(error: Exception) -> bool:
    return type(error).__name__ in ("InvalidProtobuf", "InvalidGraph", "NoSuchFile")


def _unusable(ort: Any, model: Path, error: Exception) -> DataError:
    if type(error).__name__ == "InvalidProtobuf":
        return DataError(
            f"{model} is not an ONNX file, or is cut short.", action="Copy or export it again."
        )
    return DataError(
        f"onnxruntime {ort.__version__} cannot load {model}: {_words(error)}.",
        action="Export it again, with all files that belong to it, or install another version of "
        "onnxruntime.",
    )


def import_onnxruntime() -> Any:
    """Import onnxruntime and silence all but its errors; no other code imports it.

    Microsoft's builds of it keep a device id in the user's cache and can send usage statistics to
    their maker, unless the environment forbids it before they are loaded.

    Raises:
        ConfigError: it is missing or broken.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime as ort

        ort.set_default_logger_severity(3)
        if not hasattr(ort, "InferenceSession"):  # the remains after one of two was removed
            raise ImportError("it has no InferenceSession")
    except (ImportError, OSError, AttributeError) as error:
        again = "" if isinstance(error, ModuleNotFoundError) else " again"
        raise ConfigError(
            f"onnxruntime cannot be used here: {error}.",
            action=f"Install it{again}: pip install 'fcil[edge]'",
        ) from error
    return ort


def _candidates(
    device: str, available: list[str], cache: str
) -> Iterator[tuple[str, list[Provider]]]:
    """Yield devices to try with their providers, the best first."""
    kind, _, number = device.partition(":")
    if kind == "tensorrt" and not number:
        _must_have(TENSORRT, device, available)
        yield "tensorrt", [(TENSORRT, _tensorrt(cache)), (CUDA, _cuda("0")), (CPU, {})]
    elif kind == "cuda" and (number.isdecimal() or not device.partition(":")[1]):
        _must_have(CUDA, device, available)
        yield f"cuda:{number or 0}", [(CUDA, _cuda(number or "0")), (CPU, {})]
    elif device in ("auto", "cpu"):
        if device == "auto" and CUDA in available:
            yield "cuda:0", [(CUDA, _cuda("0")), (CPU, {})]
        yield "cpu", [(CPU, {})]
    else:
        raise ConfigError(
            f"the device {device[:40]!r} is unknown to onnxruntime.", action=f"Choose {DEVICES}."
        )


def _must_have(provider: str, device: str, available: list[str]) -> None:
    if provider not in available:
        raise ConfigError(
            f"the device {device!r} cannot be used: the installed onnxruntime has no {provider}; "
            f"it has {', '.join(available)}.",
            action="Install a build for the GPU (docs/edge.md), or choose --device cpu.",
        )


def _cuda(number: str) -> dict[str, str]:
    # Float32 as everywhere: the comparison of features would detect TF32's ten bits.
    return {"device_id": number, "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}


def _tensorrt(cache: str) -> dict[str, str]:
    # An engine takes minutes to build, for each device and version, so it is kept.
    folder = Path(platformdirs.user_state_dir("fcil", appauthor=False)) / "tensorrt" / cache[:16]
    with storage_errors("create the folder of TensorRT's engines", folder):
        make_private(folder)
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
        "trt_fp16_enable": "0",
    }


def _options(ort: Any, threads: int, weights: Mapping[str, NDArray[np.float32]] | None) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if weights is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", _NOWHERE
        )
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    return options
