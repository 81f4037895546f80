"""What `fcil-client predict` costs: torch and onnxruntime, current model and exported files.

A real federation (fedncm on digits, the embedded backbone, two tasks) gives a client its current
model, which is exported as fp32, fp16 and int8. Then, for each way, in processes of their own and
in turn: the whole command for one image, as a user types it; and inside one process the warm
latency of one image, images per second of a folder (read, decode, score, answer), and peak memory.

.venv/bin/python scripts/bench/predict.py [--images 1000] [--repeats 3] [--threads 1] [--batch 32]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from fcil_protocol.process.children import module_command
from fcil_server.lab.local.federation import LocalFederation

NAMES = [f"digit {i}" for i in range(10)]
LATENCIES = 50


def digits(folder: Path, start: int, stop: int) -> Path:
    data = load_digits()
    for i in range(start, stop):
        place = folder / NAMES[data.target[i]]
        place.mkdir(parents=True, exist_ok=True)
        pixels = (data.images[i] * (255 / 16)).round().astype("uint8")
        Image.fromarray(pixels).resize((32, 32)).save(place / f"{i}.png")
    return folder


def federation(place: Path) -> LocalFederation:
    tasks = json.dumps([NAMES[:5], NAMES[5:]])
    given = {"method.name": "fedncm", "tasks.schedule": "listed", "tasks.classes": tasks,
             "round.min_clients": "1"}  # fmt: skip
    settings = [part for key, value in given.items() for part in ("-c", f"{key}={value}")]
    with LocalFederation(place) as made:
        made.serve("--until-done", *settings)
        made.join("a", digits(place / "a", 0, 600))
        assert made.server is not None
        assert made.server.wait(600) == 0, made.last_words("server")
    return made


def child(arguments: list[str]) -> None:
    """Measure one way inside this process; JSON on stdout."""
    source, engine, data, folder, threads, batch = arguments
    from fcil_client.membership.enrol import find_enrolled
    from fcil_client.predict.images import InputImage, batches, walk
    from fcil_client.predict.predict import Current, Means, PredictionRequest, answers, open_file

    means = Means(engine=engine, threads=int(threads), batch=int(batch), device="cpu")
    began = time.perf_counter()
    if source == "current":
        found = find_enrolled(Path(data), None)
        assert found is not None
        ready = Current(found[0], means, lambda _done, _all: None).open()
    else:
        ready = open_file(Path(source), means)
    opened = time.perf_counter()
    pictures = [InputImage(str(path)) for path in walk(Path(folder))]

    def go(some: list[InputImage]) -> float:
        start = time.perf_counter()
        decoded = batches(some, ready.preprocessing, size=means.batch, threads=means.threads)
        rows = list(answers(ready, decoded, PredictionRequest()))
        assert len(rows) == len(some)
        return time.perf_counter() - start

    go(pictures[:1])
    single = [go([one]) for one in pictures[:LATENCIES]]
    busy = time.process_time()
    whole = go(pictures)
    busy = time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of KiB
    print(
        json.dumps(
            {
                "open_s": opened - began,
                "warm_ms": statistics.median(single) * 1e3,
                "per_s": len(pictures) / whole,
                "cpu_ms": busy / len(pictures) * 1e3,
                "peak_mb": peak,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fcil-predict-") as scratch:
        place = Path(scratch)
        made = federation(place / "f")
        folder = digits(place / "shots", 600, 600 + options.images)
        measure(options, place, made, folder)


def measure(options: argparse.Namespace, place: Path, made: LocalFederation, folder: Path) -> None:
    environment = {**made.environment(), "OMP_NUM_THREADS": str(options.threads)}
    data = str(made.directory / "a")
    client = module_command("fcil_client")
    files = {}
    for precision in ("fp32", "fp16", "int8"):
        files[precision] = str(place / f"{precision}.onnx")
        export = ["export", "--onnx", files[precision], "--precision", precision, "--data", data]
        subprocess.run([*client, *export], env=environment, check=True, capture_output=True)
    ways = {
        "current, torch": ("current", "torch"),
        "current, onnxruntime": ("current", "onnx"),
        **{f"file, {p}": (path, "auto") for p, path in files.items()},
    }
    shot = str(next(folder.rglob("*.png")))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    right = {}
    for turn in range(options.repeats):
        for name, (source, engine) in ways.items():
            which = (
                ["--model", source] if source != "current" else ["--data", data, "--engine", engine]
            )
            command = [*client, "predict", shot, *which, "--threads", str(options.threads)]
            began, before = time.perf_counter(), _children_cpu_s()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            took, busy = time.perf_counter() - began, _children_cpu_s() - before
            inside = [sys.executable, __file__, "--child", source, engine, data, str(folder),
                      str(options.threads), str(options.batch)]  # fmt: skip
            done = subprocess.run(inside, env=environment, check=True, capture_output=True)
            found[name].append(
                {"command_s": took, "command_cpu_s": busy, **json.loads(done.stdout)}
            )
            if not turn:
                right[name] = accuracy([*client, "predict", str(folder), *which], environment)
    print(
        "| way | one image, whole command, s | its CPU, s | warm, one image, ms | images/s | "
        "CPU an image, ms | peak, MB | right |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, rows in found.items():
        m = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"| {name} | {m['command_s']:.2f} | {m['command_cpu_s']:.2f} | {m['warm_ms']:.1f} | "
            f"{m['per_s']:.0f} | {m['cpu_ms']:.2f} | {m['peak_mb']:.0f} | {right[name]:.1%} |"
        )
    load = os.getloadavg()[0]
    print(f"\nload average at the end {load:.1f} on {os.cpu_count()} cores", file=sys.stderr)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def accuracy(command: list[str], environment: dict[str, str]) -> float:
    done = subprocess.run(
        [*command, "--format", "jsonl"], env=environment, check=True, capture_output=True, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return sum(r["top"][0]["name"] == Path(r["image"]).parent.name for r in rows) / len(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
