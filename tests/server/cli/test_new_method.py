"""``fcil-server methods --new``: the package runs as it is, and a bad name gets one sentence."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_adapters.contract import Method
from fcil_adapters.contract.registry import load_method, package_of
from fcil_server.cli import new_method
from fcil_server.cli.main import app
from fcil_server.cli.new_method import MethodKind, write_method

ROOT = Path(__file__).resolve().parents[3]
NAME = "new_idea"


def ask(*arguments: str):
    return CliRunner().invoke(app, ["methods", *arguments])


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package and makes it importable, as PYTHONPATH does; it is forgotten afterwards."""

    def write(kind: MethodKind) -> Path:
        folder = tmp_path / NAME
        write_method(NAME, kind, folder)
        monkeypatch.syspath_prepend(folder)
        return folder

    yield write
    for name in [n for n in sys.modules if n.removeprefix("test_").split(".")[0] == NAME]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", MethodKind)
def test_its_own_test_passes(kind, package):
    package(kind)
    tests = vars(importlib.import_module(f"test_{NAME}"))
    chosen = [t for n, t in tests.items() if n.startswith("test_") and inspect.isfunction(t)]
    assert len(chosen) > 2
    for test in chosen:
        test()


@pytest.mark.parametrize("kind", MethodKind)
def test_it_is_found_by_its_entry_point_without_an_installation(kind, package):
    package(kind)
    method = load_method(NAME)
    assert isinstance(method, Method)
    assert method.name == NAME
    assert package_of(NAME) == "fcil-new-idea 1.0"
    assert method.learner == f"{NAME}.learner:Learner"


@pytest.mark.parametrize("kind", MethodKind)
def test_nothing_of_the_template_is_left(kind, package):
    folder = package(kind)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        text = str(path.relative_to(folder)) + path.read_text()
        assert "my_" not in text.replace("micro_", ""), path
        assert "my-" not in text, path
    assert {path.stem for path in files} >= {"pyproject", "NOTES", "learner", f"test_{NAME}"}


@pytest.mark.parametrize("kind", MethodKind)
def test_it_imports_the_contract_by_its_face_alone(kind, package):
    for path in package(kind).rglob("*.py"):
        text = path.read_text()
        assert "fcil_adapters.contract." not in text, path
        assert "fcil_protocol" not in text, path
        assert "fcil_adapters.methods" not in text, path


@pytest.mark.parametrize("kind", MethodKind)
def test_ruff_passes_on_it(kind, package):
    folder = package(kind)
    ruff = [str(Path(sys.executable).parent / "ruff")]
    sorted_as = f"lint.isort={{known-first-party=['{NAME}'], known-third-party=['fcil_adapters']}}"
    ours = ["--config", str(ROOT / "pyproject.toml")]
    strict = [*ours, "--config", sorted_as, "--config", "line-length=88", "--no-cache", "."]
    spared = [f"--extend-per-file-ignores=test_*.py:{rule}" for rule in ("ANN", "INP001")]
    for command in (
        ["check", *strict, *spared],
        ["check", "--isolated", "--no-cache", "."],
        ["format", "--check", "--isolated", "--no-cache", "."],
    ):
        done = subprocess.run(
            [*ruff, *command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_says_what_it_wrote_and_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ask("--new", NAME)
    assert done.exit_code == 0, done.output
    assert f"Your loss goes into {NAME}/learner.py." in done.stdout
    *_, install, test, demo = done.stdout.splitlines()
    assert install.split() == ["pip", "install", "pytest", "--editable", f"./{NAME}"]
    assert test.split() == ["python", "-m", "pytest", f"./{NAME}"]
    assert demo.split() == ["fcil-server", "demo", "-c", f"method.name={NAME}"]
    for path in tmp_path.joinpath(NAME).rglob("*"):
        assert path.is_dir() or f"  {path.relative_to(tmp_path / NAME)}\n" in done.stdout


def test_it_answers_in_json(tmp_path):
    done = ask("--new", NAME, "--kind", "frozen", "--dir", str(tmp_path / "it"), "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["name"], data["kind"], data["folder"]) == (NAME, "frozen", str(tmp_path / "it"))
    assert all((tmp_path / "it" / path).is_file() for path in data["files"])
    assert len(data["next"]) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--new", "My Idea"), "got 'My Idea'"),
        (("--new", "1st"), "got '1st'"),
        (("--new", "class"), "'class' is a keyword of Python"),
        (("--new", "an__idea"), "got 'an__idea'"),
        (("--new", "x" * 41), "at most 40 characters"),
        (("--new", "pilora"), "there is a method 'pilora' already, from fcil "),
        (("--new", "json"), "there is a Python module 'json' already ("),
        (("--new", NAME, "hgp"), "--new goes with --kind and --dir alone"),
        (("--new", NAME, "-c", "method.rank=2"), "--new goes with --kind and --dir alone"),
        (("--kind", "lora"), "--kind is for a new method"),
    ],
    ids=str,
)
def test_what_does_not_fit_gets_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ask(*arguments)
    assert done.exit_code == 4
    assert words in done.stderr
    assert done.stderr.count("error [usage]") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for folder in (tmp_path, kept):
        done = ask("--new", NAME, "--dir", str(folder))
        assert done.exit_code == 4
        assert "not an empty folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path):
    assert ask("--new", NAME, "--dir", str(tmp_path)).exit_code == 0
    assert (tmp_path / NAME / "__init__.py").is_file()


def test_what_python_leaves_beside_a_template_is_no_part_of_it(tmp_path):
    (tmp_path / "it" / "__pycache__").mkdir(parents=True)
    (tmp_path / "it" / "__pycache__" / "it.pyc").write_bytes(b"\xff\x00")
    (tmp_path / "it" / "it.py").write_text("x = 1\n")
    assert dict(new_method._texts(tmp_path)) == {"it/it.py": "x = 1\n"}
