"""What the server tells its page: bytes as they come, who is at work, in bounded size and time."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fcil_adapters.contract import TaskInfo
from fcil_protocol.ids import RoundKey, named_client_id
from fcil_protocol.messages.messages import Ack, Chunk, Update
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.process import control_socket
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.live import MAX_SHOWN, LiveReports
from fcil_server.daemon.server import Server
from fcil_server.event_loop import LagMeter
from fcil_server.federation.directory import Federation
from fcil_server.ledger.enums import Answer
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds.events import Answers, Phase, RoundRules
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import RunProgress
from fcil_server.rounds.schedule import Step
from fcil_server.sessions.peers import Peer, Peers
from system.kit import settings
from system.raw_client import RawClient, good_update

NAMES = 600  # classes of the task: an update of 150 kB, in several chunks


@asynccontextmanager
async def serving(tmp_path: Path, *more: str):
    """A real server on sockets of this machine, in this process."""
    classes = [[str(n) for n in range(NAMES)]]
    given = settings(round__min_clients=2, run__evaluate=False, tasks__classes=classes)
    listen = "federation.listen='127.0.0.1:0'"
    federation = Federation.open(tmp_path / "federation", None, (listen, *given[1::2], *more))
    listens = asyncio.Event()
    server = Server(
        federation, Journal(federation.ledger, lambda _: None), listening=lambda _: listens.set()
    )
    task = asyncio.create_task(server.serve())
    try:
        starts = asyncio.create_task(listens.wait())
        await asyncio.wait({task, starts}, return_when=asyncio.FIRST_COMPLETED)
        assert starts.done(), task
        yield server
    finally:
        server.stop()
        await asyncio.gather(task, return_exceptions=True)
        federation.close()


def ask(server: Server, op: str, **fields):
    """Ask as a command does, beside the server's loop."""
    return asyncio.to_thread(control_socket.ask, server.federation.directory, op, **fields)


async def ready(server: Server, name: str) -> RawClient:
    place = SimpleNamespace(federation=server.federation.directory)
    client = await asyncio.to_thread(RawClient, place, name)
    await client.connect()
    await client.greet()
    assert isinstance(await client.announce({str(n): 1 for n in range(NAMES)}), Ack)
    return client


async def noted(server: Server, code: str) -> None:
    """Wait until the server has noted this."""
    last = 0
    while all(note["code"] != code for note in server.journal.latest(100)):
        last = (await server.journal.after(last))["last"]


def sealed_update(client: RawClient, order):
    tensors = {k: v for k, v in good_update(order).items() if k != "classes"}
    return client.sealed(Payload(tensors), client.update_core(order))


@pytest.mark.processes
def test_bytes_grow_as_chunks_come_and_are_whole_when_the_update_is_there(tmp_path):
    async def story():
        async with serving(tmp_path) as server:
            await noted(server, "task_opened")
            live = await until(server, lambda r: r and r["phase"] == "gathering")
            assert (live["opened_at"], live["asked"]) == (None, 0), "nobody was asked"
            a, b = [await ready(server, name) for name in ("a", "b")]
            order = await a.asked()
            began = time.time()
            live = (await ask(server, "live"))["round"]
            assert abs(live["opened_at"] - began) < 60
            assert (live["asked"], live["answered"], live["offered"]) == (2, 0, 0)
            assert (live["received_bytes"], live["expected_bytes"]) == (0, 0)
            assert {c["name"] for c in live["clients"]} == {"a", "b"}

            sealed, wrap = sealed_update(a, order)
            size, count = sealed.parsed.sealed_bytes, len(sealed.parsed.hashes)
            assert count > 1
            update = Update(digest=sealed.parsed.update_id, unasked=count)
            a.say(update, sealed.header, sealed.signature, wrap)
            seen = [0]
            for index in range(count):
                a.say(Chunk(digest=update.digest, index=index), bytes(sealed.chunk(index)))
                if index == count - 1:
                    assert isinstance(await a.hear(Ack), Ack)
                live = await until(server, lambda r: r["received_bytes"] > seen[-1])
                seen.append(live["received_bytes"])
                assert (live["expected_bytes"], live["offered"]) == (size, 1)
            assert seen == sorted(set(seen)), "it only grows"
            assert seen[-1] == size
            assert [(c["name"], c["answer"]) for c in live["clients"]] == [
                ("b", "none"),
                ("a", "updated"),
            ]
            assert (live["answered"], live["clients"][1]["received"]) == (1, size)
            until_then = time.time()
        a.close()
        b.close()
        with Ledger(server.ledger.path, read_only=True) as ledger:
            assert all(c.last_seen > until_then for c in ledger.clients.all()), (
                "until the server ended"
            )
        async with serving(tmp_path) as server:  # a restart goes on with the round
            again = await until(server, lambda r: r and r["asked"])
            assert (again["answered"], again["received_bytes"]) == (1, size)
            assert again["opened_at"] == live["opened_at"]

    asyncio.run(asyncio.wait_for(story(), 120))


