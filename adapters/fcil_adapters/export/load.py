"""Load the exports, which need torch and a format's own packages, where installed (torch-free)."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

from fcil_adapters.backbones.engines import choose
from fcil_protocol.errors import ConfigError

# Of each format its name, and of each package the extra that brings it.
# onnxruntime is not in `export`, since onnxruntime-gpu serves as well and the two must not be
# installed together.
_FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "onnx": (
        "an ONNX file",
        {"onnx": "export", "onnxscript": "export", "onnxruntime": "edge"},
    ),
    "peft": (
        "a PEFT adapter",
        dict.fromkeys(("peft", "transformers", "accelerate"), "peft"),
    ),
}


def exporter(extra: str, form: str = "onnx") -> ModuleType:
    """Return the module that writes a format, once all that it needs is installed.

    Args:
        extra: the package's extra of this program, which brings torch.
        form: ``onnx`` (`fcil_adapters.export.model_file`) or ``peft`` (`peft_folder`).

    Raises:
        ConfigError: packages are missing; the message names all, with one command.
    """
    what, packages = _FORMATS[form]
    needed = {"torch": extra, **packages}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise _lacking(what, ", ".join(missing), [needed[name] for name in missing])
    choose("torch")
    try:
        if form == "peft":
            from fcil_adapters.export import peft_folder

            return peft_folder
        from fcil_adapters.export import model_file
    except ImportError as error:
        raise _lacking(what, str(error), list(needed.values())) from error
    return model_file


def _lacking(what: str, missing: str, extras: list[str]) -> ConfigError:
    # An installed fcil is found by its name, so the command is right in a clone's environment too,
    # which need not be active.
    own = sys.prefix != sys.base_prefix
    pip = shlex.quote(str(Path(sys.prefix, "bin", "pip"))) if own else "pip"
    return ConfigError(
        f"writing {what} needs packages that are not installed ({missing}).",
        action=f"Install them: {pip} install 'fcil[{','.join(dict.fromkeys(extras))}]'",
    )
