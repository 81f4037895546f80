"""Updates on their way out: sealed once, resent byte for byte, found again after a restart."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from fcil_client.state.home import Home
from fcil_client.state.outbox import Outbox
from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes.envelope import Core, StoredEnvelope, parse_header, seal, wrap_key
from fcil_protocol.envelopes.stored_envelope import EnvelopeFile
from fcil_protocol.envelopes.transfer import UNASKED_BYTES
from fcil_protocol.errors import CorruptFile, StorageError
from fcil_protocol.ids import FederationId
from fcil_protocol.messages.messages import Chunk, Message, PartRef, RoundOpen, Update, Verdict
from fcil_protocol.payloads.payload import Payload
from fcil_protocol.trust.keys import PrivateKeys

FED = FederationId("0123456789abcdef" * 2)
KEYS, SERVER = (
    PrivateKeys(curve=bytes([n]) * 32, signing=bytes([n]) * 32, sealing=bytes([n]) * 32)
    for n in (1, 2)
)
CHUNK = 16 << 10
HEX = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Home.of(FED, tmp_path / "images")


def order(number: int = 0) -> RoundOpen:
    return RoundOpen(
        nonce=b"n" * 16,
        seq=9,
        run="r20260102-030405-0a0b",
        task=1,
        kind="train",
        round=number,
        rounds=3,
        base=5,
        classes=[2, 3],
        past=[0, 1],
        seed=[1993, 2**52],
        remaining_s=12.5,
        parts=[PartRef(name="current", digest=HEX, sealed_bytes=1)],
        verdict=Verdict(update=HEX, counted=True),
    )


def envelope(
    number: int = 0, size: int = 5 * CHUNK, *, base: int = 5
) -> tuple[str, StoredEnvelope]:
    core = Core(
        protocol=PROTOCOL_VERSION,
        federation=FED,
        run="r20260102-030405-0a0b",
        direction="update",
        sender="a" * 26,
        sender_key=KEYS.public.fingerprint,
        recipient="server",
        method="pilora",
        schema="",
        task=1,
        round=number,
        kind="train",
        base=base,
    )
    plain = hashlib.shake_256(b"%d" % number).digest(size)
    sealed, key = seal(plain, core, KEYS, chunk_bytes=CHUNK)
    wrap = wrap_key(key, sealed.header, SERVER.public)
    return str(sealed.parsed.update_id), sealed.stored(wrap)


class Wire:
    """Remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, tuple[bytes, ...]]] = []

    def __call__(self, message: Message, *blobs: bytes) -> None:
        self.sent.append((message, blobs))

    @property
    def chunks(self) -> dict[int, bytes]:
        """The messages with chunks, by the number of the first."""
        return {m.index: blobs[0] for m, blobs in self.sent if isinstance(m, Chunk)}


def put(home: Home, number: int = 0, *, age_s: float = 0.0) -> str:
    digest, sealed = envelope(number)
    Outbox(home).put(digest, sealed)
    stamp = 1_800_000_000 - age_s
    os.utime(home.outbox_path(digest), (stamp, stamp))
    return digest


