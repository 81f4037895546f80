"""The command line of `scripts/gpu`: one table of what fcil does on a machine with a CUDA GPU.

    scripts/gpu --out gpu.md                        about ten minutes
    scripts/gpu --out gpu.md --data cifar100.zip    ends with a cell of a paper's table
    scripts/gpu --device cpu                        the same sections, small, without a GPU

Every section is a process of its own, and what it finds is written at once, to the terminal and to
the file: a run that is cut off keeps what it had. Tracebacks and pip's words are in a log beside
the file. Time that a section does not need goes to those after it; none begins that could not end.

Packages: if this Python has all, it is used; otherwise, if it has a torch, that torch is used and
the rest goes into an environment under local/ that finds this Python's packages as well; otherwise
`scripts/venv` makes .venv. With --wheels DIR a folder is the only source of packages.

A lent machine that is offline and has a torch for CUDA. Where pip works, fetch the wheels for its
Python (here 3.12); remove what is large and what it has:

    python3 scripts/locked.py server,client,demo a.txt b.txt
    python3 -m pip download --no-deps --require-hashes --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 -d .whl -r a.txt -r b.txt
    rm .whl/{numpy,scipy,scikit_learn,matplotlib,pillow}-*      # of 114 MB, 36 MB remain

Where a machine runs one command in a copy of the working tree and returns only what is under $OUT,
let .whl travel with the tree (where git ignores it, name it among the ignored paths to carry; so
with the files of --weights and --data), and stop before the command's own limit:

    scripts/gpu --wheels .whl --seconds 540 --out "$OUT/gpu.md"

Exit codes: 0; 1: a comparison is out of tolerance; 3: a section failed; 4: no GPU, or packages are
missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import gpu_machine
from gpu_machine import ROOT, Unusable

CODE = Path(__file__).with_name("gpu_sections.py")
STOP_S = 25.0  # for a section to end after its time is up: its daemons are asked before killed
LEAST_S = 10.0  # with less, a section does not begin
EXIT_TOLERANCE, EXIT_FAILED, EXIT_UNUSABLE, EXIT_INTERRUPTED = 1, 3, 4, 130


@dataclass(frozen=True)
class Section:
    """A part of the table; ``weight``: its part of the time beside those of the others."""

    name: str
    title: str
    weight: float


SECTIONS = (
    Section("features", "Features compared with the CPU's", 1),
    Section("training", "Training steps compared with bare timm", 3),
    Section("aggregation", "Aggregators compared with the CPU's", 2),
    Section("federation", "A federation of processes on one device", 2),
    Section("cell", "One cell of a paper's table", 8),
)


def share(left_s: float, weights: Sequence[float]) -> float:
    """Return the seconds of the first of the sections that are still to be run.

    Args:
        left_s: until the end of everything.
        weights: of these sections, in order.
    """
    return max(0.0, left_s - STOP_S) * weights[0] / sum(weights)


# --- the page -------------------------------------------------------------------------------


@dataclass
class Page:
    """The file and the terminal, which get every line at once.

    Attributes:
        log: the path of the log, for people.
        outside: sections with a comparison that is out of its tolerance; ``failed``: those with
            an error.
        compared: the number of comparisons that have a tolerance.
    """

    file: IO[str]
    log: Path
    compared: int = 0
    outside: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _head: Sequence[str] = ()
    _in_table: bool = False

    def write(self, text: str) -> None:
        """Write a paragraph; a row that follows it gets its table's head again."""
        self._put("", text)
        self._in_table = False

    def take(self, section: Section, message: dict[str, Any]) -> None:
        """Write what a section found: the head of a table, a row, a note, or its failure."""
        if "head" in message:
            self._head = message["head"]
        elif "row" in message:
            if not self._in_table:
                self._put("", _row(self._head), "|---" * len(self._head) + "|")
                self._in_table = True
            self._put(_row(message["row"]))
            self.compared += message["fits"] is not None
            if message["fits"] is False and section.title not in self.outside:
                self.outside.append(section.title)
        elif "failed" in message:
            self.failed.append(section.title)
            self.write(f"Failed: {message['failed']} The log is {self.log}.")
        else:
            self.write(message["note"])

    def end(self, seconds: float) -> int:
        """Write the last lines; return the exit code."""
        if self.failed:
            self.write(f"With an error: {'; '.join(dict.fromkeys(self.failed))}.")
        if self.outside:
            self.write(f"Out of tolerance: {'; '.join(self.outside)}.")
        elif self.compared:
            self.write(f"Comparisons within their tolerance: all {self.compared} that were made.")
        self.write(f"It took {seconds:.0f} s.")
        return EXIT_TOLERANCE if self.outside else EXIT_FAILED if self.failed else 0

    def _put(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            self.file.write(f"{line}\n")
        self.file.flush()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(c.replace('|', '/') for c in cells)} |"


# --- sections -------------------------------------------------------------------------------


def run_section(
    command: Sequence[str], seconds: float, take: Callable[[dict[str, Any]], None], log: IO[str]
) -> None:
    """Run a section's process and pass on what it says, line by line.

    Args:
        command: ends on its own after ``seconds``, and with the pipe that is its standard input; it
            is killed `STOP_S` later.
        seconds: its time.
        take: receives its messages.
        log: receives everything else that it writes.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        start_new_session=True,
    )  # fmt: skip
    killer = threading.Timer(seconds + STOP_S, _kill, [child])
    killer.start()
    said_end = False
    try:
        assert child.stdout is not None
        for line in child.stdout:
            message = _message(line)
            if message is None:
                log.write(line)
                log.flush()
                continue
            said_end = said_end or "end" in message
            if "end" not in message:
                take(message)
        child.wait()
    finally:
        killer.cancel()
        _stop(child)
    if not said_end:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"code {child.returncode}"
        take({"failed": f"its process ended with {how}."})


def _message(line: str) -> dict[str, Any] | None:
    """Return a section's message; None for anything else that a library prints."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and found.keys() & {"head", "row", "note", "failed", "end"}:
            return found
    return None


