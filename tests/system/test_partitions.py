"""Two slots of one partition of one zip are two clients of a federation of processes."""

import shutil

import pytest

from fcil_adapters.images import open_source
from fcil_client.partition_file import save
from fcil_client.partition_make import Request, make
from fcil_server.local import LocalFederation
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.full]


def test_two_slots_of_one_zip_learn_and_test_what_is_theirs(tmp_path):
    root = tmp_path / "digits"
    write_client(root / "train", range(4), per_class=20)
    write_client(root / "test", range(4), per_class=6, offset=20)
    data = tmp_path / shutil.make_archive(str(root), "zip", root)
    source = open_source(data)
    made = make(source.listing(), Request(alpha=1, clients=2, tasks=2, order="natural"))
    save(tmp_path / "p.json", made)
    with LocalFederation(tmp_path / "federation") as federation:
        federation.serve(*settings(tasks__classes=[list(task) for task in made.tasks]))
        for slot in (0, 1):
            federation.join(
                f"c{slot}", data, "--partition", str(tmp_path / "p.json"), "--slot", str(slot)
            )
        federation.until("run_done")
        with open_ledger(federation) as ledger:
            names = {client.name.rpartition(":")[2] for client in ledger.clients()}
    assert names == {"digits.zip-000", "digits.zip-001"}
    server = federation.log("server").read_text()
    for slot in (0, 1):
        held = [n for n in made.counts(slot).values() if n]
        assert sum(held) == 40
        told = f"digits.zip-00{slot} holds 40 training images of {len(held)} classes"
        assert told in server
