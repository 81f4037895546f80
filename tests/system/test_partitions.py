"""Two slots of one partition of one zip are two clients of a federation of processes."""

import shutil

import pytest

from fcil_adapters.images.decoding import open_source
from fcil_client.data.partition_file import save
from fcil_client.data.partition_make import Request, make
from fcil_protocol.errors import CorruptFile
from fcil_protocol.process.terminal import count_of
from fcil_server.federation.partition_plan import read_plan
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client


def processes(test):
    """Mark a test of real processes, which takes a while."""
    return pytest.mark.processes(pytest.mark.full(test))


def divided(tmp_path):
    """Write a zip and a partition of it, p.json; return both."""
    root = tmp_path / "digits"
    write_client(root / "train", range(4), per_class=20)
    write_client(root / "test", range(4), per_class=6, offset=20)
    data = tmp_path / shutil.make_archive(str(root), "zip", root)
    source = open_source(data)
    made = make(source.listing(), Request(alpha=1, clients=2, tasks=2, order="natural"))
    save(tmp_path / "p.json", made)
    return data, made


def test_the_server_reads_what_split_writes(tmp_path):
    _, made = divided(tmp_path)
    plan = read_plan(tmp_path / "p.json")
    assert (plan.tasks, plan.clients) == ([list(task) for task in made.tasks], made.clients)
    assert plan.rounds is None
    (tmp_path / "p.json").write_text((tmp_path / "p.json").read_text().replace('"0"', '"x"'))
    with pytest.raises(CorruptFile, match="does not match its digest"):
        read_plan(tmp_path / "p.json")


@processes
def test_two_slots_of_one_zip_learn_and_test_what_is_theirs(tmp_path):
    data, made = divided(tmp_path)
    with LocalFederation(tmp_path / "federation") as federation:
        given = settings(tasks__classes=[list(task) for task in made.tasks])
        listed = [given.index(a) for a in given if a.startswith("tasks.")]
        given = [a for i, a in enumerate(given) if i not in listed and i + 1 not in listed]
        federation.serve("--partition", str(tmp_path / "p.json"), *given)
        for slot in (0, 1):
            federation.join(
                f"c{slot}", data, "--partition", str(tmp_path / "p.json"), "--slot", str(slot)
            )
        federation.until("run_done")
        with open_ledger(federation) as ledger:
            names = {client.name.rpartition(":")[2] for client in ledger.clients.all()}
    assert names == {"digits.zip-000", "digits.zip-001"}
    server = federation.log("server").read_text()
    for slot in (0, 1):
        held = [n for n in made.counts(slot).values() if n]
        assert sum(held) == 40
        told = f"digits.zip-00{slot} holds 40 training images of {count_of(len(held), 'class')}"
        assert told in server
        assert "differs from that of the partition" not in federation.log(f"c{slot}").read_text()


@processes
def test_clients_say_that_the_runs_tasks_are_not_those_of_the_partition(tmp_path):
    data, made = divided(tmp_path)
    with LocalFederation(tmp_path / "federation") as federation:
        turned = [list(task) for task in reversed(made.tasks)]
        federation.serve(*settings(tasks__classes=turned), "--until-done")
        federation.swarm("lab", data, tmp_path / "p.json", "--until-done")
        assert federation.server.wait(90) == 0
        federation.clients["lab"].wait(60)
        said = federation.log("lab").read_text()
    for task in (0, 1):  # by one of the two: what both say is shown once
        assert f": task {task} of this run differs from that of the partition" in said
