"""A method from a package of its own, changed as a test needs it, and installed."""

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "third_party"


def change(folder, name, *changes):
    """Replace texts in a file that must hold each exactly once."""
    path = folder / name
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def install(folder, *, version="1"):
    """Build the method's wheel, of this version, and install it; return where it is."""
    source = shutil.copytree(SOURCE, folder / "source")
    change(source, "pyproject.toml", ('version = "1.0"', f'version = "{version}.0"'))
    change(source, "thumbnail_lda/__init__.py", ('version="1"', f'version="{version}"'))
    offline = ("--no-deps", "--no-index")
    wheels = folder / "wheels"
    pip("wheel", "--no-build-isolation", *offline, "--wheel-dir", str(wheels), str(source))
    [wheel] = wheels.iterdir()
    pip("install", *offline, "--target", str(folder / "site"), str(wheel))
    return folder / "site"
