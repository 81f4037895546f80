"""A relay that adds up: one sum crosses the uplink, and each update counts once."""

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import RunStatus, UpdateStatus
from system.kit import open_ledger, settings, write_client
from system.test_relay import Site

pytestmark = pytest.mark.processes
SUMS = {"privacy__relay_sums": True}


class SummingSite(Site):
    def start(self, *extra):
        super().start("--sums", *extra)


def test_one_sum_crosses_the_uplink_and_each_update_counts_once(tmp_path):
    with LocalFederation(tmp_path) as federation:
        listed = settings(tasks__classes=[["0", "1"]], round__min_clients=4, **SUMS)
        federation.serve("--until-done", *listed)
        site = SummingSite(federation)
        for k, name in enumerate("abcd"):
            folder = write_client(tmp_path / name, range(2), offset=12 * k)
            join = federation.join if name == "d" else site.join
            join(name, folder)
        assert federation.server.wait(120) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        rows = {c.name: c for c in ledger.clients.all()}
        rounds = ledger.rounds.all(run.run_id)
        (train,) = [r for r in rounds if r.kind == "train"]
        updates = ledger.updates.of_round(train.key)
    print(federation.last_words("server"))
    assert run.status is RunStatus.DONE
    assert {u.client for u in updates} == {c.client_id for n, c in rows.items() if n != "site"}
    assert all(u.status is UpdateStatus.COUNTED for u in updates)
    sums = {u.sum_id for u in updates if u.client != rows["vm:d"].client_id}
    assert len(sums) == 1 and None not in sums
