"""The notebook of the tutorials: what a reader runs cell by cell, and what it shows."""

import ast
import json
import re
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(c["source"]) for c in CELLS if c["cell_type"] == "code"]
TEXT = "".join(line for c in CELLS if c["cell_type"] == "markdown" for line in c["source"])


def test_it_is_kept_without_outputs():
    assert [c for c in CELLS if c.get("outputs") or c.get("execution_count")] == []
    assert len({c["id"] for c in CELLS}) == len(CELLS)


def test_every_code_cell_is_python():
    assert len(CODE) > 3
    for code in CODE:
        ast.parse(code)


def test_its_links_lead_to_documents():
    links = re.findall(r"\]\(([^)#]+)(?:#([\w-]+))?\)", TEXT)
    assert len(links) > 3
    for target, anchor in links:
        page = (NOTEBOOK.parent / target).read_text(encoding="utf-8")
        heads = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", page, re.MULTILINE)}
        assert not anchor or anchor in heads, f"{target}#{anchor}"


@pytest.mark.processes
@pytest.mark.full
def test_its_cells_run_in_order_and_draw_the_learning_curve(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    scope: dict[str, object] = {}
    try:
        for number, code in enumerate(CODE):
            exec(compile(code, f"notebook.ipynb, code cell {number}", "exec"), scope)
        lines = {line.get_label(): line.get_ydata() for line in scope["axes"].get_lines()}
    finally:
        plt.close("all")
    assert lines.keys() == {"Nearest class mean", "Analytic"}
    for accuracies in lines.values():
        assert len(accuracies) == 5
        assert min(accuracies) > 50  # chance is 10 in the end
    assert (scope["costs"] > 0).all(axis=None)
    assert (tmp_path / "results" / "digits-in-a-notebook" / "report.html").is_file()
