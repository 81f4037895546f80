"""What a client keeps on disk: found again after a restart, whole or refused, this user's alone."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcil_client.state.home import (
    Enrolment,
    Home,
    client_command,
    data_digest,
    find_data,
    state_home,
)
from fcil_protocol.errors import CorruptFile, DataError, StorageError
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.payloads.payload import Payload, pack

FED, FED2 = FederationId("0123456789abcdef" * 2), FederationId("fedcba9876543210" * 2)
D1, D2 = "1" * 64, "2" * 64
RUN, RUN2 = "r20260102-030405-0a0b", "r20260102-030405-0a0c"
ME = Enrolment(
    client_id=ClientId("a" * 26),
    name="laptop:images",
    federation=FED,
    certificate="00ff",
    addresses=("127.0.0.1:7710", "10.0.0.1:7710"),
    data="/data/images",
)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


@pytest.fixture
def home(data: Path) -> Home:
    return Home.of(FED, data)


def state(value: float) -> Payload:
    return Payload({"w": np.full(3, value, np.float32)}, {"round": 1})


def value_of(home: Home) -> float:
    return float(home.state().f32("w")[0])


def files(home: Home) -> set[str]:
    return {str(p.relative_to(home.directory)) for p in home.directory.rglob("*") if p.is_file()}


class TestPlace:
    def test_it_lies_under_the_state_home_by_federation_and_folder(
        self, home: Home, data: Path, tmp_path: Path
    ) -> None:
        assert state_home() == tmp_path / "state" / "fcil"
        assert home.directory == state_home() / FED / data_digest(data)

    def test_two_folders_and_two_federations_are_four_clients(self, tmp_path: Path) -> None:
        homes = {
            Home.of(fed, tmp_path / name).directory for fed in (FED, FED2) for name in ("a", "b")
        }
        assert len(homes) == 4

    def test_one_folder_by_several_paths_is_one_client(
        self, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = tmp_path / "link"
        link.symlink_to(data)
        monkeypatch.chdir(tmp_path)
        digests = {data_digest(p) for p in (data, link, Path("images"), Path("./images/../images"))}
        assert len(digests) == 1

    def test_a_folder_name_of_any_bytes_has_a_digest(self, tmp_path: Path) -> None:
        name = os.fsdecode(b"im\xffges")
        assert len(data_digest(tmp_path / name)) == 16

    def test_others_may_not_look_inside_whatever_the_umask(self, data: Path) -> None:
        old = os.umask(0)
        try:
            home = Home.of(FED, data)
        finally:
            os.umask(old)
        for path in (home.directory, *(p for p in home.directory.iterdir() if p.is_dir())):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path

    def test_making_it_again_keeps_what_is_there(self, home: Home, data: Path) -> None:
        home.save_enrolment(ME)
        assert Home.of(FED, data).enrolment() == ME

    def test_a_place_that_cannot_be_made_is_said_with_its_path(
        self, data: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "state").write_text("a file is in the way")
        with pytest.raises(StorageError, match="create the client directory"):
            Home.of(FED, data)

    def test_only_enrolled_homes_are_known_those_of_one_folder_apart(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        Home.of(FED, one)
        assert Home.all() == Home.known(one) == []
        for fed, folder in ((FED, one), (FED2, one), (FED, two)):
            Home.of(fed, folder).save_enrolment(ME)
        assert [h.directory.parent.name for h in Home.known(one)] == [FED, FED2]
        assert len(Home.all()) == 3
        assert Home.known(tmp_path / "three") == []


class TestEnrolment:
    def test_it_comes_back_and_is_private(self, home: Home) -> None:
        assert home.enrolment() is None
        home.save_enrolment(ME)
        assert home.enrolment() == ME
        mode = (home.directory / "client.json").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600

    @pytest.mark.parametrize(
        "text",
        [
            "", "{", "[]", "null", "{}", '"x"', "\x00\x01",
            '{"client_id": "a"}',
            '{"client_id": 7, "name": "", "federation": "", "certificate": "", "addresses": [], "data": ""}',
            '{"client_id": "../../etc", "name": "", "federation": "", "certificate": "", "addresses": [], "data": ""}',
            '{"client_id": "aaaaaaaaaaaaaaaaaaaaaaaaaa", "name": "", "federation": "", "certificate": "", "addresses": 3, "data": ""}',
            '{"client_id": "aaaaaaaaaaaaaaaaaaaaaaaaaa", "name": "", "federation": "", "certificate": "", "addresses": [], "data": "", "more": 1}',
        ],
    )  # fmt: skip
    def test_a_damaged_file_is_named_and_what_to_do(self, home: Home, text: str) -> None:
        (home.directory / "client.json").write_text(text)
        with pytest.raises(CorruptFile, match=r"client\.json is damaged") as error:
            home.enrolment()
        assert "join again" in error.value.action


class TestSalt:
    def test_it_is_drawn_once_for_each_client(self, home: Home, tmp_path: Path) -> None:
        salt = home.salt()
        assert len(salt) == 16
        assert Home(home.directory).salt() == salt
        assert Home.of(FED, tmp_path / "other").salt() != salt

    @pytest.mark.parametrize("damaged", [b"", b"short", bytes(17)])
    def test_a_damaged_salt_is_refused_and_left_as_it_is(self, home: Home, damaged: bytes) -> None:
        """With another one, images that were kept for tests would be learned from."""
        path = home.directory / "salt"
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=f"expected 24 bytes .*, got {len(damaged)}"):
            home.salt()
        assert path.read_bytes() == damaged

    def test_every_flipped_bit_of_the_salt_is_seen(self, home: Home) -> None:
        home.salt()
        path = home.directory / "salt"
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CorruptFile, match="are consistent, got others"):
                home.salt()

    def test_a_salt_of_an_earlier_version_is_taken_as_it_is(self, home: Home) -> None:
        (home.directory / "salt").write_bytes(b"s" * 16)
        assert home.salt() == b"s" * 16

    def test_a_salt_that_is_gone_is_not_drawn_anew_once_images_were_split(self, home: Home) -> None:
        home.salt()
        (home.directory / "manifest.json").write_text("{}")
        (home.directory / "salt").unlink()
        with pytest.raises(CorruptFile, match="salt is gone") as error:
            home.salt()
        assert "remove manifest.json" in error.value.action
        assert not (home.directory / "salt").exists()
        (home.directory / "manifest.json").unlink()
        assert len(home.salt()) == 16


class TestFolders:
    def test_folders_that_somebody_removed_are_made_again_when_needed(self, home: Home) -> None:
        for name in ("outbox", "parts", "incoming", "provisional"):
            (home.directory / name).rmdir()
        for path in (home.outbox_path(D1), home.part_path(D1), home.incoming_path(D1)):
            path.write_bytes(b"x")
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        home.save_provisional(D1, state(1.0))
        assert home.settle_provisional(D1, counted=True)
        assert value_of(home) == 1.0


class TestState:
    def test_it_is_empty_before_the_first_update_counts(self, home: Home) -> None:
        assert home.state() == Payload()

    def test_a_provisional_state_becomes_the_state_when_its_update_counts(self, home: Home) -> None:
        home.save_provisional(D1, state(1.0))
        assert home.state() == Payload(), "not before the server has said so"
        assert home.settle_provisional(D1, counted=True)
        assert value_of(home) == 1.0
        assert not home.settle_provisional(D1, counted=True), "a verdict twice changes nothing"
        assert value_of(home) == 1.0

    def test_a_state_whose_update_does_not_count_is_discarded(self, home: Home) -> None:
        home.save_provisional(D1, state(1.0))
        home.settle_provisional(D1, counted=True)
        home.save_provisional(D2, state(2.0))
        assert home.settle_provisional(D2, counted=False)
        assert value_of(home) == 1.0
        assert not any("provisional" in f for f in files(home))

    def test_a_verdict_about_another_update_leaves_it_provisional(self, home: Home) -> None:
        home.save_provisional(D1, state(1.0))
        assert not home.settle_provisional(D2, counted=True)
        assert home.settle_provisional(D1, counted=True)

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
    def test_a_state_that_cannot_be_read_now_is_not_called_damaged(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Nobody is told to remove what the client has learned."""
        (home.directory / "state.safetensors").write_bytes(pack(Payload()))

        def fails(*_args: object) -> bytes:
            raise OSError(number, "x")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", fails)
            with pytest.raises(StorageError) as failed:
                home.state()
        assert failed.type is StorageError
        assert "Remove" not in str(failed.value)

    @pytest.mark.parametrize(
        "damage",
        [lambda d: d[:-1], lambda d: b"", lambda d: b"\xff" * 20, lambda d: d[:8] + b"x" + d[9:]],
        ids=["cut", "empty", "junk", "header"],
    )
    def test_a_damaged_state_is_named_and_what_to_do(
        self, home: Home, damage: Callable[[bytes], bytes]
    ) -> None:
        path = home.directory / "state.safetensors"
        path.write_bytes(damage(pack(state(1.0))))
        with pytest.raises(CorruptFile, match=r"state\.safetensors is damaged") as error:
            home.state()
        assert "Remove it" in error.value.action


