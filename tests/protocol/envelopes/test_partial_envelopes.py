"""What has come of envelopes: kept for who comes back, within bounds, swept in the end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fcil_protocol import PROTOCOL_VERSION
from fcil_protocol.envelopes import partial_envelopes as module
from fcil_protocol.envelopes.assembly import Assembly
from fcil_protocol.envelopes.envelope import Core, Sealed, seal
from fcil_protocol.envelopes.partial_envelopes import Arriving
from fcil_protocol.errors import StorageError
from fcil_protocol.ids import ClientId, FederationId, RoundKey, RunId
from fcil_protocol.trust.keys import PrivateKeys

ANN, BOB = ClientId("a" * 26), ClientId("b" * 26)
KEYS = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
CHUNK = 16 << 10


def envelope(number: int, chunks: int = 3) -> Sealed:
    core = Core(
        protocol=PROTOCOL_VERSION, federation=FederationId("0" * 32), run="r20260102-030405-0a0b",
        direction="update", sender="a" * 26, sender_key=KEYS.public.fingerprint,
        recipient="server", method="m", schema="", task=0, round=number, kind="train", base=0,
    )  # fmt: skip
    plain = hashlib.shake_256(b"%d" % number).digest(chunks * CHUNK - 1000)
    return seal(plain, core, KEYS, chunk_bytes=CHUNK)[0]


ENVELOPES = [envelope(n) for n in range(4)]


@pytest.fixture(params=["memory", "file"])
def arriving(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arriving:
    if request.param == "file":
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", 0)
    return Arriving(tmp_path, per_client=2)


def begin(arriving: Arriving, client: ClientId, *numbers: int) -> None:
    for n in numbers:
        arriving.take(client, ENVELOPES[n].parsed).put(0, bytes(ENVELOPES[n].chunk(0)))


def has(arriving: Arriving, client: ClientId, number: int) -> bool:
    """Whether the first chunk is still there; asking makes the envelope the newest."""
    return arriving.take(client, ENVELOPES[number].parsed).has(0)


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir()}


def test_who_comes_back_finds_what_had_arrived(arriving: Arriving) -> None:
    begin(arriving, ANN, 1)
    assert has(arriving, ANN, 1)
    assert not has(arriving, BOB, 2)


def test_the_oldest_of_a_client_gives_way(arriving: Arriving) -> None:
    begin(arriving, ANN, 0, 1, 2)
    assert has(arriving, ANN, 2)
    assert has(arriving, ANN, 1)
    assert not has(arriving, ANN, 0)


def test_who_comes_back_is_the_newest_again(arriving: Arriving) -> None:
    begin(arriving, ANN, 0, 1)
    assert has(arriving, ANN, 0)
    begin(arriving, ANN, 2)
    assert has(arriving, ANN, 0)
    assert not has(arriving, ANN, 1)


def test_clients_do_not_take_each_others_place(arriving: Arriving) -> None:
    begin(arriving, ANN, 0, 1)
    begin(arriving, BOB, 2, 3)
    assert has(arriving, ANN, 0)
    assert has(arriving, ANN, 1)
    assert has(arriving, BOB, 2)
    assert has(arriving, BOB, 3)


def test_one_that_is_over_leaves_its_place_and_nothing_else(
    arriving: Arriving, tmp_path: Path
) -> None:
    begin(arriving, ANN, 0, 1)
    arriving.drop(ANN, ENVELOPES[1].parsed.update_id)
    arriving.drop(BOB, ENVELOPES[1].parsed.update_id)  # nobody knew of it
    assert ENVELOPES[1].parsed.update_id not in names(tmp_path)
    begin(arriving, ANN, 2)
    assert has(arriving, ANN, 0)


def test_envelopes_of_a_kind_are_those_of_all_its_rounds(arriving: Arriving) -> None:
    begin(arriving, ANN, 0, 1)
    run = RunId("r20260102-030405-0a0b")
    ids = {ENVELOPES[n].parsed.update_id for n in (0, 1)}
    assert arriving.of_kind(RoundKey(run, 0, "train", 7)) == ids
    assert arriving.of_kind(RoundKey(run, 0, "finish", 0)) == set()
    assert arriving.of_kind(RoundKey(run, 1, "train", 0)) == set()


def test_after_an_asynchronous_round_files_of_an_earlier_process_stay(
    arriving: Arriving, tmp_path: Path
) -> None:
    (tmp_path / ("a" * 64)).write_bytes(b"part")
    arriving.sweep((), files=False)
    assert (tmp_path / ("a" * 64)).exists()
    arriving.sweep(())
    assert not (tmp_path / ("a" * 64)).exists()


def test_a_sweep_leaves_what_somebody_goes_on_with(arriving: Arriving, tmp_path: Path) -> None:
    (tmp_path / "of an earlier process").write_bytes(b"half")
    begin(arriving, ANN, 0, 1)
    kept = ENVELOPES[1].parsed.update_id
    arriving.sweep({kept})
    assert names(tmp_path) <= {kept}
    assert has(arriving, ANN, 1)
    assert not has(arriving, ANN, 0)


def test_memory_is_bounded_and_what_exceeds_it_goes_to_files(tmp_path: Path) -> None:
    size = ENVELOPES[0].parsed.sealed_bytes
    arriving = Arriving(tmp_path, per_client=9, memory_bytes=2 * size)
    begin(arriving, ANN, 0, 1, 2)
    in_file = ENVELOPES[2].parsed.update_id
    assert names(tmp_path) == {in_file}
    arriving.drop(ANN, ENVELOPES[0].parsed.update_id)
    begin(arriving, ANN, 3)
    assert names(tmp_path) == {in_file}, "what was dropped has made room"
    assert all(has(arriving, ANN, n) for n in (1, 2, 3))


def test_what_a_sweep_forgets_makes_room_in_memory(tmp_path: Path) -> None:
    arriving = Arriving(tmp_path, per_client=9, memory_bytes=ENVELOPES[0].parsed.sealed_bytes)
    for number in (0, 1, 2):
        begin(arriving, ANN, number)
        arriving.sweep(set())
        assert names(tmp_path) == set()


def test_a_file_of_an_earlier_process_is_gone_on_with(tmp_path: Path) -> None:
    """Also by a server that would keep such a small envelope in memory."""
    sealed = ENVELOPES[0]
    Assembly(sealed.parsed, path=tmp_path / sealed.parsed.update_id).put(1, bytes(sealed.chunk(1)))
    assert Arriving(tmp_path, per_client=2).take(ANN, sealed.parsed).has(1)


def test_a_file_that_cannot_be_removed_is_said(tmp_path: Path) -> None:
    arriving = Arriving(tmp_path, per_client=1)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="folder"):
        arriving.sweep(set())