async def until(server: Server, said):
    """Ask until the round is as it is to be."""
    while True:
        live = (await ask(server, "live"))["round"]
        if said(live):
            return live


# --- very many ------------------------------------------------------------------------------

MANY = 1000
KEY = RoundKey("r20260102-030405-0a0b", 0, "train", 0)


def crowd(count: int) -> SimpleNamespace:
    """A server as far as `LiveReports` looks at it, in a round that asked so many clients."""
    ids = sorted(named_client_id(f"c{n}") for n in range(count))
    round_ = Round(rules=RoundRules(quorum=7), seed=(1,), phase=Phase.OPEN)
    round_.answers = Answers(dict.fromkeys(ids, Answer.NONE))
    at = RunProgress(task=TaskInfo(0, (0,), ()), round=round_, opened_at=5.0)
    at.show("collecting")
    at.step = Step("train", 0, 3)
    peers = Peers()
    for number, client in enumerate(ids):
        peer = Peer(client, f"name {number}", None, b"", number, None, ready=True)
        peer.train, peer.names = {"cat": 2, "dog": 3}, ("cat", "dog")
        peers.add(peer)
    kit = SimpleNamespace(
        run=KEY.run,
        name_of=lambda client: f"away {client}",
        aggregation=SimpleNamespace(worker=SimpleNamespace(pid=1, starts=1, deaths=0)),
    )
    accepted = [SimpleNamespace(client=ids[-1], sealed_bytes=70)]
    server = SimpleNamespace(
        ids=ids,
        at=at,
        peers=peers,
        started_at=0.0,
        lag=LagMeter(),
        journal=SimpleNamespace(last=3),
        ledger=SimpleNamespace(
            updates=SimpleNamespace(accepted=lambda key: accepted if key == KEY else [])
        ),
        run=SimpleNamespace(coordinator=SimpleNamespace(progress=at, context=kit, remaining_s=9.0)),
        held={},
        link=SimpleNamespace(relays=lambda: ["relay"]),
    )
    held = SimpleNamespace(of=lambda client: server.held.get(client, []))
    server.intake = SimpleNamespace(arriving=held)
    return server


def arriving(received: int, size: int, key: RoundKey = KEY) -> SimpleNamespace:
    core = SimpleNamespace(run=key.run, task=key.task, kind=key.kind, round=key.round)
    header = SimpleNamespace(core=core, sealed_bytes=size)
    return SimpleNamespace(received_bytes=received, header=header)


def tell(server: SimpleNamespace, **fields) -> dict:
    live = LiveReports(server)
    live.round_opens(KEY)
    return asyncio.run(live.report(fields))


