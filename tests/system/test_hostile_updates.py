"""Updates that no honest client sends meet a real server; each gets its Nack, others go on."""

import asyncio
import itertools

import numpy as np
import pytest

from fcil_protocol.envelopes.transfer import MAX_SPOILED
from fcil_protocol.errors import UnknownClient
from fcil_protocol.link.zmq_link import Dealer, LinkNews
from fcil_protocol.messages.messages import Ack, Chunk, Decline, Nack, Update, Want
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, write_client
from system.raw_client import WAIT_S, RawClient, good_update

pytestmark = pytest.mark.processes

ONE_CLIENT = {"round__min_clients": 1, "run__evaluate": False}
NUMBER = itertools.count()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """One server for all stories."""
    with LocalFederation(tmp_path_factory.mktemp("hostile")) as running:
        running.serve(*settings(**ONE_CLIENT, round__rounds_per_task=1000))
        yield running


@pytest.fixture(scope="module")
def play(federation):
    """Run ``async story(client, order)``: one client for all, and for each a round of its own."""
    with asyncio.Runner() as runner:
        client = runner.run(ready(federation))

        def run(story):
            async def whole():
                order = await client.asked()
                await story(client, order)
                good = client.sealed(tensors(order), client.update_core(order))
                assert isinstance(await client.upload(*good), Ack), "it is still welcome"

            runner.run(whole())
            assert "Traceback" not in federation.log("server").read_text()

        yield run
        client.close()


async def ready(federation):
    """Return a client that is about to be asked for a round."""
    client = RawClient(federation)
    await client.connect()
    await client.greet()
    assert isinstance(await client.announce({"0": 5, "1": 5}), Ack)
    return client


def tensors(order, **changes):
    made = {k: v for k, v in good_update(order).items() if k != "classes"}
    made.update(changes)
    return Payload({k: v for k, v in made.items() if v is not None})


BAD = {
    "NaN": lambda o: tensors(o, mean=np.full((2, 64), np.nan, np.float32)),
    "infinity": lambda o: tensors(o, mean=np.full((2, 64), np.inf, np.float32)),
    "wrong shape": lambda o: tensors(o, mean=np.zeros((3, 64), np.float32)),
    "wrong dtype": lambda o: tensors(o, mean=np.zeros((2, 64), np.float16)),
    "unknown tensor": lambda o: tensors(o, image=np.zeros((2, 8), np.float32)),
    "missing tensor": lambda o: tensors(o, count=None),
    "huge values": lambda o: tensors(o, mean=np.full((2, 64), 1e30, np.float32)),
    "a count beyond 64-bit sums": lambda o: tensors(
        o, count=np.array([2**62, 1], np.int64), n=np.array([2**62 + 1], np.int64)
    ),
    "negative count": lambda o: tensors(o, count=np.array([-1, 3], np.int64)),
    "inconsistent count": lambda o: tensors(o, n=np.array([99], np.int64)),
}


@pytest.mark.parametrize("what", BAD)
def test_a_payload_against_the_schema_is_refused_and_a_good_one_still_counts(play, what):
    async def story(client, order):
        bad = await client.upload(*client.sealed(BAD[what](order), client.update_core(order)))
        assert isinstance(bad, Nack)
        assert bad.code == "schema_mismatch"
        assert bad.text
        assert bad.action

    play(story)


def test_a_payload_that_is_no_safetensors_is_refused(play):
    async def story(client, order):
        for data in (b"", b"\0" * 7, b"\xff" * 100, pack(Payload())[:5]):
            answer = await client.upload(*client.sealed(data, client.update_core(order)))
            assert isinstance(answer, Nack)

    play(story)


CORES = {
    "another round": ({"round_": 999}, "round_closed"),
    "another task": ({"task": 5}, "round_closed"),
    "another base": ({"base": 9999}, "stale_update"),
    "another run": ({"run": "r20200101-000000-abcd"}, "wrong_federation"),
    "another federation": ({"federation": "0" * 32}, "wrong_federation"),
    "another sender": ({"sender": "a" * 26}, "wrong_federation"),
    "another schema": ({"schema": "1" * 64}, "schema_mismatch"),
}


@pytest.mark.parametrize("what", CORES)
def test_a_header_of_something_else_is_refused_before_its_chunks(play, what):
    changes, code = CORES[what]

    async def story(client, order):
        fields = {"task": order.task, "round_": order.round, "base": order.base} | changes
        core = client.core(order.kind, **fields)
        answer = await client.upload(*client.sealed(tensors(order), core))
        assert isinstance(answer, Nack)
        assert answer.code == code

    play(story)