class TestSending:
    def test_an_offer_is_the_header_and_the_first_chunks(self, home: Home) -> None:
        digest, sealed = envelope(size=20 * CHUNK)
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, wire, again=False)
        message, blobs = wire.sent[0]
        assert message == Update(digest=digest, unasked=8)
        assert blobs == (sealed.header, sealed.signature, sealed.wrap)
        assert list(wire.chunks) == [0, 4]
        assert b"".join(wire.chunks.values()) == sealed.body[:UNASKED_BYTES]

    def test_the_first_chunks_come_in_messages_as_the_server_last_wanted_them(
        self, home: Home
    ) -> None:
        (first, one), (second, two) = envelope(0, 20 * CHUNK), envelope(1, 20 * CHUNK)
        wire, box = Wire(), Outbox(home)
        box.put(first, one)
        box.put(second, two)
        box.send_chunks(first, [9], wire, span=2)
        box.offer(second, wire, again=False)
        assert list(wire.chunks) == [9, 0, 2, 4, 6]

    def test_what_the_server_may_have_is_not_sent_again_unasked(self, home: Home) -> None:
        digest, sealed = envelope()
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, wire, again=True)
        assert [m for m, _ in wire.sent] == [Update(digest=digest, unasked=0)]

    def test_what_is_one_chunk_is_sent_at_once_every_time(self, home: Home) -> None:
        digest, sealed = envelope(size=10)
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, wire, again=True)
        assert wire.chunks == {0: sealed.body}

    @pytest.mark.parametrize("size", [10, 200_000])
    def test_nothing_is_sent_unasked_where_the_server_asks_first(
        self, home: Home, size: int
    ) -> None:
        digest, sealed = envelope(size=size)
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, wire, again=False, waits=True)
        assert [m for m, _ in wire.sent] == [Update(digest=digest, unasked=0)]

    def test_a_small_update_is_sent_whole(self, home: Home) -> None:
        digest, sealed = envelope(size=10)
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, wire, again=False)
        assert wire.chunks == {0: sealed.body}

    def test_chunks_that_are_asked_for_make_up_the_body(self, home: Home) -> None:
        """In any order; what does not exist is not sent."""
        digest, sealed = envelope()
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        count = len(parse_header(sealed.header, max_plain_bytes=1 << 30).hashes)
        box.send_chunks(digest, [*reversed(range(count)), count, 10**6, -1], wire, span=4)
        assert b"".join(wire.chunks[i] for i in range(count)) == sealed.body
        assert set(wire.chunks) == set(range(count))

    def test_chunks_that_follow_each_other_share_a_message(self, home: Home) -> None:
        digest, sealed = envelope()
        wire, box = Wire(), Outbox(home)
        box.put(digest, sealed)
        box.send_chunks(digest, [0, 1, 2, 4, 5], wire, span=2)
        assert {i: len(data) for i, data in wire.chunks.items()} == {
            0: 2 * CHUNK, 2: CHUNK, 4: len(sealed.body) - 4 * CHUNK,
        }  # fmt: skip
        assert all(sealed.body[i * CHUNK :].startswith(d) for i, d in wire.chunks.items())

    def test_after_a_restart_the_very_same_bytes_are_sent(self, home: Home) -> None:
        """Sealing anew would make another update of it."""
        digest, sealed = envelope()
        first, again = Wire(), Wire()
        box = Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, first, again=False)
        Outbox(Home(home.directory)).offer(digest, again, again=False)
        assert again.sent == first.sent

    def test_it_is_on_disk_before_anything_is_sent(self, home: Home) -> None:
        digest, sealed = envelope()
        Outbox(home).put(digest, sealed)
        assert home.outbox() == [digest]

    def test_a_damaged_file_is_not_sent(self, home: Home) -> None:
        digest = put(home)
        path = home.outbox_path(digest)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        wire = Wire()
        with pytest.raises(CorruptFile):
            Outbox(home).offer(digest, wire, again=False)
        assert wire.sent == []

    def test_an_update_that_is_not_there_is_an_error_with_its_path(self, home: Home) -> None:
        with pytest.raises(StorageError, match=HEX):
            Outbox(home).send_chunks(HEX, [0], Wire(), span=1)

    def test_an_inventory_lives_for_the_session_only_and_beside_updates(self, home: Home) -> None:
        digest, sealed = envelope(1)
        update = put(home)
        box, wire = Outbox(home), Wire()
        box.keep_for_session(digest, sealed)
        box.offer(digest, wire, again=False)
        box.offer(update, wire, again=False)
        box.send_chunks(digest, [4], wire, span=1)
        of = [m.digest for m, _ in wire.sent]
        assert of == sorted(of[:-1], key=[digest, update].index) + [digest]
        assert home.outbox() == [update]
        with pytest.raises(StorageError):
            Outbox(home).offer(digest, wire, again=False)

    def test_a_newer_inventory_takes_the_place_of_the_older(self, home: Home) -> None:
        box, wire = Outbox(home), Wire()
        old, new = envelope(1), envelope(2)
        box.keep_for_session(*old)
        box.keep_for_session(*new)
        box.offer(new[0], wire, again=False)
        with pytest.raises(StorageError):
            box.offer(old[0], wire, again=False)