def _stop(child: subprocess.Popen[str]) -> None:
    """End a section that is still running: it ends its own processes when it is asked."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def why_no_cell(args: argparse.Namespace) -> str:
    """Return why the paper's cell cannot be run; empty if it can."""
    if args.data is not None:
        return ""
    try:
        data = tomllib.loads(args.experiment.read_text())["data"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"Not run: {args.experiment} is no experiment (docs/lab.md)."
    if data == "digits":  # they come with scikit-learn
        return ""
    return f"Not run: it needs the images of {data}, and --data was not given."


def measure(
    args: argparse.Namespace,
    python: str,
    page: Page,
    log: IO[str],
    ends: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the chosen sections, each in its part of the time that is left on the clock."""
    with _work_folder() as work:
        options = {
            "device": args.device, "backbone": args.backbone, "clients": args.clients,
            "weights": _text(args.weights), "data": _text(args.data), "only": args.only,
            "experiment": _text(args.experiment), "work": str(work),
        }  # fmt: skip
        left = [s for s in SECTIONS if s.name in args.sections]
        no_cell = why_no_cell(args)
        while left:
            running = [s for s in left if not (s.name == "cell" and no_cell)]
            section = left.pop(0)
            page.write(f"## {section.title}")
            if section not in running:
                page.write(no_cell)
                continue
            seconds = share(ends - clock(), [s.weight for s in running])
            if seconds < LEAST_S:
                page.write("Not run: no time is left.")
                continue
            wanted = json.dumps({**options, "ends": clock() + seconds})
            run_section(
                [python, str(CODE), section.name, wanted],
                seconds,
                lambda message, section=section: page.take(section, message),
                log,
            )


@contextmanager
def _work_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fcil-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


# --- the command ----------------------------------------------------------------------------


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [s.name for s in SECTIONS]
    default = ROOT / "local" / "gpu.md"
    parser.add_argument("--out", type=Path, default=default, help="the table (gpu.md in local/)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of everything (600)")
    parser.add_argument("--device", default="cuda", help="cuda (the default), cuda:N, or cpu")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="the only source of packages")
    parser.add_argument("--backbone", help="vit_base_patch16_224; embedded with --device cpu")
    parser.add_argument("--weights", type=Path, help="its safetensors file; random if not given")
    parser.add_argument("--clients", type=int, default=3, help="of the federation (3)")
    parser.add_argument("--data", type=Path, help="images of the experiment: folder or zip")
    parser.add_argument(
        "--experiment",
        type=Path,
        default=ROOT / "experiments" / "not-run" / "cifar100-pilora.toml",
        help="whose cell is run (experiments/not-run/cifar100-pilora.toml)",
    )
    parser.add_argument("--only", default="", metavar="ROW/PARTITION", help="the cell (the first)")
    parser.add_argument(
        "--sections", type=_names, default=names, metavar="NAME[,NAME]", help=", ".join(names)
    )
    found = parser.parse_args(words)
    if found.wheels is not None:
        found.wheels = found.wheels.resolve()  # pip runs in the tree's folder
    for path in (found.weights, found.data, found.experiment):
        if path is not None and not path.exists():
            parser.error(f"there is no {path}")
    if found.clients < 1 or not found.seconds > 0:
        parser.error("--clients and --seconds are at least 1")
    if found.backbone is None:
        found.backbone = "embedded" if found.device == "cpu" else "vit_base_patch16_224"
    return found


def _names(text: str) -> list[str]:
    chosen, known = text.split(","), [s.name for s in SECTIONS]
    if unknown := [name for name in chosen if name not in known]:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(known)}")
    return chosen


def heading(facts: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Return the first paragraphs: the machine, and what was asked."""
    where = facts.get("gpu") or f"{platform.machine()}, no GPU"
    memory = f" with {facts['gpu_gb']:.0f} GB" if "gpu_gb" in facts else ""
    own = args.backbone == "embedded"
    weights = "its own" if own else args.weights.name if args.weights else "random"
    said = [
        time.strftime("%Y-%m-%d"),
        f"{args.device}{memory}",
        f"{os.cpu_count()} cores",
        f"torch {facts['torch']}",
        f"Python {facts['python']}",
        *([f"fcil {facts['revision']}"] if facts.get("revision") else []),
        f"backbone {args.backbone}, weights: {weights}",
        f"{args.seconds:.0f} s at most",
    ]
    return [f"# fcil on {where}", f"{'; '.join(said)}."]


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(words: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    args = arguments(words)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    path = args.out.with_suffix(".log")
    with path.open("w") as log:
        try:
            gpu_machine.check_before(args.device)
            python = gpu_machine.find_python(args.wheels, log)
            facts = gpu_machine.facts_of(python, args.device)
            gpu_machine.check(facts, args.device)
        except Unusable as error:
            print(f"scripts/gpu: {error}", file=sys.stderr)
            return EXIT_UNUSABLE
        with args.out.open("w") as file:
            page = Page(file, path)
            for text in heading(facts, args):
                page.write(text)
            try:
                measure(args, python, page, log, began + args.seconds)
            except KeyboardInterrupt:
                page.write("It was interrupted here.")
                return EXIT_INTERRUPTED
            return page.end(time.monotonic() - began)
