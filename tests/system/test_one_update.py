"""The "life of an update" of docs/architecture.md as code, row by row, over a link in memory."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import numpy as np

import fcil_protocol
from fcil_adapters.contract import Context, Part, TaskInfo, Update, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.images.decoding import open_source
from fcil_adapters.methods.running_mean import METHOD
from fcil_adapters.numerics.update_list import UpdateList
from fcil_client.data import manifest
from fcil_client.data.local_data import LocalData
from fcil_client.link.downloads import Downloads, open_part
from fcil_client.link.handshake import Terms
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.outbox import Outbox
from fcil_protocol.envelopes.envelope import (
    Core,
    open_body,
    parse_header,
    seal,
    unwrap_key,
    wrap_key,
)
from fcil_protocol.envelopes.stored_envelope import StoredEnvelope
from fcil_protocol.ids import RoundKey, new_client_id, new_run_id
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.frames import parse
from fcil_protocol.messages.messages import Ack, Chunk, Parts, Want
from fcil_protocol.messages.messages import Update as UpdateMessage
from fcil_protocol.messages.signed_session import Channel
from fcil_protocol.payloads.payload import pack, unpack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.testing import MemoryRouter
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.publisher import Publisher, Stamp
from fcil_server.aggregation.store import PartStore, StateStore
from fcil_server.ledger.enums import Outcome
from fcil_server.ledger.ledger import Ledger
from fcil_server.rounds import machine
from fcil_server.sessions.intake import Intake
from fcil_server.sessions.peers import Peer
from fcil_server.sessions.uploads import Expectation
from system.kit import write_client

TASK = TaskInfo(0, (0, 1))
HPARAMS = METHOD.hparams()
DIGEST = registry.schema_digest(METHOD, HPARAMS, NO_BACKBONE)
LIMIT = 10_000_000


def test_one_update_goes_the_way_that_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    asyncio.run(way_of_one_update(tmp_path))


async def way_of_one_update(tmp_path):
    root, server_keys, client_keys = (
        RootKey.generate(),
        PrivateKeys.generate(),
        PrivateKeys.generate(),
    )
    client, run = new_client_id(), new_run_id()
    folder = write_client(tmp_path / "images", [0, 1])
    home = Home.of(root.federation, folder)
    certificate = root.certify(server_keys.public).to_bytes().hex()
    enrolment = Enrolment(client, "c", root.federation, certificate, ("-",), str(folder))
    terms = Terms(run, METHOD, HPARAMS, NO_BACKBONE, DIGEST, LIMIT, 8)
    aggregator = registry.load_half(METHOD.aggregator)
    ctx = Context("train", TASK, 0, 1, HPARAMS, NO_BACKBONE)
    state = aggregator.open_task(ctx, aggregator.init(ctx))
    broadcast = {p.name: p.payload for p in aggregator.broadcast(ctx, state)}

    # 1: folder -> manifest
    source = open_source(folder)
    images = manifest.scan(source, home.directory / "manifest.json", home.salt())
    assert {image.entry.class_name for image in images.images} == {"0", "1"}
    # 2: manifest -> images of the current task, and of nothing else
    data = LocalData(source, images, NO_BACKBONE.preprocessing, memory_bytes=10_000_000)
    door = data.learner_images({"0": 0, "1": 1})
    assert set(door.labels.tolist()) == {0, 1}
    # 3: images -> payload
    _, payload = registry.load_half(METHOD.learner).run(
        ctx, fcil_protocol.Payload(), broadcast, door
    )
    assert int(payload.i64("n")[0]) == len(door)
    # 4: nothing leaves that the schema does not name
    assert terms.check_upload("train", payload, TASK) == []
    # 5: payload -> sealed envelope
    core = Core(
        protocol=fcil_protocol.PROTOCOL_VERSION, federation=root.federation, run=run,
        direction="update", sender=client, sender_key=client_keys.public.fingerprint,
        recipient="server", method=METHOD.name, schema=DIGEST, task=0, round=0, kind="train", base=0,
    )  # fmt: skip
    sealed, key = seal(pack(payload), core, client_keys, chunk_bytes=65536)
    digest = str(sealed.parsed.update_id)
    # 6: envelope -> outbox
    outbox = Outbox(home)
    outbox.put(digest, sealed.stored(wrap_key(key, sealed.header, server_keys.public)))
    assert home.outbox() == [digest]

    # 7: outbox -> link
    router = MemoryRouter()
    dealer = router.dealer(client_keys.public.curve)
    dealer.connect()
    assert await dealer.recv() == LinkNews("up")
    ours, theirs = (
        Channel(client_keys, server_keys.public),
        Channel(server_keys, client_keys.public),
    )
    ours.peer_nonce, theirs.peer_nonce = theirs.nonce, ours.nonce
    outbox.offer(digest, lambda m, *blobs: dealer.send(ours.frames(m, *blobs)), again=False)

    # 8: frames -> verified, opened, checked payload
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.clients.add(client, "c", **client_keys.public.to_fields())
    ledger.runs.add(
        run, method=METHOD.name, method_version=METHOD.version, config="", hparams={},
        backbone={}, schema_digest=DIGEST, seed=1,
    )  # fmt: skip
    ledger.tasks.open(run, 0, [0, 1])
    round_key = RoundKey(run, 0, "train", 0)
    ledger.rounds.open(round_key, asked=[client], base_state=0)
    spool = Spool(tmp_path / "spool")
    first = await router.recv()
    peer = Peer(client, "c", client_keys.public, first.route, first.conn, theirs)
    exchange = registry.find_exchange(METHOD, HPARAMS, NO_BACKBONE, "train")
    dims = METHOD.dims(HPARAMS, NO_BACKBONE, TASK)
    accepted = []

    def stored(item):
        accepted.append(item)
        with ledger.transaction():
            ledger.updates.accept(
                round_key, client, update_id=item.digest, samples=item.samples,
                tensor_bytes=item.tensor_bytes, sealed_bytes=item.sealed_bytes,
            )  # fmt: skip

    intake = Intake(
        federation=root.federation, keys=server_keys, incoming=tmp_path, spool=spool, credit=1 << 20,
        max_payload_bytes=LIMIT, max_classes=10,
        ports=SimpleNamespace(
            expect=lambda _c, _core: Expectation(TASK, exchange.upload, dims, exchange.check),
            recorded=lambda *_: False, opened=lambda _: None, stored=stored,
            together=contextlib.nullcontext, committed=lambda _: None, wait_until_durable=lambda: None,
            send=lambda p, m: router.send(p.route, p.channel.frames(m)),
        ),
    )  # fmt: skip
    for incoming in (first, await router.recv()):
        received = parse(incoming.frames)
        message = theirs.check(received)
        if isinstance(message, UpdateMessage):
            intake.offer(peer, received, message)
        else:
            assert isinstance(message, Chunk)
            intake.chunk(peer, received, message)
    # 9: on disk, then Ack
    await intake.drain()
    assert spool.keys() == [digest]
    answer = ours.check(parse(await dealer.recv()))
    assert answer == Ack(digest=digest, nonce=answer.nonce, seq=answer.seq)
    home.drop_outgoing(digest)

    # 10: the round decides
    deciding = machine.Round(machine.RoundRules(min_clients=1), seed=(1,))
    deciding.handle(machine.Available(client, holds=True, now=0.0))
    [close] = deciding.handle(machine.Updated(client, now=1.0))
    assert close.outcome is Outcome.DONE
    # 11: spool -> aggregate
    again = StoredEnvelope.from_bytes(spool.get(digest))
    header = parse_header(again.header, max_plain_bytes=LIMIT)
    opened = unpack(
        open_body(
            header, unwrap_key(again.wrap, again.header, server_keys), header.split(again.body)
        )
    )
    new_state = aggregator.aggregate(ctx, state, UpdateList.of([Update(client, opened)]))
    # 12: state -> file -> ledger
    states = StateStore(tmp_path / "states")
    state_digest = states.save(0, new_state, None, 0)
    with ledger.transaction():
        ledger.states.add(round_key, 0, state_digest, None)
        ledger.updates.mark_counted(round_key)
        ledger.rounds.close(round_key, close.outcome, new_state=0)
    # 13: state -> sealed parts
    publisher = Publisher(
        federation=root.federation, run=run, keys=server_keys, ledger=ledger,
        store=PartStore(tmp_path / "parts"), max_plain_bytes=LIMIT, compact=True,
        send=lambda p, m, *blobs: router.send(p.route, p.channel.frames(m, *blobs)),
    )  # fmt: skip
    parts: tuple[Part, ...] = aggregator.broadcast(ctx, new_state)
    refs = await publisher.publish(parts, Stamp(METHOD.name, DIGEST, 0, 1, "train", 0))
    # 14: parts -> the next round
    downloads = Downloads(home, enrolment, client_keys, lambda m: dealer.send(ours.frames(m)))
    assert not downloads.start(refs)
    complete = False
    while not complete:
        want = theirs.check(parse((await router.recv()).frames))
        assert isinstance(want, Want)
        publisher.serve(peer, want, credit=terms.credit)
        while router_has_answers(dealer) and not complete:
            received = parse(await dealer.recv())
            message = ours.check(received)
            if isinstance(message, Parts):
                downloads.header(received, message, terms, server_keys.public)
            else:
                complete = downloads.chunk(received, message)
    got = {r.name: open_part(home, r, client_keys, server_keys.public) for r in refs}
    for part in parts:
        for name, tensor in part.payload.tensors.items():
            assert np.array_equal(got[part.name].tensors[name], tensor)
    assert time.time() < root.certify(server_keys.public).not_after
    ledger.close()
    spool.close()
    data.close()


def router_has_answers(dealer):
    """Whether something waits at the client's end."""
    return not dealer._queue.empty()
