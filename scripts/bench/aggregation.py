"""Seconds and memory of the server's work in a round, with updates as large as ViT-B/16's.

What is measured is ``Aggregator.aggregate``, fed as the server's worker feeds it: a state read
from its bytes, and `fcil_server.aggregation.pulled_updates.PulledUpdates`, which pulls an update
when its turn comes. Here the updates lie in files (`vit_updates`); reading and unpacking them is
part of the seconds, decryption and the pipe to the daemon are not.

Every measurement is a process of its own, unless all run ``--together``. Peak memory is the
largest resident set during the calls minus the resident set before them; the kernel's high-
water mark is reset in between, as getrusage alone would also count the imports. The peer, in
the same process, is a bare numpy loop that adds up the same tensors in float64, weighted, and
does nothing else. On a busy machine the CPU's seconds say more than the clock's.

    .venv/bin/python scripts/bench/aggregation.py --out aggregation.json
    .venv/bin/python scripts/bench/aggregation.py --cases hepco --clients 100 --steps 5
    .venv/bin/python scripts/bench/aggregation.py --clients 2 10 30 100 --tasks 1 --together
    .venv/bin/python scripts/bench/aggregation.py --average
    .venv/bin/python scripts/bench/aggregation.py --device cuda
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vit_updates import CASES, VIT, Job, open_updates, prepare

from fcil_adapters.contract import Progress, State, Updates
from fcil_adapters.contract.registry import load_half
from fcil_adapters.numerics.averaging import weighted_mean
from fcil_adapters.numerics.client_weights import sample_weights
from fcil_protocol.payloads.payload import Payload, pack, unpack
from fcil_protocol.payloads.schema import Kind

TASKS = 2
ENOUGH_S = 60.0  # no further repetition once a measurement took this long

# --- a process that measures ----------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What repeated calls cost.

    Attributes:
        wall_s, cpu_s: medians, of one call.
        peak_bytes: the most resident memory during any of them, above that before the first.
    """

    wall_s: float
    cpu_s: float
    runs: int
    peak_bytes: int


def cost_of(call: Callable[[], Any], repeat: int) -> tuple[Cost, Any]:
    """Repeat a call; return its cost and its last result."""
    wall: list[float] = []
    cpu: list[float] = []
    before = at_rest()
    result = None
    while len(wall) < repeat and sum(wall) < ENOUGH_S:
        result = None  # the last result is no part of the next call's memory
        began = time.perf_counter(), time.process_time()
        result = call()
        wall.append(time.perf_counter() - began[0])
        cpu.append(time.process_time() - began[1])
    peak = status_bytes("VmHWM") - before
    return Cost(statistics.median(wall), statistics.median(cpu), len(wall), peak), result


def measure(job: Job) -> dict[str, Any]:
    """Measure the aggregation and its peer; the last result becomes the state of the next task."""
    samples = open_updates(job).samples
    ticks: list[float] = []
    device = Device(job.device)
    clock = time.perf_counter if device.cuda else time.process_time
    whole = aggregation(job, lambda _: ticks.append(clock()))

    def aggregate() -> Any:
        ticks.clear()
        if job.average:
            return Payload(weighted_mean(open_updates(job), averaged(job), shares, job.device))
        return whole()

    shares = sample_weights(samples)
    cost, result = cost_of(aggregate, job.repeat)
    device_peak = device.peak()
    job.path("state").write_bytes(pack(result))
    del result
    bare, _ = cost_of(lambda: bare_mean(open_updates(job)), job.repeat)
    sizes = [path.stat().st_size for path in job.path("updates").iterdir()]
    return {
        **asdict(cost),
        "bare": asdict(bare),
        "device_peak_bytes": device_peak,
        "update_bytes": sum(sizes) // len(sizes),
        "state_bytes": job.path("state").stat().st_size,
        "missing_s": missing_seconds(job, ticks),
    }


def aggregation(
    job: Job, progress: Callable[[Progress], None] = lambda _: None
) -> Callable[[], State]:
    """Return the call of the aggregator that is measured."""
    aggregator = load_half(job.method.aggregator)
    state = unpack(job.path("state").read_bytes())
    ctx = job.context("train", progress)
    # Nothing is kept from the last repetition: the updates are opened again.
    return lambda: aggregator.aggregate(ctx, state, open_updates(job))


def averaged(job: Job) -> list[str]:
    """Return the names of what all clients send in one shape, and every server averages."""
    [exchange] = [e for e in job.method.exchanges(job.hparams, VIT) if e.kind == "train"]
    kinds = {Kind.LORA, Kind.PROMPT, Kind.KEY, Kind.HEAD}
    return [spec.name for spec in exchange.upload.tensors if spec.kind in kinds]


def bare_mean(updates: Updates) -> dict[str, NDArray[np.float64]]:
    """Average all float tensors that have the same shape on all clients."""
    total = sum(updates.samples)
    sums: dict[str, NDArray[np.float64]] = {}
    uneven = set()
    for n, update in zip(updates.samples, updates, strict=True):
        for name, array in update.payload.tensors.items():
            if array.dtype.kind != "f" or name in uneven:
                continue
            term = np.asarray(array, dtype=np.float64) * (n / total)
            if name not in sums:
                sums[name] = term
            elif sums[name].shape == term.shape:
                sums[name] += term
            else:
                uneven.add(name)
                del sums[name]
    return sums


