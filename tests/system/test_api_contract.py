"""The API against its own OpenAPI document: schemathesis makes requests that fit it and others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fcil_server.lab.local.federation import LocalFederation
from system.kit import command, settings, write_client

pytest.importorskip("schemathesis", reason="needs fcil[contract]")
pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(1200)]

# These end the API itself, or never end.
LEFT_OUT = ("post_rounds_drain", "post_runs_newest_stop", "get_stream")
# 503: under load an act may outlast the wait for it. 414: an array in place of a number may be
# longer than an address.
CONFIGURATION = """\
request-timeout = 600
headers = { Authorization = "Bearer ${FCIL_TEST_TOKEN}" }
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 503]
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 414, 415, 422]
"""


def test_no_request_is_answered_otherwise_than_the_document_says(tmp_path):
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION)
    endless = {"tasks__schedule": "discovered", "tasks__classes": [], "tasks__min_new_classes": 4}
    with LocalFederation(tmp_path) as federation:
        federation.serve("--api", "127.0.0.1:0", *settings(**endless))
        for k, name in enumerate("ab"):
            federation.join(name, write_client(tmp_path / name, range(4), offset=12 * k))
        federation.until("task_done")
        token = command(federation, "token", "new", "t", "--role", "administer", "--json")["token"]
        address = federation.status()["federation"]["api"]["address"]
        done = subprocess.run(
            [Path(sys.executable).with_name("st"), "--no-color",
             "--config-file", configuration, "run", f"{address}/openapi.json", "--phases", "coverage,fuzzing,stateful",
             "--max-examples", "10", "--seed", "1",
             *(word for name in LEFT_OUT for word in ("--exclude-operation-id", name))],
            check=False, capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, "FCIL_TEST_TOKEN": token},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        selected, of, tested = re.search(
            r"Selected: (\d+)/(\d+)\n\s*Tested: (\d+)\n", done.stdout
        ).groups()
        assert int(of) - len(LEFT_OUT) == int(selected) == int(tested)
        assert command(federation, "status", "--json")["run"]["status"] == "running"
        federation.stop()
