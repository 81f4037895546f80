"""One of six clients sends values a hundred times too large, through real processes."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from fcil_protocol.errors import EXIT_USAGE, LinkError
from fcil_protocol.messages.messages import Ack, RoundClosed
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import UpdateStatus
from system.kit import open_ledger, settings
from system.raw_client import RawClient

pytestmark = pytest.mark.processes

HONEST = ("ada", "ben", "cleo", "dov", "eve")


def values(k):
    """Thumbnail means (2, 64) of the k-th client, all dark; the method allows up to 1."""
    return np.random.default_rng(k).uniform(0.004, 0.008, (2, 64)).astype(np.float32)


async def take_part(federation, sent):
    """Connect a client for each name, send what it says, return the verdicts by name."""
    clients = {name: RawClient(federation, name) for name in sent}
    for client in clients.values():
        await client.connect()
        await client.greet()
        assert isinstance(await client.announce({"0": 1, "1": 1}), Ack)
    for name, client in clients.items():
        order = await client.asked()
        count = np.ones(2, np.int64)
        payload = Payload({"mean": sent[name], "count": count, "n": count.sum().reshape(1)})
        sealed = client.sealed(payload, client.update_core(order))
        assert isinstance(await client.upload(*sealed), Ack), name  # absolute limits are kept
    closed = {name: await client.hear(RoundClosed) for name, client in clients.items()}
    for client in clients.values():
        client.close()
    return {name: message.verdict for name, message in closed.items()}


def run(directory, sent, **extra):
    """Run one task with these clients; return verdicts, the final state, notes and rounds."""
    one_task = {"tasks__classes": [["0", "1"]], "run__evaluate": False}
    arguments = settings(round__min_clients=len(sent), **one_task, **extra)
    with LocalFederation(directory) as federation:
        federation.serve("--until-done", *arguments)
        verdicts = asyncio.run(take_part(federation, sent))
        assert federation.server.wait(60) == 0, federation.last_words("server")
    with open_ledger(federation) as ledger:
        newest = ledger.runs.newest()
        (row,) = ledger.rounds.all(newest.run_id)
        names = {c.client_id: c.name for c in ledger.clients.all()}
        updates = {names[u.client]: u for u in ledger.updates.of_round(row.key)}
    final = federation.federation / "runs" / newest.run_id / "final.safetensors"
    command = ["fcil_server", "rounds", "--json", "--dir", str(federation.federation)]
    said = subprocess.run([sys.executable, "-m", *command], capture_output=True, check=True)
    (line,) = json.loads(said.stdout)["data"]["rounds"]
    log = federation.log("server").read_text()
    return verdicts, unpack(final.read_bytes()).f32("task.0.mean"), updates, line, log


@pytest.mark.full
def test_it_is_excluded_by_name_and_the_result_is_that_without_it(tmp_path):
    honest = {name: values(k) for k, name in enumerate(HONEST)}
    everybody = {**honest, "mallory": 100 * values(9)}
    verdicts, state, updates, line, log = run(tmp_path / "six", everybody)
    reason = verdicts["mallory"].reason
    assert verdicts["mallory"].counted is False
    for words in ("prototype values", "median is 0.00", "the limit"):
        assert words in reason
    assert all(verdicts[name].counted for name in honest)
    assert updates["mallory"].status is UpdateStatus.EXCLUDED
    assert updates["mallory"].reason == reason
    assert line["counted"] == 5
    ((name, why),) = [(e["name"], e["reason"]) for e in line["excluded"]]
    assert (name, why) == ("mallory", reason)
    assert f"mallory: {reason}" in log
    _, alone, *_ = run(tmp_path / "five", honest)
    np.testing.assert_allclose(state, alone, rtol=1e-6)  # ids are drawn anew, so is the order


def test_an_average_that_the_method_lacks_is_an_error_at_the_start(tmp_path):
    with LocalFederation(tmp_path) as federation:
        with pytest.raises(LinkError, match="works only with: mean"):
            federation.serve(*settings(trust__averaging="median"))
        assert federation.server.returncode == EXIT_USAGE


@pytest.mark.full
def test_without_the_limit_it_counts(tmp_path):
    """What the first test would show if nothing were excluded."""
    honest = {name: values(k) for k, name in enumerate(HONEST)}
    everybody = {**honest, "mallory": 100 * values(9)}
    verdicts, state, _, line, _ = run(tmp_path, everybody, trust__outlier_factor=0)
    assert verdicts["mallory"].counted
    assert line["excluded"] == []
    assert state.min() > 0.05
