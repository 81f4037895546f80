"""Modules in places where only data lies; each leaves a mark if anything runs it."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

MORE = ("sitecustomize", "usercustomize", "multipart", "PIL", "_distutils_hack", "setuptools")


def names() -> list[str]:
    """Return what a program of ours could import by its first name."""
    found = {*sys.stdlib_module_names, *packages_distributions(), *MORE}
    return sorted(n for n in found if n.isidentifier())


def plant(folder: Path, marks: Path) -> Path:
    """Put a module of every name into a folder; each writes its name below `marks` when run."""
    marks.mkdir(exist_ok=True)
    text = f"open({str(marks)!r} + '/' + __name__, 'w').close()\nraise ImportError('planted')\n"
    for name in names():
        (folder / f"{name}.py").write_text(text)
    (folder / "matplotlibrc").write_text("text.usetex: True\nbackend: module://PIL\n")
    return folder