def test_the_body_of_another_update_under_this_header_is_refused(play):
    async def story(client, order):
        core = client.update_core(order)
        one, wrap = client.sealed(tensors(order), core)
        two, _ = client.sealed(tensors(order, mean=np.zeros((2, 64), np.float32)), core)
        message = Update(digest=one.parsed.update_id, unasked=1)
        client.say(message, one.header, one.signature, wrap)
        for _ in range(MAX_SPOILED):
            client.say(Chunk(digest=one.parsed.update_id, index=0), two.body)
            assert isinstance(await client.hear(Want, Ack, Nack), Want), "it is asked for again"
        client.say(Chunk(digest=one.parsed.update_id, index=0), two.body)
        assert isinstance(await client.hear(Want, Ack, Nack), Nack)

    play(story)


def test_a_signature_of_somebody_else_is_refused(play):
    async def story(client, order):
        thief = PrivateKeys.generate()
        sealed, wrap = client.sealed(tensors(order), client.update_core(order))
        forged = thief.sign("envelope", sealed.header)
        client.say(Update(digest=sealed.parsed.update_id), sealed.header, forged, wrap)
        answer = await client.hear(Ack, Nack)
        assert answer.code == "bad_signature"

    play(story)


@pytest.mark.full
def test_the_second_update_of_a_round_gets_already_have(tmp_path):
    async def story(federation):
        silent = RawClient(federation, "silent")  # asked too, and never answers: the round waits
        await silent.connect()
        await silent.greet()
        await silent.announce({"0": 5})
        client = await ready(federation)
        order = await client.asked()
        first = client.sealed(tensors(order), client.update_core(order))
        assert isinstance(await client.upload(*first), Ack)
        assert isinstance(await client.upload(*first), Ack)  # the very same: nothing new
        other = client.sealed(
            tensors(order, mean=np.zeros((2, 64), np.float32)), client.update_core(order)
        )
        answer = await client.upload(*other)
        assert answer.code == "already_have"
        client.close()
        silent.close()

    with LocalFederation(tmp_path) as federation:
        federation.serve(*settings(**ONE_CLIENT | {"round__min_clients": 2}))
        asyncio.run(story(federation))
        with open_ledger(federation) as ledger:
            row = ledger.rounds.current(ledger.runs.newest().run_id)
            assert len(ledger.updates.of_round(row.key)) == 1


def test_a_key_that_was_never_enrolled_hears_that_it_is_refused(federation):
    async def story():
        known = RawClient(federation, "known")
        stranger = PrivateKeys.generate()
        host, _, port = known.address.rpartition(":")
        link = Dealer(
            curve_secret=stranger.curve_secret,
            curve_public=stranger.public.curve,
            server_key=known.server.curve,
        )
        link.connect(host, int(port))
        news = await asyncio.wait_for(link.recv(), WAIT_S)
        assert news == LinkNews("refused", "unknown_client")
        link.close()

    asyncio.run(story())


def test_a_hello_in_another_clients_name_is_refused(federation):
    async def story():
        victim = RawClient(federation, "victim")
        client = RawClient(federation, "thief")
        await client.connect()
        answer = await client.greet(client=victim.client)
        assert isinstance(answer, Nack)
        assert answer.code == UnknownClient.code
        client.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 99, "oldest": 98}, "version_mismatch"),
        ({"federation": "0" * 32}, "wrong_federation"),
        ({"methods": ["pilora==1"]}, "method_mismatch"),
        ({"methods": ["running_mean==0"]}, "method_mismatch"),
    ],
)
def test_a_client_that_does_not_fit_is_told_both_values(federation, changes, code):
    async def story():
        client = RawClient(federation, f"other-{next(NUMBER)}")
        await client.connect()
        answer = await client.greet(**changes)
        assert isinstance(answer, Nack)
        assert answer.code == code
        assert answer.action
        client.close()

    asyncio.run(story())


@pytest.mark.full
def test_a_declined_round_goes_on_with_the_others(tmp_path):
    async def story(federation):
        client = await ready(federation)
        order = await client.asked()
        federation.join("honest", write_client(tmp_path / "honest", range(4)))
        await asyncio.to_thread(federation.until, "announced", text="honest")
        client.say(
            Decline(
                run=order.run, task=order.task, kind=order.kind, round=order.round, reason="busy"
            )
        )
        await asyncio.to_thread(federation.until, "task_done", text="task 1")
        client.close()

    # A round that everybody declined is skipped; the next ones find the honest client.
    with LocalFederation(tmp_path / "server") as federation:
        federation.serve(*settings(**ONE_CLIENT))
        asyncio.run(story(federation))
