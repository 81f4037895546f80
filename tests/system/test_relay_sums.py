"""A relay that adds up: one sum crosses the uplink, and each update counts once."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.contract.registry import load_method, make_hparams
from fcil_adapters.numerics.relay_sums import RunningSum, SummedUpdate
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import Ack, Chunk, Nack, Release, Update, Want
from fcil_protocol.payloads.payload import Payload
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import SPLIT_SUM, Cause, Direction, RunStatus, UpdateStatus
from system.kit import command, open_ledger, settings, until_log, write_client
from system.raw_client import RawClient, good_update
from system.test_relay import Behind, HostileRelay, Site

pytestmark = pytest.mark.processes


class SummingSite(Site):
    """A relay's process that adds up."""

    def start(self, *extra):
        super().start("--sums", *extra)


def summed(**extra):
    return settings(privacy__relay_sums=True, **extra)


def test_one_sum_crosses_the_uplink_and_each_update_counts_once(tmp_path):
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *summed(tasks__classes=[["0", "1"]], round__min_clients=3))
        site = SummingSite(federation)
        for k, name in enumerate("abc"):
            folder = write_client(tmp_path / name, range(2), offset=12 * k)
            join = federation.join if name == "c" else site.join
            join(name, folder)
        assert federation.server.wait(120) == 0, federation.last_words("server")
        counts = site.status()
        said = federation.log("a").read_text()
    assert "relay site opens this client's updates and sends the server their sum" in said
    assert (counts["added"], counts["adds_up"]) == (2, True)
    assert 1 <= counts["sums"] <= 2  # if one client takes long
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rows = {c.name.split(":")[-1]: c.client_id for c in ledger.clients.all()}
        train, evaluate = ledger.rounds.all(run.run_id)
        updates = {u.client: u for u in ledger.updates.of_round(train.key)}
        results = ledger.updates.of_round(evaluate.key)
        flows = ledger.bytes.of_round(train.key)
    assert updates.keys() == {rows[name] for name in "abc"}
    assert {u.status for u in updates.values()} == {UpdateStatus.COUNTED}
    assert [updates[rows[name]].sum_id is None for name in "abc"] == [False, False, True]
    assert {u.sum_id for u in results} == {None}  # evaluations pass unopened
    tensors = {
        f.client: f.tensor for f in flows if (f.direction, f.cause) == (Direction.UP, Cause.UPDATE)
    }
    assert tensors[rows["site"]] > 0
    assert tensors[rows["c"]] > 0
    assert tensors.get(rows["a"], 0) == tensors.get(rows["b"], 0) == 0


@pytest.mark.full
def test_a_relay_and_then_its_server_are_killed_and_each_update_counts_once(tmp_path):
    with LocalFederation(tmp_path) as federation:
        listed = summed(tasks__classes=[["0", "1"]], round__min_clients=4, round__rounds_per_task=6)
        federation.serve("--until-done", *listed)
        site = SummingSite(federation)
        for k, name in enumerate("abcd"):
            folder = write_client(tmp_path / name, range(2), offset=12 * k)
            (federation.join if name == "d" else site.join)(name, folder)
        federation.until("round_opened")
        for _ in range(2):
            site.process.kill()
            site.process.wait()
            federation.until("relay_left")
            site.start()
            federation.until("update")
        federation.kill_server()
        federation.serve("--until-done", *listed)
        federation.until("relay")
        assert federation.server.wait(240) == 0, federation.last_words("server")
        federation.check_clients()
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rounds = ledger.rounds.all(run.run_id)
        assert [r.kind for r in rounds] == ["train"] * 6 + ["evaluate"]
        sums = set()
        for row in rounds:
            updates = ledger.updates.of_round(row.key)
            assert len({u.client for u in updates}) == len(updates) == 4
            assert {u.status for u in updates} == {UpdateStatus.COUNTED}
            sums |= {u.sum_id for u in updates} - {None}
        assert sums


@pytest.mark.full
def test_a_relay_behind_a_relay_adds_up_and_the_outer_one_is_killed(tmp_path):
    with LocalFederation(tmp_path) as federation:
        listed = summed(tasks__classes=[["0", "1"]], round__min_clients=4, round__rounds_per_task=6)
        federation.serve("--until-done", *listed)
        outer = Site(federation, "region")
        inner = SummingSite(federation, "depot", via=outer)
        for k, name in enumerate("abcd"):
            folder = write_client(tmp_path / name, range(2), offset=12 * k)
            join = {"c": outer.join, "d": federation.join}.get(name, inner.join)
            join(name, folder)
        federation.until("update")
        outer.process.kill()
        outer.process.wait()
        for _ in range(2):
            federation.until("relay_left")
        outer.start()
        federation.until("relay")  # the inner one comes back by itself
        assert federation.server.wait(240) == 0, federation.last_words("server")
        federation.check_clients()
        status, carried = inner.status(), outer.status()
        said = federation.log("a").read_text()
    assert "relay depot opens this client's updates and sends the server their sum" in said
    assert status["added"] >= 2
    assert (carried["adds_up"], carried["clients"]) == (False, 0)
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        assert run.status is RunStatus.DONE
        rows = {c.name.split(":")[-1]: c for c in ledger.clients.all()}
        assert rows["depot"].via == rows["region"].client_id
        counted = [ledger.updates.of_round(row.key) for row in ledger.rounds.all(run.run_id)]
    for updates in counted:
        assert {u.client for u in updates} == {rows[name].client_id for name in "abcd"}
        assert {u.status for u in updates} == {UpdateStatus.COUNTED}
    sums = [{u.client for u in updates if u.sum_id} for updates in counted]
    assert {rows["a"].client_id, rows["b"].client_id} in sums
    assert not {rows["c"].client_id, rows["d"].client_id} & set.union(*sums)