class TestWaiting:
    def test_an_empty_outbox_waits_for_nothing(self, home: Home) -> None:
        assert Outbox(home).waiting() == (None, "")

    def test_an_update_is_found_with_the_round_it_belongs_to(self, home: Home) -> None:
        digest = put(home)
        found, name = Outbox(Home(home.directory)).waiting()
        assert name == digest
        assert found is not None
        wanted = order()
        assert (found.key, found.base) == (wanted.key, wanted.base)
        assert (found.parts, found.verdict) == ([], None), "their use is over"

    def test_the_newest_stays_and_older_ones_go_but_for_states_that_a_verdict_may_want(
        self, home: Home
    ) -> None:
        old, newest, middle = put(home, 0, age_s=9), put(home, 1), put(home, 2, age_s=5)
        for digest in (old, newest, middle):
            home.save_provisional(digest, Payload({"w": np.ones(1, np.float32)}))
        assert Outbox(home).waiting()[1] == newest
        assert home.outbox() == [newest]
        assert home.settle_provisional(old, counted=True), "the server may have had it"
        assert home.settle_provisional(newest, counted=True)

    def test_an_update_that_was_half_removed_leaves_its_state_to_the_verdict(
        self, home: Home
    ) -> None:
        """Killed while the update was removed after the Ack: the server has it."""
        acked = put(home)
        home.save_provisional(acked, Payload({"w": np.ones(1, np.float32)}))
        home.outbox_path(acked).unlink()
        assert Outbox(home).waiting() == (None, "")
        assert home.settle_provisional(acked, counted=True)

    @pytest.mark.parametrize(
        "damage",
        ["update cut", "update altered", "update empty", "update of another name"],
    )
    def test_a_damaged_one_is_dropped_and_an_older_whole_one_is_found(
        self, home: Home, damage: str
    ) -> None:
        whole, broken = put(home, 0, age_s=9), put(home, 1)
        update = home.outbox_path(broken)
        match damage:
            case "update cut":
                update.write_bytes(update.read_bytes()[:-1])
            case "update altered":
                update.write_bytes(update.read_bytes()[:-1] + b"\x00")
            case "update empty":
                update.write_bytes(b"")
            case "update of another name":
                update.write_bytes(home.outbox_path(whole).read_bytes())
                os.utime(update, (1_800_000_000, 1_800_000_000))
        assert Outbox(home).waiting()[1] == whole
        assert home.outbox() == [whole]

    def test_one_that_cannot_be_read_now_stays(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest, opened = put(home), os.open

        def refuse(path: object, *more: int) -> int:
            if path == home.outbox_path(digest):
                raise OSError(errno.EMFILE, "too many open files")
            return opened(path, *more)  # type: ignore[arg-type]

        monkeypatch.setattr("fcil_protocol.envelopes.stored_envelope.os.open", refuse)
        with pytest.raises(StorageError, match="cannot read"):
            Outbox(home).waiting()
        monkeypatch.undo()
        assert home.outbox() == [digest]
        assert Outbox(home).waiting()[1] == digest

    def test_what_this_process_put_there_is_read_in_pieces_and_not_hashed_again(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        digest, sealed = envelope()
        box, wire = Outbox(home), Wire()
        box.put(digest, sealed)
        monkeypatch.setattr(EnvelopeFile, "verify", lambda _: pytest.fail("read again"))
        box.offer(digest, wire, again=False)
        assert b"".join(wire.chunks.values()) == sealed.body
        with pytest.raises(pytest.fail.Exception):
            Outbox(home).offer(digest, wire, again=False)

    def test_a_file_that_nothing_is_sent_of_any_more_is_closed(self, home: Home) -> None:
        """Otherwise its space would not be free when it is removed."""
        before = len(os.listdir("/proc/self/fd"))
        digest, sealed = envelope()
        box = Outbox(home)
        box.put(digest, sealed)
        box.offer(digest, Wire(), again=False)
        box.forget("5" * 64)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        box.forget(digest)
        assert len(os.listdir("/proc/self/fd")) == before


def test_notes_that_earlier_versions_wrote_beside_updates_are_removed_at_the_start(
    home: Home,
) -> None:
    note = home.directory / "outbox" / f"{HEX}.json"
    note.write_text("{}")
    Outbox(home).waiting()
    assert not note.exists()
