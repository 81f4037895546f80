"""``fcil-server report``: it shows what it has written, and reads the run once for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sample_run
from fcil_protocol.formats import with_iso_times
from fcil_server.cli.main import app
from fcil_server.federation.directory import CONFIG
from fcil_server.reports import plots
from fcil_server.reports.results import run_data
from fcil_server.reports.results.round_views import RoundReader
from sample_run import RUN


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_report_reads_each_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    sample_run.build(tmp_path / "ledger.sqlite").close()
    (tmp_path / CONFIG).touch()
    read = []

    class Reader(RoundReader):
        def view(self, row):
            read.append(row.seq)
            return super().view(row)

    monkeypatch.setattr(run_data, "RoundReader", Reader)
    monkeypatch.setattr(plots, "draw", lambda _: {})  # takes seconds
    done = CliRunner().invoke(app, ["report", "--dir", str(tmp_path), *form])
    assert done.exit_code == 0, done.output
    assert read == list(range(12))
    if form:
        shown = json.loads(done.stdout)["data"]
        written = json.loads((tmp_path / "runs" / RUN / "summary.json").read_text())["data"]
        assert shown == with_iso_times(written)
