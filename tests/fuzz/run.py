"""Searches for inputs that break a promise, guided by coverage. Called by scripts/fuzz.

Each target runs in a process of its own: libFuzzer does not return. Inputs that are found
are kept in the working directory, and are tried again with ``--input FILE``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

HANG_S = 25  # of wall time for one input; the harness's own bound is processor time
RSS_MB = 3072  # of the whole process; catches what Python's own accounting does not see
OURS = ["fcil_protocol", "fcil_adapters", "fcil_client", "fcil_server", "tomllib", "zipfile"]
_PULSE = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/")


def main() -> int:
    options = arguments()
    if options.inside:
        search(options.inside, Path(options.corpus), options.seconds, Path(options.findings))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import fuzz.targets as fuzz  # noqa: PLC0415  after the path is set, and never instrumented

    names = [options.target] if options.target else list(fuzz.TARGETS)
    unknown = set(names) - set(fuzz.TARGETS)
    if unknown:
        print(f"no target {unknown.pop()!r}; there are: {', '.join(fuzz.TARGETS)}", file=sys.stderr)
        return 4
    if options.input:
        return again(fuzz, names[0], Path(options.input))
    print("| target | executions | per second | coverage | features | corpus | findings |")
    print("|---|---|---|---|---|---|---|")
    found = [one_target(name, options) for name in names]
    return 1 if any(found) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", help="one target; without it all, one by one")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", help="directory to keep inputs in, from run to run")
    parser.add_argument("--findings", default="fuzz-findings", help="where findings are kept")
    parser.add_argument("--input", help="try one file and do not search")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def again(fuzz: object, name: str, path: Path) -> int:
    """Try one input, with a traceback if it breaks a promise."""
    from fuzz.harness import check  # noqa: PLC0415

    accepted = check(fuzz.TARGETS[name], path.read_bytes())
    print(f"{path} breaks no promise of {name} and was {'accepted' if accepted else 'refused'}.")
    return 0


def one_target(name: str, options: argparse.Namespace) -> bool:
    """Search one target; print a row of the table; return whether something was found."""
    findings = Path(options.findings) / name
    before = set(findings.glob("*"))
    # In memory: file targets write one file per input.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    scratch = tempfile.mkdtemp(prefix="fcil-fuzz-", dir=memory)
    corpus = Path(options.corpus) / name if options.corpus else Path(scratch) / "corpus"
    command = [sys.executable, __file__, "--inside", name, "--corpus", str(corpus)]
    command += ["--seconds", str(options.seconds), "--findings", str(findings)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": scratch}, capture_output=True, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(scratch)
    took = time.monotonic() - began
    new = sorted(set(findings.glob("*")) - before)
    pulses = _PULSE.findall(done.stderr)
    runs, coverage, features, size = pulses[-1] if pulses else ("0", "0", "0", "0")
    rate = int(runs) / max(took, 1)
    print(
        f"| `{name}` | {int(runs):,} | {rate:,.0f} | {coverage} | {features} | {size} | "
        f"{len(new)} |",
        flush=True,
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        for path in new:
            print(f"try it again: scripts/fuzz {name} --input {path}", file=sys.stderr)
    return bool(done.returncode)


def search(name: str, corpus: Path, seconds: int, findings: Path) -> None:
    """Fuzz one target in this process until the time is over; does not return."""
    import atheris  # noqa: PLC0415  only here: the rest works without

    with atheris.instrument_imports(include=OURS):
        import fuzz.targets as fuzz  # noqa: PLC0415
    from fuzz.harness import DEEP, SEARCH_S, check  # noqa: PLC0415
    from fuzz.mutate import mutate  # noqa: PLC0415

    warnings.simplefilter("error")  # as in the tests
    one = fuzz.TARGETS[name]
    seeds = list(one.seeds())
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate((*seeds, *DEEP)):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [
        f"-max_total_time={seconds}", f"-timeout={HANG_S}", f"-rss_limit_mb={RSS_MB}",
        f"-max_len={one.max_bytes}", f"-artifact_prefix={findings}/", "-print_final_stats=1",
    ]  # fmt: skip

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)  # noqa: S311
        if dice.random() < 0.5:
            return atheris.Mutate(data, max_size)
        # What lies in the corpus is often damaged already: then from a seed on.
        made = mutate(one.form, data, dice) or dice.choice(seeds)
        for _ in range(dice.randrange(3)):
            made = mutate(one.form, made, dice) or made
        return made[:max_size]

    options = {"custom_mutator": change} if one.form else {}
    atheris.Setup(
        [sys.argv[0], *flags, str(corpus)],
        lambda data: check(one, data, base_s=SEARCH_S) and None,
        **options,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
