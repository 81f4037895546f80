"""Broadcasts from an object store, as processes: the link carries keys, and chunks if need be."""

import os
import urllib.request

import pytest

from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Cause, CountSource, RunStatus, UpdateStatus
from s3_kit import PROGRAM, environment, s3_server
from system.kit import open_ledger, write_client
from system.payload_kit import ENV, one_round
from system.test_wire import free_port
from web_folder import flipped, half_of_it, refused, sent_elsewhere, web_server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KILOBYTES = 3000
ROUNDS = 2


def arguments(**extra):
    return one_round(KILOBYTES, round__rounds_per_task=ROUNDS, round__min_clients=2, **extra)


def stored(tmp_path, web):
    """Return settings of a store in a folder that a web server shows."""
    folder = tmp_path / "parts"
    return {"parts__store": f"file://{folder}", "parts__url": f"http://127.0.0.1:{web.server_port}"}


def run(tmp_path, *join, env=None, **extra):
    """Let two clients finish a run; return the ledger's counts, their logs and the server's."""
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *arguments(**extra), env={**ENV, **(env or {})})
        for k, name in enumerate("ab"):
            folder = write_client(tmp_path / name, (0, 1), offset=12 * k)
            federation.join(name, folder, *join, env=ENV)
        assert federation.server.wait(240) == 0, federation.last_words("server")
        logs = [federation.log(name).read_text() for name in "ab"]
        server_log = federation.log("server").read_text()
    with open_ledger(federation) as ledger:
        newest = ledger.runs.newest()
        assert newest.status is RunStatus.DONE
        for row in ledger.rounds.all(newest.run_id):
            updates = ledger.updates.of_round(row.key)
            assert [u.status for u in updates] == [UpdateStatus.COUNTED] * 2
        counts = ledger.bytes.all(newest.run_id)
    return counts, logs, server_log


def from_store(counts):
    found = [c for c in counts if c.cause is Cause.OBJECT_STORE]
    assert all(c.source is CountSource.REPORTED for c in found)
    return sum(c.wire for c in found)


def from_link(counts):
    """Return the sealed bytes of parts that the server sent."""
    causes = (Cause.BROADCAST, Cause.CATCH_UP)
    return sum(c.sealed for c in counts if c.cause in causes)


@pytest.mark.full
@pytest.mark.parametrize("ranges", [True, False])
def test_large_parts_come_from_the_store_and_every_byte_is_counted(tmp_path, ranges):
    with web_server(tmp_path / "parts", ranges=ranges) as web:
        counts, logs, _ = run(tmp_path, **stored(tmp_path, web))
    assert len(web.asked) == 2 * ROUNDS  # each state's part once by each client
    assert len(set(web.asked)) == ROUNDS
    assert from_store(counts) == sum(web.sent) > 2 * ROUNDS * KILOBYTES * 1000
    assert from_link(counts) < 100_000  # the lists of classes alone
    assert all("large parts of broadcasts come from" in log for log in logs)
    kept = [path for path in (tmp_path / "parts").rglob("*") if path.is_file()]
    assert len(kept) == 1, "only the newest state's part stays"


@pytest.mark.full
@pytest.mark.parametrize("answer", [half_of_it, flipped, refused, sent_elsewhere])
def test_what_the_store_does_not_give_the_link_does(tmp_path, answer):
    with web_server(tmp_path / "parts", answer=answer) as web:
        counts, logs, _ = run(tmp_path, **stored(tmp_path, web))
    assert len(web.asked) == 2  # each client asks once, and not again for a while
    assert all("the object store does not give a part" in log for log in logs)
    kept = from_store(counts)  # what was right before the fault
    assert (kept > 0) == (answer in (flipped, half_of_it))
    assert from_link(counts) + kept > 2 * ROUNDS * KILOBYTES * 1000


@pytest.mark.full
def test_an_owner_may_keep_to_the_link(tmp_path):
    with web_server(tmp_path / "parts") as web:
        counts, logs, _ = run(tmp_path, "--link-only", **stored(tmp_path, web))
    assert not web.asked
    assert from_store(counts) == 0
    assert from_link(counts) > 2 * ROUNDS * KILOBYTES * 1000
    assert not any("come from" in log for log in logs)


@pytest.mark.full
def test_a_store_that_is_gone_is_named_once_and_costs_no_round(tmp_path):
    counts, _, log = run(
        tmp_path, env=environment(f"http://127.0.0.1:{free_port()}"), parts__store="s3://bucket"
    )
    assert log.count("the object store takes no parts") == 1
    assert from_store(counts) == 0


@pytest.fixture
def s3():
    """Yield the URL of a server that speaks S3."""
    if PROGRAM not in os.environ:
        pytest.skip("FCIL_S3_SERVER names no server")
    with s3_server("127.0.0.1", free_port()) as url:
        yield url


@pytest.mark.full
def test_s3_holds_the_newest_parts_and_signs_their_addresses(tmp_path, s3):
    place = "s3://bucket/federations"
    counts, logs, log = run(tmp_path, env=environment(s3), parts__store=place)
    assert "object store" not in log
    assert from_store(counts) > 2 * ROUNDS * KILOBYTES * 1000
    assert from_link(counts) < 100_000
    assert all(f"come from {s3}/bucket/federations/" in log for log in logs)
    assert all("Signature" not in log for log in logs), "an address is as good as a key"
    listing = urllib.request.urlopen(f"{s3}/bucket?list-type=2").read()
    assert listing.count(b"<Key>federations/") == 1
