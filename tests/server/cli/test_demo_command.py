"""``fcil-server demo``, as its user types it and ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_server.cli.main import app
from fcil_server.lab.local import demo


def test_an_interrupted_demo_says_how_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    result = CliRunner().invoke(app, ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 130
    assert "the same command resumes" in result.stderr
    assert result.stdout == ""