def sum_of(*sent):
    """Return a sum of good updates of running_mean, as an honest relay makes it."""
    method = load_method("running_mean")
    hparams = make_hparams(method, {})
    (train,) = method.exchanges(hparams, NO_BACKBONE)
    dims = method.dims(hparams, NO_BACKBONE, TaskInfo(0, (0, 1)))
    total = RunningSum(train.additive, dims)
    for digest, tensors in sent:
        total.add(Payload(tensors), SummedUpdate(digest, int(tensors["n"][0]), 100))
    return total.payload()


class LyingRelay(HostileRelay):
    """An enrolled relay that says what no honest one says."""

    uplink = {"sums": True}

    def send_sum(self, payload, order, welcome, **changes):
        """Send a sum whole."""
        sender = RawClient.of(self.keys, self.client, self.certificate.to_bytes(), "")
        sender.welcome = welcome
        sealed, key = sender.sealed(payload, replace(sender.update_core(order), **changes))
        digest = sealed.parsed.update_id
        self.say(Update(digest=digest, unasked=1), sealed.header, sealed.signature, key)
        self.say(Chunk(digest=digest, index=0), bytes(sealed.chunk(0)))
        return digest


@pytest.mark.full
def test_a_lying_relay_makes_nothing_count_that_its_client_has_not_offered(tmp_path):
    async def story(federation):
        relay = LyingRelay(federation)
        await relay.connect()
        client = Behind(relay)
        await client.connect()
        await client.greet()
        assert client.welcome.summing_relay.signing == relay.keys.public.signing
        assert isinstance(await client.announce({"0": 5}), Ack)
        silent = RawClient(federation)  # the round waits for it
        await silent.connect()
        await silent.greet()
        assert isinstance(await silent.announce({"0": 5}), Ack)
        order = await client.asked()
        tensors = {k: v for k, v in good_update(order).items() if k != "classes"}
        sealed, wrap = client.sealed(Payload(tensors), client.update_core(order))
        digest = sealed.parsed.update_id

        async def refused(payload, **changes):
            relay.send_sum(payload, order, client.welcome, **changes)
            return (await relay.hear(Nack)).code

        # Before the client has offered anything, and with another's digest.
        assert await refused(sum_of((digest, tensors))) == "schema_mismatch"
        client.say(Update(digest=digest), sealed.header, sealed.signature, wrap, b"")
        assert await refused(sum_of(("0" * 64, tensors))) == "schema_mismatch"
        # Another round, another kind, a sum that is none.
        assert await refused(sum_of((digest, tensors)), round=1) == "round_closed"
        assert await refused(sum_of((digest, tensors)), kind="evaluate") == "round_closed"
        good = sum_of((digest, tensors))
        more = Payload({**good.tensors, "n": good.tensors["n"] + 1})
        assert await refused(more) == "schema_mismatch"
        assert await refused(Payload(tensors)) == "schema_mismatch"
        # Released, the server requests the client's own bytes, and these count.
        relay.say(Release(digests=[digest, "1" * 64]))
        want = await client.hear(Want)
        assert want.digest == digest
        client.say(Chunk(digest=digest, index=0), bytes(sealed.chunk(0)))
        assert (await client.hear(Ack, Nack)).type == "ack"
        # What counts already cannot come once more in a sum.
        assert await refused(sum_of((digest, tensors))) == "schema_mismatch"
        silent.close()
        relay.task.cancel()
        relay.link.close()
        return RoundKey(order.run, order.task, order.kind, order.round), digest

    with LocalFederation(tmp_path) as federation:
        federation.serve(*summed(round__min_clients=2, run__evaluate=False))
        key, digest = asyncio.run(story(federation))
        federation.until("left")
        with open_ledger(federation) as ledger:
            (update,) = ledger.updates.of_round(key)
            assert (update.update_id, update.sum_id) == (digest, None)
        assert "Traceback" not in federation.log("server").read_text()


