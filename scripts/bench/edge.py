"""A client installed without torch beside one with it: size, start, memory, and one federation.

Makes a real environment with ``pip install .[edge]`` and lets clients from it and one with torch
learn three tasks of digits with ``analytic`` on a server with torch.

.venv/bin/python scripts/bench/edge.py [--venv FOLDER] [--times 7]
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from processes import peak_mb, status_mb

from fcil_protocol.process import control_socket
from fcil_server.lab.local.demo import write_digits
from fcil_server.lab.local.federation import LocalFederation

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "method.name": "analytic",
    "tasks.schedule": "listed",
    "tasks.classes": '[["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8", "9"]]',
    "round.min_clients": "3",
}

# Bytes on disk of fcil with one extra, and of all that it requires, as installed.
SIZES = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

def needed(name, extras, seen):
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen and not extras - seen[key]:
        return
    seen.setdefault(key, set()).update(extras)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        seen.pop(key)
        return
    for text in found.requires or []:
        want = Requirement(text)
        marks = [{"extra": e} for e in extras] or [{"extra": ""}]
        if want.marker is None or any(want.marker.evaluate(m) for m in marks):
            needed(want.name, set(want.extras), seen)

seen = {}
needed("fcil", {sys.argv[1]}, seen)
sizes = {}
for name in seen:
    files = distribution(name).files or []
    sizes[name] = sum(p.stat().st_size for f in files if (p := f.locate()).is_file()
                      and p.suffix != ".pyc")
print(json.dumps(sizes))
"""

# One engine in a process of its own: CPU time of an image, and the most memory it ever had.
PASSES = """
import statistics, sys, time
from pathlib import Path
import numpy as np
from fcil_adapters.backbones import engines, onnx_backbone

engine, name, weights, batch, count = sys.argv[1:]
batch, count = int(batch), int(count)
onnx_backbone.MOST_IMAGES_CPU = batch
backbone = engines.load(engine, name, Path(weights) if weights else None, "cpu", 1)
size = backbone.info.preprocessing.size
images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3)).astype(np.uint8)
taken = []
for _ in range(6):
    before = time.process_time()
    for start in range(0, count, batch):
        backbone.features(images[start : start + batch])
    taken.append(time.process_time() - before)
status = Path("/proc/self/status").read_text()  # getrusage would count the parent's before exec
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
print(f"{1e3 * statistics.median(taken[1:]) / count:.2f} ms of CPU an image, peak {peak:.0f} MB")
"""


def make(folder: Path) -> Path:
    """Return the Python of an environment with fcil[edge] alone."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
             "-c", ROOT / "constraints.txt", f"{ROOT}[edge]"],
            check=True,
        )  # fmt: skip
    refused = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    assert b"No module named 'torch'" in refused.stderr, "this environment has torch"
    return python


def sizes(python: Path, extra: str) -> dict[str, int]:
    done = subprocess.run(
        [python, "-c", SIZES, extra], capture_output=True, text=True, check=True, cwd="/"
    )
    return json.loads(done.stdout)


def cpu_of(command: list[str | Path], times: int) -> float:
    """Return the median CPU time of a command, s."""
    taken = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken)


def passes(directory: Path) -> None:
    """Compare the engines on the embedded backbone and on a ViT-tiny with random weights."""
    import safetensors.torch

    from fcil_adapters.backbones.backbone import timm
    from fcil_adapters.export.backbone_file import export_backbone

    name = "vit_tiny_patch16_224"
    random = directory / "random.safetensors"
    safetensors.torch.save_file(timm.create_model(name, num_classes=0).state_dict(), random)
    done = export_backbone(name, random, directory)
    print(f"{name}: graph {done.graph.stat().st_size / 1e3:.0f} kB, agrees to {done.agreement:.1e}")
    for which, weights, count, batches in (
        ("embedded", "", 256, (1, 8, 32, 256)),
        (name, str(done.graph), 32, (1, 8, 32)),
    ):
        for batch in batches:
            for engine in ("onnx", "torch"):
                command = [sys.executable, "-c", PASSES, engine, which, weights, batch, count]
                told = subprocess.run(
                    list(map(str, command)), check=True, capture_output=True, text=True
                )
                print(f"{which}, {batch} in a pass, {engine}: {told.stdout.strip()}")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def federation(directory: Path, pythons: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Run three tasks; return what each client's daemon and worker hold afterwards, MB."""
    folders = write_digits(directory / "data", len(pythons))
    held = {}
    with LocalFederation(directory) as local:
        local.serve(*(a for k, v in SETTINGS.items() for a in ("-c", f"{k}={v}")))
        for (name, python), data in zip(pythons.items(), folders, strict=True):
            log = (directory / "logs" / f"{name}.log").open("ab")
            local.clients[name] = subprocess.Popen(
                [python, "-P", "-m", "fcil_client", "join", "--data", data, "--threads", "1"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=local.environment(), cwd="/",
            )  # fmt: skip
        local.until("run_done", timeout_s=600)
        for row in control_socket.ask(local.federation, "status")["clients"]:
            print(f"  {row['name']}: {row['device']}, features agree to {row['agreement']:.1e}")
        for name, process in local.clients.items():
            (worker,) = children(process.pid)
            held[name] = {
                "daemon": status_mb(process.pid),
                "worker": status_mb(worker),
                "worker's peak": peak_mb(worker),
            }
        run = next((local.federation / "runs").iterdir())
        summary = json.loads((run / "summary.json").read_text())["data"]
        print(f"  final accuracy {summary['faa']:.1f} %")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--only-passes", action="store_true", help="compare the engines alone")
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"}
    directory = Path(tempfile.mkdtemp(prefix="fcil-edge-"))
    try:
        passes(directory)
        if args.only_passes:
            return
        edge = make(args.venv or directory / "venv")
        full = Path(sys.executable)
        for name, python, extra in (("edge", edge, "edge"), ("with torch", full, "client")):
            found = sizes(python, extra)
            largest = sorted(found, key=found.__getitem__, reverse=True)[:6]
            listed = ", ".join(f"{n} {found[n] / 1e6:.0f}" for n in largest)
            print(f"{name}: {sum(found.values()) / 1e6:.0f} MB in {len(found)} packages ({listed})")
        runtimes = {
            "fcil-client --help": ["-P", "-m", "fcil_client", "--help"],
            "import onnxruntime": ["-c", "import onnxruntime"],
            "import torch, timm": ["-c", "import fcil_adapters.backbones.backbone"],
        }
        for what, arguments in runtimes.items():
            for name, python in (("edge", edge), ("with torch", full)):
                if what == "import torch, timm" and name == "edge":
                    continue
                taken = cpu_of([python, *arguments], args.times)
                print(f"{name}: {what}: {taken:.2f} s of CPU, median of {args.times}")
        pythons = {"edge-1": edge, "edge-2": edge, "torch": full}
        for name, held in federation(directory / "fed", pythons).items():
            print(f"{name}: " + ", ".join(f"{k} {v:.0f} MB" for k, v in held.items()))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
