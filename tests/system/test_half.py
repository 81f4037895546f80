"""PILoRA over real sockets in float32 and then in half precision: bytes and accuracy side by side.

The clients stay; the second run begins under them, and they follow it into the other form.
"""

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Direction, Outcome
from fcil_server.reports.results.run_data import collect
from system.kit import open_ledger, settings, write_client

# Every federation in test_methods.py runs in half precision; this one compares it with single.
pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(300)]

TASKS = [["0", "1", "2"]]
LEARNER = {
    "method__name": "pilora",
    "method__preset": "short",
    "method__augment": "none",
    "method__epochs": 2,
    "tasks__classes": TASKS,
    "round__settle_s": 0.2,
}


def newest(federation):
    """Return the newest run, and its tensor bytes up and down."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert {r.outcome for r in ledger.rounds.all(run.run_id)} == {Outcome.DONE}
        data = collect(ledger, run.run_id)
        return data, {d: data.bytes_of(d).tensor for d in Direction}


def test_half_precision_halves_the_bytes_and_keeps_the_accuracy(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *settings(**LEARNER, wire__half="none"))
        for name, offset in (("a", 0), ("b", 20)):
            folder = write_client(tmp_path / name, (0, 1, 2), per_class=20, offset=offset)
            federation.join(name, folder, "--threads", "1")
        assert federation.server.wait(200) == 0, federation.last_words("server")
        full, full_bytes = newest(federation)
        federation.serve("--until-done", "--new-run", *settings(**LEARNER, wire__half="weights"))
        assert federation.server.wait(200) == 0, federation.last_words("server")
        federation.check_clients()
        half, half_bytes = newest(federation)
        assert half.run.run_id != full.run.run_id
        assert half.run.schema_digest != full.run.schema_digest
        for direction in Direction:  # class means up, and counts, are not halved
            assert 0.45 < half_bytes[direction] / full_bytes[direction] < 0.75, direction
        assert full.headline[0] > 60  # chance is 33
        assert abs(half.headline[0] - full.headline[0]) <= 10
