"""scripts/gpu: its budget, its page, its sections' processes, its Python; a small run on a CPU."""

from __future__ import annotations

import importlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = {"torch": "2.13.0+cpu", "python": "3.11.7"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    return importlib.import_module("gpu")


@pytest.fixture
def machine(gpu):
    return gpu.gpu_machine


class TestBudget:
    def test_a_section_gets_its_part_of_the_time_that_is_left(self, gpu):
        assert gpu.share(100 + gpu.STOP_S, [1, 3]) == 25
        assert gpu.share(100 + gpu.STOP_S, [3]) == 100

    def test_time_to_stop_is_never_given_away(self, gpu):
        assert gpu.share(gpu.STOP_S - 1, [1, 1]) == 0

    def measure(self, gpu, page, words, seconds):
        gpu.measure(gpu.arguments(words), "python", page, page.file, seconds, clock=lambda: 0.0)

    def test_no_section_begins_without_time(self, gpu, page, monkeypatch):
        monkeypatch.setattr(gpu, "run_section", None)
        self.measure(gpu, page, ["--data", str(ROOT)], gpu.STOP_S + 1)
        assert written(page).count("Not run: no time is left.") == len(gpu.SECTIONS)

    def test_what_a_section_leaves_goes_to_the_next_and_a_cell_that_cannot_run_gets_none(
        self, gpu, page, monkeypatch
    ):
        given = {}
        take = lambda command, seconds, *_: given.update({command[2]: seconds})  # noqa: E731
        monkeypatch.setattr(gpu, "run_section", take)
        self.measure(gpu, page, [], 800 + gpu.STOP_S)
        assert given == {"features": 100, "training": 800 * 3 / 7, "aggregation": 400,
                         "federation": 800}  # fmt: skip
        assert "needs the images of cifar100, and --data was not given" in written(page)


@pytest.fixture
def page(gpu, tmp_path):
    with (tmp_path / "gpu.md").open("w") as file:
        yield gpu.Page(file, tmp_path / "gpu.log")


def written(page):
    return Path(page.file.name).read_text()


class TestPage:
    def row(self, *cells, fits=None):
        return {"row": cells, "fits": fits}

    def test_every_line_is_in_the_file_as_soon_as_it_is_there(self, gpu, page):
        section = gpu.SECTIONS[0]
        page.take(section, {"head": ["a", "b"]})
        page.take(section, self.row("1", "x|y"))
        assert written(page) == "\n| a | b |\n|---|---|\n| 1 | x/y |\n"
        page.take(section, self.row("2", "z"))
        assert written(page).endswith("| 1 | x/y |\n| 2 | z |\n")

    def test_a_failure_is_a_sentence_with_the_log_and_the_table_continues(self, gpu, page):
        section = gpu.SECTIONS[0]
        page.take(section, {"head": ["a"]})
        page.take(section, self.row("1", fits=True))
        page.take(section, {"failed": "hgp: out of memory."})
        page.take(section, self.row("2"))
        assert "\nFailed: hgp: out of memory. The log is" in written(page)
        assert written(page).endswith("\n\n| a |\n|---|\n| 2 |\n")
        assert page.end(1.0) == gpu.EXIT_FAILED

    def test_one_comparison_out_of_tolerance_decides_the_exit_code(self, gpu, page):
        page.take(gpu.SECTIONS[0], {"head": ["a"]})
        page.take(gpu.SECTIONS[0], self.row("1", fits=False))
        page.take(gpu.SECTIONS[1], {"failed": "x"})
        assert page.end(1.0) == gpu.EXIT_TOLERANCE == 1
        assert f"Out of tolerance: {gpu.SECTIONS[0].title}." in written(page)

    def test_rows_that_compare_nothing_decide_nothing(self, gpu, page):
        page.take(gpu.SECTIONS[0], {"head": ["a"]})
        page.take(gpu.SECTIONS[0], self.row("1"))
        page.take(gpu.SECTIONS[0], self.row("2", fits=True))
        assert page.end(1.0) == 0
        assert "all 1 that were made" in written(page)


class TestSectionProcess:
    def run(self, gpu, code, seconds=60.0):
        messages, log = [], io.StringIO()
        with Path("/dev/null").open("w") as errors:
            log.fileno = errors.fileno
            gpu.run_section([sys.executable, "-c", code], seconds, messages.append, log)
        return messages, log.getvalue()

    def test_messages_are_passed_on_and_a_librarys_words_go_to_the_log(self, gpu):
        code = """print('{"note": "one"}\\na warning\\n7\\n{"other": 1}\\n{"end": true}')"""
        messages, log = self.run(gpu, code)
        assert messages == [{"note": "one"}]
        assert log == 'a warning\n7\n{"other": 1}\n'

    def test_a_process_that_dies_has_failed(self, gpu):
        messages, _ = self.run(gpu, """print('{"note": "one"}'); raise SystemExit(9)""")
        assert messages == [{"note": "one"}, {"failed": "its process ended with code 9."}]

    def test_one_that_does_not_end_is_killed(self, gpu, monkeypatch):
        monkeypatch.setattr(gpu, "STOP_S", 0.0)
        code = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
        messages, _ = self.run(gpu, code, seconds=0.0)
        assert messages == [{"failed": f"its process ended with signal {signal.SIGKILL}."}]


class TestMachine:
    @pytest.fixture(autouse=True)
    def _places(self, machine, monkeypatch, tmp_path):
        monkeypatch.setattr(machine, "VENV", tmp_path / "venv")

    @pytest.mark.parametrize("torch", [True, False])
    def test_without_a_gpu_there_is_one_sentence_and_nothing_is_installed(
        self, gpu, machine, torch, monkeypatch, tmp_path, capsys
    ):
        monkeypatch.setattr(machine, "has_torch", lambda: torch)
        monkeypatch.setattr(machine, "has_nvidia", lambda: False)
        monkeypatch.setattr(machine, "facts_of", lambda *_: TORCH)
        monkeypatch.setattr(machine, "find_python", None)
        out = tmp_path / "gpu.md"
        before = signal.getsignal(signal.SIGTERM)
        assert gpu.main(["--out", str(out)]) == gpu.EXIT_UNUSABLE
        assert signal.getsignal(signal.SIGTERM) is before
        said = capsys.readouterr()
        assert said.out == ""
        why = (
            "torch 2.13.0+cpu sees no GPU 'cuda' here"
            if torch
            else "this machine has no NVIDIA GPU"
        )
        assert said.err == (
            f"scripts/gpu: {why}; run it where there is one, or the same sections small with "
            "--device cpu.\n"
        )
        assert not out.exists()

    def test_a_torch_that_cannot_be_imported_is_named(self, machine, tmp_path):
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.13' >&2\nexit 1\n")
        python.chmod(0o755)
        with pytest.raises(machine.Unusable, match=r"torch cannot be used in .*libcudart\.so\.13"):
            machine.facts_of(str(python), "cuda")

    def test_a_folder_that_lacks_a_wheel_is_named_with_the_wheel(self, machine):
        words = (
            "ERROR: Could not find a version\nERROR: No matching distribution found for pyzmq>=27\n"
        )
        said = machine.why_not_installed(words, Path("wheels"))
        assert said.startswith("the folder of wheels wheels has no pyzmq>=27 for Python 3.")
        assert "--wheels DIR" in machine.why_not_installed(words, None)
        assert machine.why_not_installed("a\nno space left\n", None).endswith(": no space left")

    def test_a_folder_of_wheels_that_is_not_there_is_named(self, machine, tmp_path):
        with pytest.raises(machine.Unusable, match="there is no such folder"):
            machine.find_python(tmp_path / "none", io.StringIO())

    def test_a_python_that_has_all_is_used_as_it_is(self, machine, tmp_path):
        assert machine.lacking() == []
        assert machine.find_python(tmp_path, io.StringIO()) == sys.executable

    def test_what_is_missing_is_found_by_name_for_the_extras_that_are_needed(
        self, machine, monkeypatch
    ):
        needs = ["numpy>=2", "no-such-a; extra == 'server'", "no-such-b; extra == 'fuzz'"]
        monkeypatch.setattr(machine.importlib.metadata, "requires", lambda _: needs)
        assert machine.lacking() == ["no-such-a"]

    def test_the_torch_that_is_there_stays_and_wheels_are_the_only_source(self, machine):
        commands = machine.pip_commands("python", Path("wheels"))
        for command in commands:
            assert command[:3] == ["python", "-m", "pip"]
            assert " --no-index --find-links wheels " in " ".join(command)
            fixed = Path(command[command.index("--constraint") + 1]).read_text()
            assert fixed == f"torch=={machine.importlib.metadata.version('torch')}\n"
        assert commands[-1][-1] == f"{ROOT}[server,client,demo]"
        assert "--no-index" not in machine.pip_commands("python", None)[0]

    def test_without_torch_and_wheels_the_projects_own_environment_is_made(
        self, machine, monkeypatch
    ):
        ran = []
        monkeypatch.setattr(machine, "has_torch", lambda: False)
        monkeypatch.setattr(machine, "lacking", lambda: ["fcil"])
        monkeypatch.setattr(machine, "_run", lambda command, *_: ran.append(command))
        assert machine.find_python(None, io.StringIO()) == str(ROOT / ".venv" / "bin" / "python")
        assert ran == [[str(ROOT / "scripts" / "venv"), "server,client,demo"]]

    def test_an_environment_finds_the_packages_of_the_one_that_made_it(self, machine, tmp_path):
        python = machine.make_venv(tmp_path / "venv")
        code = """
import importlib.util, json, sys
print(json.dumps([sys.prefix, importlib.util.find_spec("torch").origin]))
"""
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        prefix, origin = json.loads(done.stdout)
        assert prefix == str(tmp_path / "venv")
        assert origin == importlib.util.find_spec("torch").origin


class TestArguments:
    def test_sections_are_chosen_by_name(self, gpu, capsys):
        assert gpu.arguments(["--sections", "cell,features"]).sections == ["cell", "features"]
        with pytest.raises(SystemExit):
            gpu.arguments(["--sections", "speed"])
        assert "no section 'speed'; there are features, training" in capsys.readouterr().err

    def test_files_that_are_not_there_are_refused_before_any_work(self, gpu, capsys, tmp_path):
        with pytest.raises(SystemExit):
            gpu.arguments(["--data", str(tmp_path / "images.zip")])
        assert "there is no" in capsys.readouterr().err

    def test_a_file_that_is_no_experiment_is_named(self, gpu):
        args = gpu.arguments(["--experiment", str(ROOT / "LICENSE")])
        assert gpu.why_no_cell(args).endswith("LICENSE is no experiment (docs/lab.md).")

    def test_digits_need_no_data(self, gpu):
        args = gpu.arguments(["--experiment", str(ROOT / "experiments" / "digits.toml")])
        assert gpu.why_no_cell(args) == ""


@pytest.mark.full
class TestSections:
    @pytest.fixture
    def sections(self, gpu):
        return importlib.import_module("gpu_sections")

    def wanted(self, sections, tmp_path, ends):
        return sections.Wanted(
            device="cpu", backbone="embedded", weights=None, clients=2, data=None, experiment="",
            only="", work=str(tmp_path), ends=ends,
        )  # fmt: skip

    def test_a_section_stops_itself_when_its_time_is_up(
        self, sections, tmp_path, monkeypatch, capsys
    ):
        cleaned = []

        def endless(_):
            try:
                yield sections.head("a")
                signal.pause()
            finally:
                cleaned.append(True)

        monkeypatch.setitem(sections.SECTIONS, "features", endless)
        before = [signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGTERM)]
        try:
            sections.run("features", self.wanted(sections, tmp_path, time.monotonic() + 0.5))
        finally:
            for number, handler in zip((signal.SIGALRM, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert said[-2:] == [sections.note("It was stopped here: its time was up."), {"end": True}]
        assert cleaned or said[0] != sections.head("a")

    def test_a_state_differs_by_its_worst_tensor(self, sections):
        import numpy as np

        def state(a, b):
            return sections.State({"a": np.array(a), "b": np.array(b)})

        one = state([3.0, 4.0], [1, 2])
        assert sections.largest_difference(one, one) == (0.0, "-")
        assert sections.largest_difference(state([3.0, 4.5], [1, 2]), one) == (0.1, "a")
        assert sections.largest_difference(state([3.0, np.nan], [1, 2]), one)[0] == float("inf")
        assert sections.largest_difference(state([3.0], [1, 2]), one) == (float("inf"), "a")
        assert sections.largest_difference(sections.State({"a": one.tensors["a"]}), one)[1] == "b"

    def test_factors_are_compared_by_their_product(self, sections):
        import numpy as np

        rng = np.random.default_rng(0)
        left, right = rng.standard_normal((5, 2)), rng.standard_normal((2, 4))
        turn = np.array([[0.6, -0.8], [0.8, 0.6]])
        one = sections.State({"x.L": left, "x.R": right, "y.L": left})
        other = sections.State({"x.L": left @ turn, "x.R": turn.T @ right, "y.L": left})
        distance, name = sections.largest_difference(other, one)
        assert distance < 1e-12
        more = sections.State({"x.L": left, "x.R": 1.5 * right, "y.L": left})
        distance, name = sections.largest_difference(more, one)
        assert (round(distance, 9), name) == (0.5, "x")
        fewer = sections.State({"x.L": left[:, :1], "x.R": right, "y.L": left})  # no product
        assert sections.largest_difference(fewer, one)[0] == float("inf")

    def test_rounds_of_a_papers_cell_are_counted_before_it_runs(self, sections):
        processes = importlib.import_module("gpu_processes")
        experiment = processes.load(ROOT / "experiments" / "not-run" / "cifar100-pilora.toml")
        only = [f"{experiment.rows[0].title}/{experiment.partitions[0].name}"]
        engine = processes.Engine.of(
            experiment, None, only=only, seeds=experiment.setting.seeds[:1]
        )
        [cell] = engine.chosen
        assert processes.planned_rounds(experiment, cell) == 10 * 30

    @pytest.mark.processes
    @pytest.mark.timeout(3000)
    def test_all_of_it_runs_small_without_a_gpu(self, tmp_path):
        out = tmp_path / "gpu.md"
        command = [ROOT / "scripts" / "gpu", "--device", "cpu", "--out", out, "--clients", "2"]
        command += ["--experiment", ROOT / "experiments" / "digits.toml", "--seconds", "6000"]
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=False
        )
        table = out.read_text()
        assert done.returncode == 0, table + done.stderr + out.with_suffix(".log").read_text()
        assert table == done.stdout
        for begin in (
            "| embedded | cpu | fp32 | 0.0e+00 | yes |",
            "| pilora | fp32 | 8 |",
            "| pilora | bf16 | 8 |",
            "| pilora | 0 | 2 | 0.0e+00 |",
            "| hgp-diag | 0 | 2 | 0.0e+00 |",
            "| task 0, train 0 | 2 |",
            "| all, with handshakes | 2 |",
            "| FedNCM/alpha=1/1 | 5 | 5 |",
        ):
            assert f"\n{begin}" in table
        assert "Comparisons within their tolerance: all 3 that were made." in table
