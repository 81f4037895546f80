"""Load the exports, which need torch and a format's own packages, where installed (torch-free)."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.backbones.engines import choose
from fcil_adapters.contract import Context, Method, State
from fcil_adapters.export import peft_adapter, statistics_file, timm_model
from fcil_adapters.export.exported_model import ExportInfo, Origin, check_target
from fcil_adapters.export.folder import MLFLOW_FILES, FolderInfo, check_folder
from fcil_adapters.export.statistics_file import StatisticsInfo
from fcil_protocol.errors import ConfigError, DataError, UsageError
from fcil_protocol.payloads.payload import Payload

Described = ExportInfo | FolderInfo | StatisticsInfo

# Of each format its name, and of each package the extra that brings it.
# onnxruntime is not in `export`, since onnxruntime-gpu serves as well and the two must not be
# installed together.
_FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "onnx": (
        "an ONNX file",
        {"onnx": "export", "onnxscript": "export", "onnxruntime": "edge"},
    ),
    "timm": ("a timm folder", {}),
    "peft": (
        "a PEFT adapter",
        dict.fromkeys(("peft", "transformers", "accelerate"), "peft"),
    ),
    "statistics": ("class statistics", {}),
    "mlflow": (
        "a model of MLflow",
        {
            **dict.fromkeys(("onnx", "onnxscript"), "export"),
            "onnxruntime": "edge",
            "mlflow": "mlflow",
        },
    ),
}
_FOLDERS = {"timm": timm_model.FILES, "peft": peft_adapter.FILES, "mlflow": MLFLOW_FILES}
_GRAPHS = ("onnx", "mlflow")  # formats with the options of ONNX files


@dataclass(frozen=True)
class ExportOrder:
    """A format, its target, and the options of a command.

    Attributes:
        form: ``onnx``, ``timm``, ``peft``, ``statistics`` or ``mlflow``.
        target: the file or folder; one that exists is replaced.
        precision, opset, force: `model_file.ExportOptions` of ONNX files, alone or for MLflow;
            None: the default opset.
    """

    form: str
    target: Path
    precision: str = "fp32"
    opset: int | None = None
    force: bool = False

    @property
    def is_folder(self) -> bool:
        """True if the format is a folder, not a file."""
        return self.form in _FOLDERS

    @property
    def needs_backbone(self) -> bool:
        """True if the export runs the model."""
        return self.form != "statistics"

    @property
    def bytes(self) -> int:
        """Size of what was written."""
        files = self.target.iterdir() if self.is_folder else (self.target,)
        return sum(file.stat().st_size for file in files)

    @property
    def is_graph(self) -> bool:
        """True if the format holds an ONNX file."""
        return self.form in _GRAPHS

    def check(self, module: ModuleType) -> Any:
        """Return the options as the exporter of ONNX files takes them; None for other formats.

        Raises:
            ConfigError: one is unknown.
        """
        if not self.is_graph:
            return None
        given: dict[str, Any] = {} if self.opset is None else {"opset": self.opset}
        return module.ExportOptions(precision=self.precision, force=self.force, **given)


def wanted_form(
    targets: Mapping[str, Path | None],
    *,
    precision: str = "fp32",
    opset: int | None = None,
    force: bool = False,
) -> ExportOrder:
    """Return the format that a command was given, and its target.

    Args:
        targets: the option of each format, by its name.
        precision: of ONNX files, as are the next two.
        opset: of ONNX's own operators; None: the default.
        force: write it even if it differs from the torch model by more than allowed.

    Raises:
        UsageError: there is none, or there are several, or an option does not go with it.
        DataError: the target is none to which this format can be written.
    """
    given = [(form, target) for form, target in targets.items() if target is not None]
    if len(given) != 1:
        raise UsageError(
            f"expected one of {', '.join(f'--{form}' for form in targets)}; got "
            f"{' and '.join(f'--{form}' for form, _ in given) or 'none'}.",
            action="Say what to write, such as --onnx FILE or --timm FOLDER.",
        )
    ((form, target),) = given
    wanted = ExportOrder(form, target, precision, opset, force)
    if wanted.is_folder:
        check_folder(target, _FOLDERS[form], f"--{form}")
    else:
        check_target(target)
    own = {"precision": precision != "fp32", "opset": opset is not None, "force": force}
    others = [f"--{name}" for name, on in own.items() if on]
    if not wanted.is_graph and others:
        raise UsageError(
            f"{others[0]} goes with --onnx and --mlflow; --{form} has the run's own numbers, in "
            "float32.",
            action=f"Leave {' and '.join(others)} out.",
        )
    return wanted


def write(
    module: ModuleType,
    wanted: ExportOrder,
    model: tuple[Method, Context, Mapping[str, Payload], Origin],
    state: State | None,
    images: NDArray[np.uint8] | None,
    notify: Callable[[str], None],
) -> Described:
    """Write a model in a format, completely or not at all.

    Args:
        module: of `exporter`.
        wanted: the format.
        model: method, context, broadcast and origin.
        state: the server's; None on a client.
        images: (N, S, S, 3), preprocessed, to compare or calibrate with.
        notify: receives a sentence before each step.

    Raises:
        FcilError: it cannot be written; the message says why.
    """
    done: Described
    if wanted.is_graph:
        export = module.export_mlflow if wanted.is_folder else module.export_model
        done = export(*model, wanted.target, wanted.check(module), images, notify)
    elif wanted.form == "timm":
        done = module.export_timm(*model, wanted.target, images, notify)
    elif wanted.form == "peft":
        done = module.export_adapter(*model, wanted.target, images, notify)
    else:
        method, ctx, parts, origin = model
        done = module.export_statistics(method, ctx, state, parts, origin, wanted.target)
    return done


def check_method(form: str, method: Method) -> None:
    """Refuse a method whose models have no such format, before any work.

    Raises:
        DataError: they have none.
    """
    if form == "peft":
        check_has_adapter(method)
    elif form == "timm":
        timm_model.check_has_weights(method)


def check_has_adapter(method: Method) -> None:
    """Refuse a method without LoRA.

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
        form: ``onnx`` and ``mlflow`` (`model_file`), ``timm`` (`timm_folder`), ``peft``
            (`peft_folder`) or ``statistics`` (`statistics_file`).

    Raises:
        ConfigError: packages are missing; the message names all, with one command.
    """
    what, packages = _FORMATS[form]
    if (form, extra) == ("statistics", "client"):  # what it has received, without a computation
        return statistics_file
    needed = {"torch": extra, **packages}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise _lacking(what, ", ".join(missing), [needed[name] for name in missing])
    choose("torch")
    try:
        if form == "statistics":
            return statistics_file
        if form == "timm":
            from fcil_adapters.export import timm_folder

            return timm_folder
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