class TestRun:
    def fill(self, home: Home) -> None:
        home.save_provisional(D1, state(1.0))
        home.settle_provisional(D1, counted=True)
        home.save_provisional(D2, state(2.0))
        home.outbox_path(D2).write_bytes(b"sealed")
        home.part_path(D1).write_bytes(b"part")

    def test_the_same_run_keeps_everything(self, home: Home) -> None:
        assert home.enter_run(RUN)
        self.fill(home)
        before = files(home)
        assert not Home(home.directory).enter_run(RUN)
        assert files(home) == before

    def test_another_run_forgets_state_updates_and_parts_and_keeps_the_client(
        self, home: Home
    ) -> None:
        home.enter_run(RUN)
        home.save_enrolment(ME)
        salt = home.salt()
        self.fill(home)
        assert home.enter_run(RUN2)
        assert home.state() == Payload()
        assert files(home) == {"client.json", "salt", "run"}
        assert (home.salt(), home.enrolment()) == (salt, ME)
        assert not home.enter_run(RUN2)

    def test_a_damaged_note_of_the_run_counts_as_another_run(self, home: Home) -> None:
        home.enter_run(RUN)
        (home.directory / "run").write_bytes(b"\xff\xfe")
        assert home.enter_run(RUN)
        assert not home.enter_run(RUN)


