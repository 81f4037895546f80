"""The processes of a local federation: none outlives the process that has started them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orphans import ends_with_its_parent
from system.kit import settings

SCRIPT = """
import sys
from pathlib import Path
from fcil_server.lab.local.federation import LocalFederation
with LocalFederation(Path({place!r})) as federation:
    federation.serve(*{settings!r})
    print(federation.server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_a_server_ends_with_an_experiment_or_a_demo_that_is_killed(tmp_path: Path) -> None:
    ends_with_its_parent(SCRIPT.format(place=str(tmp_path), settings=settings()))
