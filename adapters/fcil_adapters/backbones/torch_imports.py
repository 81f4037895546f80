"""Import timm and torchvision where operators are missing, and without torch's compiler.

timm imports torchvision. The public torchvision wheel cannot load its C++ operators on a CPU-only
torch, and then fails while it describes one of them ("operator torchvision::nms does not exist").
fcil never calls these operators, so declaring them is enough.

fcil never compiles a model. torchvision and timm load torch's compiler during their import, for
decorators that say "do not compile this". That costs 1.0 of the 2.9 s of a process until its first
features, and 69 of 372 MB (torch 2.13 on x86-64). A decorator that waits until its function is
called does the same.

Optimisers mark places for the compiler at each step, and load it for that: 2.4 s of a client's
first round and 70 MB. A placeholder takes these marks, and loads the real one when anything else is
asked of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

import torch

_SYMPTOM = "operator torchvision::nms does not exist"
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_MISSING = ("nms", "qnms")

# torch.library takes declarations back when the library object is collected.
_kept: list[torch.library.Library] = []


def ensure_torchvision() -> bool:
    """Import torchvision; declare its missing operators when, and only when, that fails.

    Call it before ``import timm``.

    Returns:
        True if the operators had to be declared now.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if _SYMPTOM not in str(error):
            raise
    else:
        return False
    _forget_half_imported()
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in _MISSING:
        library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]
    _kept.append(library)
    importlib.import_module("torchvision")
    return True


def _forget_half_imported() -> None:
    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]


_DYNAMO = "torch._dynamo"
_UTILS = f"{_DYNAMO}.utils"


class _Utils(ModuleType):
    """Placeholder for the compiler's helpers, which loads them as soon as one is used."""

    @staticmethod
    def is_compile_supported(device: str) -> Any:
        return _real_utils().is_compile_supported(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's questions about a module
            raise AttributeError(name)
        return getattr(_real_utils(), name)


def _real_utils() -> Any:
    if isinstance(sys.modules.get(_UTILS), _Utils):
        del sys.modules[_UTILS]
    return importlib.import_module(_UTILS)


def _mark(function: Callable[..., Any] | None = None, recursive: bool = True, **_kw: Any) -> Any:
    """Like `torch.compiler.disable`, but load the compiler only when the function is called."""
    return torch._disable_dynamo(function, recursive)  # type: ignore[attr-defined]  # noqa: SLF001


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep imports of torchvision and timm from loading the compiler.

    Nothing changes if it is loaded already, or if torch has another such decorator.
    """
    if _UTILS in sys.modules or not hasattr(torch, "_disable_dynamo"):
        yield
        return
    real, sys.modules[_UTILS] = torch.compiler.disable, _Utils(_UTILS)
    torch.compiler.disable = _mark  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = real
        if isinstance(sys.modules.get(_UTILS), _Utils):
            del sys.modules[_UTILS]
        _defer_compiler()


class _Dynamo(ModuleType):
    """Placeholder for the compiler, which loads it as soon as it is to compile something."""

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Mark a place in nothing that is compiled."""

    @staticmethod
    def disable(fn: Any = None, *_args: Any, **_kw: Any) -> Any:
        """Return a function as it is: nothing compiles it."""
        return fn if fn is not None else lambda function: function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which an import of a submodule asks for
            raise AttributeError(name)
        return getattr(_real_dynamo(), name)


def _real_dynamo() -> Any:
    if isinstance(sys.modules.get(_DYNAMO), _Dynamo):
        del sys.modules[_DYNAMO]
        vars(torch).pop("_dynamo", None)
    return importlib.import_module(_DYNAMO)


class _Loaded(Loader, MetaPathFinder):
    """Finds submodules of the compiler that are loaded already.

    An import of a submodule asks the placeholder for its path. That loads the compiler with its
    submodules, and the import would go on to load the one that it is for once more.
    """

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> Any:
        if fullname.startswith(f"{_DYNAMO}.") and fullname in sys.modules:
            return spec_from_loader(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):  # the compiler's settings take no attribute
            module.__spec__ = self._own


def _defer_compiler() -> None:
    """Keep optimisers from loading the compiler, unless it is loaded already."""
    if _DYNAMO not in sys.modules:
        placeholder = _Dynamo(_DYNAMO)
        placeholder.__spec__ = find_spec(_DYNAMO)
        sys.modules[_DYNAMO] = placeholder
        vars(torch)["_dynamo"] = placeholder
        sys.meta_path.insert(0, _Loaded())
