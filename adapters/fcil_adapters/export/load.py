"""Load the export to ONNX, which needs torch and onnx, where these are installed (torch-free)."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

from fcil_adapters.backbones.engines import choose
from fcil_protocol.errors import ConfigError

# Of each package the extra that brings it. onnxruntime is not in `export`, since onnxruntime-gpu
# serves as well and the two must not be installed together.
_NEEDED = {"onnx": "export", "onnxscript": "export", "onnxruntime": "edge"}


def exporter(extra: str) -> ModuleType:
    """Return `fcil_adapters.export.model_file`, once all that an export needs is installed.

    Args:
        extra: the package's extra of this program, which brings torch.

    Raises:
        ConfigError: packages are missing; the message names all, with one command.
    """
    needed = {"torch": extra, **_NEEDED}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise _lacking(", ".join(missing), [needed[name] for name in missing])
    choose("torch")
    try:
        from fcil_adapters.export import model_file
    except ImportError as error:
        raise _lacking(str(error), list(needed.values())) from error
    return model_file


def _lacking(what: str, extras: list[str]) -> ConfigError:
    # An installed fcil is found by its name, so the command is right in a clone's environment too,
    # which need not be active.
    own = sys.prefix != sys.base_prefix
    pip = shlex.quote(str(Path(sys.prefix, "bin", "pip"))) if own else "pip"
    return ConfigError(
        f"writing an ONNX file needs packages that are not installed ({what}).",
        action=f"Install them: {pip} install 'fcil[{','.join(dict.fromkeys(extras))}]'",
    )