@pytest.mark.full
def test_a_client_on_a_direct_link_cannot_pass_for_one_whose_relay_has_its_update(tmp_path):
    async def story(federation):
        client = RawClient(federation)
        await client.connect()
        await client.greet()
        assert client.welcome.summing_relay is None
        assert isinstance(await client.announce({"0": 5}), Ack)
        order = await client.asked()
        tensors = {k: v for k, v in good_update(order).items() if k != "classes"}
        sealed, wrap = client.sealed(Payload(tensors), client.update_core(order))
        digest = sealed.parsed.update_id
        client.say(Update(digest=digest), sealed.header, sealed.signature, wrap, b"")
        assert (await client.hear(Want)).digest == digest
        client.close()

    with LocalFederation(tmp_path) as federation:
        federation.serve(*summed(round__min_clients=1))
        asyncio.run(story(federation))


def sites_of_four(federation, tmp_path, classes, *, serve):
    """Start a server, and four clients of which the last is on a direct link and does nothing."""
    federation.serve("--until-done", *serve)
    site = SummingSite(federation)
    for k, name in enumerate("abcd"):
        folder = write_client(tmp_path / name, classes, offset=12 * k)
        (federation.join if name == "d" else site.join)(name, folder)
    federation.until("round_opened")
    os.kill(federation.clients["d"].pid, signal.SIGSTOP)
    return site


@pytest.mark.full
def test_a_client_that_is_restarted_sends_nothing_twice_and_holds_nobody_up(tmp_path):
    """It has its key for the relay no more, and the relay has its update."""
    with LocalFederation(tmp_path) as federation:
        serve = summed(tasks__classes=[["0", "1"]], round__min_clients=4, run__evaluate=False)
        site = sites_of_four(federation, tmp_path, range(2), serve=serve)
        until_log(federation, "a", "done in")
        federation.kill_client("a")
        federation.join("a", tmp_path / "a", "--ticket", str(federation.directory / "a.ticket"))
        federation.until("connected", text="a connected")
        os.kill(federation.clients["d"].pid, signal.SIGCONT)
        assert federation.server.wait(240) == 0, federation.last_words("server")
        assert site.status()["added"] >= 2
    with open_ledger(federation) as ledger:
        (row,) = ledger.rounds.all(ledger.runs.newest().run_id)
        updates = ledger.updates.of_round(row.key)
        assert len({u.client for u in updates}) == len(updates) == 4
        assert {u.status for u in updates} == {UpdateStatus.COUNTED}


@pytest.mark.full
def test_a_client_that_is_revoked_before_its_sum_is_sent_costs_the_others_nothing(tmp_path):
    """The server refuses the sum for its sake, and the relay goes on."""
    with LocalFederation(tmp_path) as federation:
        serve = summed(tasks__classes=[["0", "1"]], round__min_clients=3, run__evaluate=False)
        site = sites_of_four(federation, tmp_path, range(2), serve=serve)
        os.kill(federation.clients["c"].pid, signal.SIGSTOP)  # the relay waits for it
        for name in "ab":
            until_log(federation, name, "done in")
        command(federation, "revoke", "a", "--json")
        for name in "cd":
            os.kill(federation.clients[name].pid, signal.SIGCONT)
        assert federation.server.wait(240) == 0, federation.last_words("server")
        assert site.process.poll() is None, federation.last_words("site")
    with open_ledger(federation) as ledger:
        (row,) = ledger.rounds.all(ledger.runs.newest().run_id)
        names = {c.client_id: c.name.split(":")[-1] for c in ledger.clients.all()}
        updates = ledger.updates.of_round(row.key)
    counted = [names[u.client] for u in updates if u.status is UpdateStatus.COUNTED]
    assert sorted(counted) == ["b", "c", "d"]


@pytest.mark.full
def test_the_sum_of_an_erased_client_is_dropped_whole_and_its_images_are_counted_late(tmp_path):
    """Those of the others in it: they have dropped their updates, and are asked once more."""
    with LocalFederation(tmp_path) as federation:
        serve = summed(
            tasks__classes=[["0", "1"]], round__min_clients=3, run__evaluate=False,
            method__late="count", round__late_every_s=0,
        )  # fmt: skip
        sites_of_four(federation, tmp_path, range(2), serve=serve)
        federation.until("update", text="sum of 3 updates")
        command(federation, "erase", "a", "--yes", "--json")
        federation.kill_server()
        federation.serve("--until-done", *serve)
        for _ in "bc":  # d sleeps
            federation.until("announced")
        os.kill(federation.clients["d"].pid, signal.SIGCONT)
        assert federation.server.wait(240) == 0, federation.last_words("server")
        assert "damaged" not in federation.log("server").read_text()
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        rows = ledger.rounds.all(run)
        found = {}
        for row in rows:
            for update in ledger.updates.of_round(row.key):
                if update.status is UpdateStatus.COUNTED:
                    found.setdefault(update.client, []).append(row.kind)
        names = {c.name.split(":")[-1]: c.client_id for c in ledger.clients.all()}
        first = ledger.updates.of_round(rows[0].key)
    assert {u.reason for u in first if u.client in (names["b"], names["c"])} == {SPLIT_SUM}
    assert {kinds.count("train") + kinds.count("late") for kinds in found.values()} == {1}
    assert found.keys() == {names[name] for name in "bcd"}
