"""A cell's result names the code that made it, and is stale when its method's code changes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fcil_adapters.contract import source_code
from fcil_server.lab import plan, report
from fcil_server.lab.results import revision
from server.lab.kit import content, experiment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "__init__.py").write_text("ONE = 1\n")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout_names_its_revision_and_anything_else_none(folder: Path) -> None:
    assert revision(folder) == "", "a folder that git does not know"
    git(folder, "init", "-q")
    assert revision(folder) == "", "a file that is not tracked"
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    head = git(folder, "rev-parse", "HEAD")
    assert revision(folder) == head[:12]
    (folder / "__init__.py").write_text("ONE = 2\n")
    assert revision(folder) == f"{head[:12]}-dirty"


def test_without_git_there_is_no_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision(folder) == ""


def test_a_cell_is_another_one_when_the_code_of_its_method_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identities() -> dict[str, dict[str, object]]:
        plan._code_of.cache_clear()
        return {c.name: c.identity("p", "b") for c in plan.make(experiment())}

    before, real = identities(), source_code.method_digest
    monkeypatch.setattr(
        source_code,
        "method_digest",
        lambda method, *found: "changed" if method.name == "analytic" else real(method, *found),
    )
    after = identities()
    plan._code_of.cache_clear()
    stale = {name for name in before if before[name] != after[name]}
    assert stale == {n for n in before if n.startswith(("Ridge/", "Joint/"))}


def test_a_report_says_which_revisions_made_its_cells(tmp_path: Path) -> None:
    found = experiment()
    cells = plan.make(found)
    names = [c.name for c in cells[:3]]
    done = {name: content(name, 50.0) for name in names}
    alike = written(tmp_path, found, cells, done)
    assert f"code: 3 cells by revision 0123456789ab, digest {'d' * 16}" in alike
    assert "revisions of the code" not in alike
    done[names[0]]["revision"] = "ba9876543210-dirty"
    mixed = written(tmp_path, found, cells, done)
    assert "2 revisions of the code made these cells." in mixed
    assert "code: 1 cells by revision ba9876543210-dirty" in mixed
    for one in done.values():  # of an earlier version of the laboratory
        del one["revision"], one["environment"]["source_digest"]
    assert "code: 3 cells by unknown" in written(tmp_path, found, cells, done)


def written(folder: Path, *what: Any) -> str:
    report.write(folder, *what, {}, "scripts/reproduce toy.toml")
    return (folder / "report.md").read_text()
