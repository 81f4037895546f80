"""A child process: what it gets from its parent, how it ends, and that no parent outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_protocol.process import children
from fcil_protocol.process.child import GONE
from fcil_protocol.process.children import LAUNCHER, ChildProcess, module_command, wait_or_kill
from orphans import ends_with_its_parent
from planted import plant

PROGRAM = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print(sys.argv[1:], os.path.basename(sys.argv[0]), __name__, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write modules of the test's that children may run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(name: str, text: str) -> str:
        (folder / f"{name}.py").write_text(text)
        return name

    return write


def child_of(*words: str) -> ChildProcess:
    return ChildProcess(module_command(*words), stdout=subprocess.PIPE)


def plain(text: str) -> ChildProcess:
    """Start a child that has no part in the rule."""
    return ChildProcess([sys.executable, "-IS", "-c", text], stdout=subprocess.PIPE)


# --- the launcher ---------------------------------------------------------------------------


def test_a_launched_program_runs_as_by_itself_and_ends_in_order_or_with_the_pipe(module):
    name = module("program", PROGRAM)
    for asks, code in ((lambda p: p.send_signal(signal.SIGINT), 7), (lambda p: p.ask(), GONE)):
        with child_of(LAUNCHER, name, "a", "--b") as child:
            assert child.stdout.readline() == b"['a', '--b'] program.py __main__\n"
            asks(child)
            assert child.wait(60) == code


def test_a_launched_program_gets_no_module_from_the_current_directory(
    module, tmp_path, monkeypatch
):
    name = module("program", "import json, PIL")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(plant(tmp_path / "data", tmp_path / "marks"))
    with child_of(LAUNCHER, name) as child:
        assert child.wait(60) == 0
    assert list((tmp_path / "marks").iterdir()) == []


def test_nothing_that_a_program_reads_or_closes_or_starts_has_the_pipe(module):
    """A library that asks a question gets no answer, and a program that it starts neither."""
    text = (
        "import os, subprocess, sys, threading\n"
        "print(repr(sys.stdin.read()), subprocess.run(['cat']).returncode, flush=True)\n"
        "os.close(0)\n"
        "threading.Event().wait()\n"
    )
    with child_of(LAUNCHER, module("program", text)) as child:
        assert child.stdout.readline() == b"'' 0\n"
        child.ask()
        assert child.wait(60) == GONE


# --- kill -9 of the parent ------------------------------------------------------------------

PARENT = """
import os, subprocess, sys
from fcil_protocol.process.children import LAUNCHER, ChildProcess, module_command
child = ChildProcess(module_command(LAUNCHER, "program"), stdout=subprocess.PIPE)
child.stdout.readline()
{forks}
print(child.pid, flush=True)
sys.stdin.read()
"""
FORKS = """
if not os.fork():
    sys.stdin.read()  # until the test has seen the child's end
    os._exit(0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("forks", ["", FORKS], ids=["alone", "with a process that it has forked"])
def test_a_launched_program_ends_with_a_parent_that_is_killed(module, forks):
    module("program", PROGRAM)
    ends_with_its_parent(PARENT.format(forks=forks))


@pytest.mark.processes
def test_it_ends_although_a_process_that_it_has_forked_or_started_lives_on(module, tmp_path):
    """A data loader, or a shell: neither has the end of the pipe that counts."""
    path = tmp_path / "left"
    text = (
        "import os, subprocess, time\n"
        "shell = subprocess.Popen(['sleep', '600'])\n"
        "if not (loader := os.fork()):\n"
        "    time.sleep(600)\n"
        f"open({str(path)!r}, 'w').write(f'{{shell.pid}} {{loader}}')\n"
    )
    module("program", text + PROGRAM)
    try:
        ends_with_its_parent(PARENT.format(forks=""))
    finally:
        for pid in map(int, path.read_text().split()):
            os.kill(pid, signal.SIGKILL)  # it is still there


# --- the parent's side ----------------------------------------------------------------------


def test_a_child_that_is_asked_ends_although_a_later_one_lives():
    """No child has the writing end of another's pipe."""
    with (
        plain("import sys; sys.stdin.read()") as first,
        plain("import sys; sys.stdin.read()") as later,
    ):
        first.ask()
        assert first.wait(60) == 0
        assert later.poll() is None
        later.stop(60)
        assert later.returncode == 0


def test_a_child_that_does_not_listen_is_killed_after_its_time():
    with plain("import signal; print(flush=True); signal.pause()") as child:
        child.stdout.readline()
        child.stop(0.0)
        assert child.returncode == -signal.SIGKILL


def test_one_that_hangs_in_the_kernel_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(children, "KILLED_S", 0.0)
    with plain("import sys; sys.stdin.read()") as child:
        right = child.kill
        monkeypatch.setattr(child, "kill", lambda: None)  # it takes no signal
        wait_or_kill(child, 0.0)
        assert child.poll() is None
        right()


def test_what_it_is_told_arrives_whole_unless_it_has_ended():
    most = 1 << 20  # more than a pipe holds
    text = f"import sys; print(len(sys.stdin.read({most})), flush=True); sys.stdin.read()"
    with plain(text) as child:
        child.tell(b"x" * most)
        assert child.stdout.readline() == b"%d\n" % most
        child.kill()
        child.wait()
        child.tell(b"x")


def test_its_end_is_waited_for_without_holding_up_others():
    async def end_of(text: str, signal_: int = 0) -> int:
        child = ChildProcess([sys.executable, "-IS", "-c", text])
        waiting = asyncio.ensure_future(child.ended())
        await asyncio.sleep(0)
        assert not waiting.done()
        if signal_:
            child.send_signal(signal_)
        child.ask()
        return await waiting

    async def both() -> list[int]:
        reads = "import sys; sys.stdin.read(); sys.exit(3)"
        return await asyncio.gather(end_of(reads), end_of("input()", signal.SIGKILL))

    assert asyncio.run(both()) == [3, -signal.SIGKILL]


def test_a_program_that_is_not_there_is_an_error_and_leaves_no_descriptor():
    held = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/nowhere/python"])
    assert len(list(Path("/proc/self/fd").iterdir())) == held
