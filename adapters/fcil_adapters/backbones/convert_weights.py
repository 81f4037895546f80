"""Read a torch checkpoint once, and keep its tensors as safetensors (torch).

No other module reads such a file: it is a pickle, and may hold a program.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fcil_adapters.backbones.weights import WeightsFile
from fcil_protocol.errors import DataError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

# Names under which training scripts keep the weights among other things, the likeliest first.
_INSIDE = ("state_dict", "model", "model_state_dict", "module", "teacher")
_PREFIXES = ("module.", "backbone.", "model.")


def convert(source: Path, target: Path) -> WeightsFile:
    """Write the weights of a checkpoint as safetensors in float32.

    Args:
        source: a file of ``torch.save``: a state dict, or a dictionary that contains one.
        target: does not exist yet.

    Raises:
        DataError: the source cannot be read, holds anything but plain data, or no weights; or the
            target exists.
        StorageError: the target cannot be written.
    """
    if target.exists():
        raise DataError(f"{target} exists already.", action="Choose another name.")
    state = _weights(_load(source))
    if not state:
        raise DataError(
            f"{source} holds no weights.", action="Give the file of a model's state dict."
        )
    with storage_errors("write the weights", target):
        write_atomic(target, safetensors.torch.save(state), mode=0o644)
    return WeightsFile.open(target)


def _load(source: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its format may be old
            return torch.load(source, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror}.", action="Give the path of a checkpoint."
        ) from error
    except Exception as error:  # damaged bytes make an unpickler raise anything
        if type(error).__name__ == "UnpicklingError" and "weights_only" in str(error).lower():
            raise DataError(
                f"{source} holds more than tensors and could contain a program; it was not opened.",
                action="Save the state dict alone, on a machine where you trust the file.",
            ) from error
        raise _no_checkpoint(source) from error


def _no_checkpoint(source: Path) -> DataError:
    return DataError(
        f"{source} is not a torch checkpoint, or is damaged.",
        action="Give a .pth or .pt file that torch.save wrote.",
    )


def _weights(loaded: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a state dict, however deeply it is nested."""
    while isinstance(loaded, Mapping) and not any(isinstance(v, Tensor) for v in loaded.values()):
        inside = [loaded[name] for name in _INSIDE if isinstance(loaded.get(name), Mapping)]
        if not inside:
            return {}
        loaded = inside[0]
    if not isinstance(loaded, Mapping):
        return {}
    state = {
        str(name): values.to(torch.float32).contiguous().clone()
        for name, values in loaded.items()
        if isinstance(values, Tensor) and values.is_floating_point()
    }
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): values for name, values in state.items()}
    return state