def test_of_very_many_clients_those_at_work_are_shown_and_all_are_counted():
    server = crowd(MANY)
    ids, answers = server.ids, server.at.round.answers
    late = RoundKey(KEY.run, 0, "train", 7)  # an older round's, which nobody has swept yet
    server.held = {ids[500]: [arriving(3, 10, late), arriving(4, 10)], ids[501]: [arriving(0, 10)]}
    for client in ids[-3:]:
        answers[client] = Answer.UPDATED
    answers[ids[0]] = Answer.LOST
    server.peers.remove(1)  # the second one is away
    told = tell(server)["round"]
    shown = [c["id"] for c in told["clients"]]
    assert shown[:3] == [ids[500], ids[501], ids[2]]
    assert len(shown) == MAX_SHOWN == MANY - told["more"]
    assert (told["asked"], told["answered"], told["lost"]) == (MANY, 3, 1)
    assert (told["received_bytes"], told["expected_bytes"], told["offered"]) == (74, 90, 3)
    assert (told["quorum"], told["opened_at"], told["rounds"]) == (7, 5.0, 3)


def test_the_quorum_that_is_told_is_of_those_who_were_asked_and_can():
    """Two clients must be connected; of one that is asked one update suffices."""
    server = crowd(3)
    a, b, _ = server.ids
    server.at.round.rules = RoundRules(min_clients=3)
    assert tell(server)["round"]["quorum"] == 3
    server.at.round.answers[b] = Answer.DECLINED
    assert tell(server)["round"]["quorum"] == 2
    server.at.round.answers = Answers({a: Answer.NONE})
    assert tell(server)["round"]["quorum"] == 1


def test_in_a_small_round_everybody_is_shown_who_answered_last_and_who_is_away_by_name():
    server = crowd(4)
    a, b, c, d = server.ids
    server.at.round.answers.update({a: Answer.UPDATED, b: Answer.DECLINED})
    server.at.round.reasons = {b: "on battery"}
    server.peers.remove(2)
    told = tell(server)["round"]["clients"]
    assert [row["id"] for row in told] == [d, c, b, a]
    assert (told[1]["name"], told[1]["here"]) == (f"away {c}", False)
    assert told[2]["reason"] == "on battery"


def test_the_map_of_all_peers_is_one_answer_and_gives_the_loop_its_turns(monkeypatch):
    monkeypatch.setattr("fcil_server.event_loop.TURN_S", 0.0)
    server = crowd(MANY)
    server.at.round = None
    turned_away = named_client_id("z")
    server.peers.refused[turned_away] = "install fcil 9"

    async def story():
        told = asyncio.create_task(LiveReports(server).report({"peers": True}))
        turns = 0
        while not told.done():
            await asyncio.sleep(0)
            turns += 1
        return await told, turns

    told, turns = asyncio.run(story())
    assert turns > MANY, "others had the loop between any two peers"
    assert len(told["peers"]) == MANY + 1
    one = told["peers"][server.ids[0]]
    assert (one["state"], one["images"], one["classes"]) == ("ready", 5, 2)
    assert (
        told["peers"][turned_away] | {"state": "refused", "why": "install fcil 9"}
        == (told["peers"][turned_away])
    )
    assert len(json.dumps(told)) < control_socket.MAX_LINE_BYTES / 10
    assert told["relays"] == ["relay"]


def test_who_has_answered_is_not_at_work_any_more():
    server = crowd(2)
    a, b = server.ids
    server.at.round.answers.update({a: Answer.UPDATED, b: Answer.NONE})
    for peer in server.peers:
        peer.progress = ("fetching", 360, 2584)
    told = tell(server, peers=True)["peers"]
    assert (told[a]["progress"], told[b]["progress"]) == (None, ("fetching", 360, 2584))


def test_between_rounds_there_is_none_and_peers_are_said_if_asked_for():
    server = crowd(2)
    server.at.round = None
    told = tell(server)
    assert told["round"] is None
    assert told.keys().isdisjoint({"peers", "relays", "here"})
    assert (told["notes_last"], told["connected"]) == (3, 2)
