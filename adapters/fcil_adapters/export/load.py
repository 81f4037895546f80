"""Load the export to ONNX, which needs torch and onnx, where these are installed (torch-free)."""

from __future__ import annotations

from types import ModuleType

from fcil_adapters.backbones.engines import choose
from fcil_protocol.errors import ConfigError


def exporter(extra: str) -> ModuleType:
    """Return `fcil_adapters.export.model_file`, which needs torch and onnx.

    Args:
        extra: the package's extra of this program, for the error.

    Raises:
        ConfigError: they are not installed.
    """
    choose("torch")
    try:
        from fcil_adapters.export import model_file
    except ImportError as error:
        raise ConfigError(
            f"writing an ONNX file needs packages that are not installed ({error}).",
            action=f"pip install 'fcil[{extra},export,edge]'",
        ) from error
    return model_file
