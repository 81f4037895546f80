"""Load the exports, which need torch and a format's own packages, where installed (torch-free)."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

from fcil_adapters.backbones.engines import choose
from fcil_adapters.contract import Method
from fcil_adapters.export.exported_model import check_target
from fcil_adapters.export.folder import check_folder
from fcil_adapters.export.peft_adapter import FILES
from fcil_protocol.errors import ConfigError, DataError, UsageError

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


def chosen_form(**targets: Path | None) -> tuple[str, Path]:
    """Return the format that a command was given, and its target.

    Args:
        targets: the option of each format, by its name.

    Raises:
        UsageError: there is none, or there are several.
        DataError: the target is none to which this format can be written.
    """
    given = [(form, target) for form, target in targets.items() if target is not None]
    if len(given) != 1:
        raise UsageError(
            f"expected one of {', '.join(f'--{form}' for form in targets)}; got "
            f"{' and '.join(f'--{form}' for form, _ in given) or 'none'}.",
            action="Say what to write: --onnx FILE, or --peft FOLDER",
        )
    ((form, target),) = given
    if form == "peft":
        check_folder(target, FILES, "--peft")
    else:
        check_target(target)
    return form, target


def check_options(form: str, **given: bool) -> None:
    """Refuse options that only ONNX files have.

    Args:
        form: the chosen format.
        given: option -> True if the command has it.

    Raises:
        UsageError: one was given with another format.
    """
    others = [f"--{name}" for name, on in given.items() if on]
    if form != "onnx" and others:
        raise UsageError(
            f"{others[0]} goes with --onnx; an adapter has the run's own numbers, in float32.",
            action=f"Leave {' and '.join(others)} out.",
        )


def check_has_adapter(method: Method) -> None:
    """Refuse a method without LoRA, before any work.

    Raises:
        DataError: it has none.
    """
    if not method.changes:
        raise DataError(
            f"{method.name} trains no LoRA, so there is no adapter of it for PEFT.",
            action="Export its whole model: --onnx model.onnx",
        )


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
