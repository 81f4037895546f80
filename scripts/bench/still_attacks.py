"""Attacks of `attacks.py` that need no server: by files, and by a copy of a cookie."""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fcil_protocol.storage.atomic_files import write_atomic
from fcil_server.federation.page_key import KEY_NAME
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.web.page.access.sessions import KeyedSessions
from system.kit import settings, write_client

SIDE = 4000
PER_PIXEL, MORE_MB = 10, 32  # bytes for a pixel; what else a decoder takes
TANGLED = 12
PLANTED = ("PIL", "numpy", "torch", "json", "multipart", "starlette", "sitecustomize", "queue")

PICTURE = """
import sys
from pathlib import Path
from fcil_adapters.contract import Preprocessing
from fcil_adapters.images.decoding import decode, preprocess

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

base = peak()
preprocess(decode(Path(sys.argv[1]).read_bytes()), Preprocessing(32, (0.5,) * 3, (0.5,) * 3))
print(peak() - base)
"""

LISTING = """
import sys
from pathlib import Path
from fcil_adapters.images.sources import open_source
print(len(open_source(Path(sys.argv[1])).listing().entries))
"""


@dataclass(frozen=True)
class Found:
    """What an attack did, what it may do, and whether it did no more."""

    text: str
    allowed: str
    holds: bool


def _child(code: str, *words: str, most_s: float) -> str:
    command = [sys.executable, "-P", "-c", code, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=most_s, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


def picture(most_s: float) -> Found:
    """A float TIFF of zeros: a small file of many wide pixels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tif"
        zeros = Image.fromarray(np.zeros((SIDE, SIDE), np.float32))
        zeros.save(path, compression="tiff_adobe_deflate")
        size = path.stat().st_size
        took = int(_child(PICTURE, str(path), most_s=most_s) or 1 << 60)
    most = PER_PIXEL * SIDE * SIDE + MORE_MB * 1_000_000
    text = f"{size / 1e3:.0f} kB took {took / 1e6:.0f} MB, {took / SIDE / SIDE:.1f} B for a pixel"
    return Found(text, f"{most / 1e6:.0f} MB", took <= most)


def tangle(most_s: float) -> Found:
    """Class folders of which each links to all others."""
    with tempfile.TemporaryDirectory() as folder:
        root = write_client(Path(folder) / "data", range(1), per_class=1).parent
        for number in range(TANGLED):
            write_client(root / "tangle" / f"k{number}", range(1), per_class=1)
        for i, j in itertools.permutations(range(TANGLED), 2):
            (root / "tangle" / f"k{i}" / f"to{j}").symlink_to(root / "tangle" / f"k{j}")
        most_s = min(most_s, 30.0)
        said = _child(LISTING, str(root / "tangle"), most_s=most_s)
    text = f"{said} images listed" if said else f"no end in {most_s:g} s"
    allowed = f"{TANGLED * TANGLED} images"
    return Found(text, allowed, said == str(TANGLED * TANGLED))


def planted(most_s: float) -> Found:
    """Modules in the folder where server and client are started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        marks, data = folder / "marks", write_client(folder / "data", range(2))
        marks.mkdir()
        for module in PLANTED:
            mark = marks / module
            (data / f"{module}.py").write_text(
                f"open({str(mark)!r}, 'w').close()\nraise ImportError\n"
            )
        before = Path.cwd()
        os.chdir(data)
        try:
            with LocalFederation(folder / "f") as federation:
                one = settings(round__min_clients=1, tasks__classes=[["0", "1"]])
                federation.serve("--page", "127.0.0.1:0", *one)
                federation.join("a", data)
                federation.until("run_done", timeout_s=most_s)
            end = "the run is done"
        except Exception as error:  # whatever a module that is run by mistake makes of it
            end = " ".join(str(error).split())[-80:]
        finally:
            os.chdir(before)
        run = sorted(mark.name for mark in marks.iterdir())
    return Found(f"run: {', '.join(run) or 'nothing'}; {end}", "nothing", not run)


def signed_out(_most_s: float) -> Found:
    """A copy of a cookie, after its owner signed out and the page's process was started anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_atomic(folder / KEY_NAME, bytes(range(32)))
        first = KeyedSessions(folder).current()
        cookie = {first.cookie: first.begin()}
        session = KeyedSessions(folder).of(cookie)
        assert session is not None
        first.leave(session)
        again = KeyedSessions(folder, clock=lambda: time.time() + 60).of(cookie)
    return Found("let in" if again else "not let in", "not let in", again is None)


ATTACKS: dict[str, Callable[[float], Found]] = {
    "planted": planted,
    "picture": picture,
    "tangle": tangle,
    "signed-out": signed_out,
}