def missing_seconds(job: Job, ticks: list[float]) -> float | None:
    """Extrapolate the steps of HePCo's server that were not run, from the time of one step.

    Each loop (generators, each block's pools, head) has its own: the median over its steps, in
    seconds of the CPU, on a GPU of the clock.
    """
    if job.average or job.hparams == job.run_hparams:
        return None
    run, full = loops(job.run_hparams, job.task), loops(job.hparams, job.task)
    assert len(ticks) == sum(run), "HePCo's loops are not those that this script knows"
    missing, at = 0.0, 0
    for some, everything in zip(run, full, strict=True):
        missing += (everything - some) * float(np.median(np.diff(ticks[at : at + some])))
        at += some
    return missing


def loops(h: Any, task: int) -> list[int]:
    """Return the steps of the loops of HePCo's server, in their order."""
    generators = [h.generator_steps, *([h.old_generator_steps(task)] if task else [])]
    return [*generators, *[h.distillation_steps] * (len(h.blocks) + 1)]


def at_rest() -> int:
    """Give freed memory back to the system, reset the high-water mark; return resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


class Device:
    """Where torch computes; made ready here, so that no measurement pays for it.

    Torch's optimisers import a lot at their first step, and a worker pays that once.
    """

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self.cuda = torch.cuda if name.startswith("cuda") else None
        for optimiser in (torch.optim.SGD, torch.optim.Adam):
            values = torch.nn.Parameter(torch.ones(8, 8, device=name, dtype=torch.float64))
            steps = optimiser([values], lr=0.1)
            torch.linalg.qr(values @ values)[0].sum().backward()
            steps.step()
        if self.cuda:
            self.cuda.reset_peak_memory_stats(name)

    def peak(self) -> int | None:
        """Return the largest size of torch's allocations on a GPU; None on the CPU."""
        return int(self.cuda.max_memory_allocated(self.name)) if self.cuda else None


# --- the process that starts the others -----------------------------------------------------


def child(step: str, job: Job, threads: int) -> dict[str, Any]:
    count = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
    command = [sys.executable, __file__, "--child", step, json.dumps(asdict(job))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job.case}, {job.clients} clients, task {job.task}: {step} failed.")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(step: str, job: Job, _threads: int) -> dict[str, Any]:
    return {"prepare": prepare, "measure": measure}[step](job)


def rows_of(job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the tasks of a case; a task starts from the state in which the last one ended."""
    run = here if args.together else child
    folder = Path(tempfile.mkdtemp(prefix="fcil-aggregation-"))
    rows = []
    try:
        for task in range(1 if job.average else args.tasks):
            now = replace(job, task=task, folder=str(folder))
            run("prepare", now, args.threads)
            rows.append({**asdict(now), **run("measure", now, args.threads)})
            del rows[-1]["folder"]
            print(line_of(rows[-1]), flush=True)
            shutil.rmtree(folder / "updates")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table; the ratio is of CPU seconds, on a GPU of the clock's."""
    bare, missing = row["bare"], row["missing_s"]
    cpu = row["device_peak_bytes"] is None
    ours, theirs = (r["cpu_s"] if cpu else r["wall_s"] for r in (row, bare))
    took = [number(row["wall_s"]), number(row["cpu_s"])]
    if missing is not None:
        took[cpu] += f" ({row['steps']} steps); extrapolated: {number(ours + missing)}"
        ours += missing
    cells = [row["case"], str(row["clients"]), str(row["task"])]
    cells += [f"{row['update_bytes'] / 1e6:.2f}", f"{row['state_bytes'] / 1e6:.1f}"]
    cells += [*took, str(row["runs"]), number(bare["cpu_s"]), number(ours / theirs)]
    cells += [f"{row['peak_bytes'] / 1e6:.0f}", f"{bare['peak_bytes'] / 1e6:.0f}"]
    if not cpu:
        cells += [f"{row['device_peak_bytes'] / 1e6:.0f}"]
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def header(device: str) -> str:
    names = ["case", "clients", "task", "update MB", "state MB", "s", "CPU s", "runs"]
    names += ["bare CPU s", "ratio", "peak MB", "bare peak MB"]
    names += ["GPU peak MB"] if device != "cpu" else []
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--repeat", type=int, default=3, help="seconds are the median of so many")
    parser.add_argument("--images", type=int, default=50, help="per class and client, on average")
    parser.add_argument(
        "--steps", type=int, help="run so many steps of each of HePCo's loops, extrapolate the rest"
    )
    parser.add_argument(
        "--average", action="store_true", help="the weighted mean alone, in the first task"
    )
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument(
        "--together", action="store_true", help="measure all in this process, which is quicker"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("STEP", "JOB"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        step = {"prepare": prepare, "measure": measure}[args.child[0]]
        print(json.dumps(step(Job(**json.loads(args.child[1])))))
        return
    print(f"{platform.platform()}, Python {platform.python_version()}, {args.threads} threads")
    print(header(args.device), flush=True)
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        for clients in args.clients:
            job = Job(
                case=case,
                clients=clients,
                task=0,
                images=args.images,
                seed=args.seed,
                device=args.device,
                repeat=args.repeat,
                steps=args.steps,
                average=args.average,
                options={k: json.loads(v) for k, _, v in (o.partition("=") for o in args.option)},
                folder="",
            )
            rows += rows_of(job, args)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