class TestParts:
    def test_parts_that_are_no_longer_named_are_removed_whole_or_arriving(self, home: Home) -> None:
        for digest in (D1, D2):
            home.part_path(digest).write_bytes(b"x")
            home.incoming_path(digest).write_bytes(b"x")
        home.prune_parts({D2, "3" * 64})
        assert files(home) == {f"parts/{D2}.part", f"incoming/{D2}"}

    def test_states_of_updates_that_are_gone_are_removed(self, home: Home) -> None:
        for digest in (D1, D2):
            home.save_provisional(digest, state(1.0))
        home.prune_provisional({D2})
        assert not home.settle_provisional(D1, counted=True)
        assert home.settle_provisional(D2, counted=True)

    def test_the_outbox_lists_updates_not_half_written_files(self, home: Home) -> None:
        for digest in (D2, D1):
            home.outbox_path(digest).write_bytes(b"x")
        (home.directory / "outbox" / f".{D1}.update.12-abcdef01.tmp").write_bytes(b"x")
        assert home.outbox() == [D1, D2]
        home.drop_outgoing(D1)
        home.drop_outgoing(D1)
        assert home.outbox() == [D2]


def test_a_data_path_that_is_not_there_is_told_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder or file") as error:
        find_data(str(tmp_path / "missing"))
    assert "<class>" in error.value.action
    assert find_data(str(tmp_path)) == tmp_path


def test_a_command_about_a_client_names_its_folder_and_slot(home: Home, data: Path) -> None:
    assert home.command("leave") == "fcil-client leave --data FOLDER"
    home.save_enrolment(replace(ME, data="/my data"))
    assert home.command("leave", "--yes") == "fcil-client leave --data '/my data' --yes"
    part = Home.of(FED, data, "0123abcd-007")
    part.save_enrolment(ME)
    assert part.command("peers") == "fcil-client peers --data /data/images --slot 7"
    assert part.command("join").endswith(" --data /data/images --partition FILE --slot 7")
    assert client_command("peers", data, seat="no-slot") == f"fcil-client peers --data {data}"
    (home.directory / "client.json").write_bytes(b"{")
    assert home.command("leave") == "fcil-client leave --data FOLDER"
