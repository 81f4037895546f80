"""Becoming a member on the server's own machine: keys are made here and stay here."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fcil_client.cli.main import app
from fcil_client.doctor.probes import clients
from fcil_client.membership import enrol, leave
from fcil_client.membership.enrol import JoinFile, find, find_member, join_files, moved
from fcil_client.state.home import Home, state_home
from fcil_protocol.errors import (
    KeyFileError,
    LinkError,
    TrustError,
    Unreachable,
    UsageError,
    WrongClock,
)
from fcil_protocol.process import control_socket
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys

ROOT, ROOT2 = RootKey(b"\x07" * 32), RootKey(b"\x08" * 32)
SERVER = PrivateKeys(curve=b"\x01" * 32, signing=b"\x02" * 32, sealing=b"\x03" * 32)
CLIENT_ID = "a" * 26


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


class Server:
    """A server's directory with its join file, and the one command that enrolment needs."""

    def __init__(self, directory: Path, root: RootKey = ROOT, name: str = "lab") -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.name = name
        self.addresses = [f"127.0.0.1:{7710 + len(join_files())}"]
        self.certificate = root.certify(SERVER.public)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.write()

    @property
    def join_file(self) -> Path:
        return state_home() / "servers" / f"{self.root.federation}.json"

    def write(self) -> None:
        self.join_file.parent.mkdir(parents=True, exist_ok=True)
        fields = {
            "federation": self.root.federation,
            "name": self.name,
            "directory": str(self.directory),
            "addresses": self.addresses,
        }
        self.join_file.write_text(json.dumps(fields))

    async def _handle(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        if op == "status":
            return {"federation": {"id": self.root.federation}}
        self.asked.append((op, fields))
        return {
            "client_id": CLIENT_ID,
            "name": fields["name"],
            "certificate": self.certificate.to_bytes().hex(),
            "addresses": self.addresses,
        }

    def running(self, work: Callable[[], Any]) -> Any:
        """Do something while the server answers."""

        async def both() -> Any:
            door = await control_socket.serve(self.directory, self._handle)
            try:
                return await asyncio.wait_for(asyncio.to_thread(work), 60)
            finally:
                door.close()
                await door.wait_closed()

        return asyncio.run(both())


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "federation")


class TestJoinFiles:
    def test_there_are_none_at_first(self) -> None:
        assert join_files() == []

    def test_a_running_server_is_found(self, server: Server) -> None:
        assert join_files() == [
            JoinFile(ROOT.federation, "lab", server.directory, ("127.0.0.1:7710",))
        ]

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"federation": "x"}', "\x00"])
    def test_one_that_is_half_written_or_removed_is_passed_over(
        self, server: Server, text: str
    ) -> None:
        (server.join_file.parent / "broken.json").write_text(text)
        (server.join_file.parent / "gone.json").symlink_to("nowhere")
        assert [j.name for j in join_files()] == ["lab"]


class TestFirstTime:
    def test_a_new_folder_is_enrolled(self, server: Server, data: Path) -> None:
        home, me = server.running(lambda: find(data, None))
        assert home.enrolment() == me
        assert (me.client_id, me.federation) == (CLIENT_ID, ROOT.federation)
        assert me.addresses == ("127.0.0.1:7710",)
        assert me.data == str(data.resolve())
        assert me.certificate == server.certificate.to_bytes().hex()

    def test_only_public_keys_travel(self, server: Server, data: Path) -> None:
        home, _ = server.running(lambda: find(data, None))
        ((op, fields),) = server.asked
        assert op == "enrol_local"
        keys = PrivateKeys.load(home.keys_path)
        sent = PublicKeys.from_fields({k: bytes.fromhex(v) for k, v in fields["keys"].items()})
        assert sent == keys.public
        secrets = json.loads(home.keys_path.read_text())
        text = json.dumps(fields)
        for name in ("curve", "signing", "sealing"):
            assert secrets[name] not in text
        assert keys.curve_secret.hex() not in text

    def test_key_file_and_enrolment_are_this_users_alone(self, server: Server, data: Path) -> None:
        home, _ = server.running(lambda: find(data, None))
        for path in (home.keys_path, home.directory / "client.json"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_the_name_says_which_machine_and_folder_within_its_limit(
        self, server: Server, tmp_path: Path
    ) -> None:
        folder = tmp_path / ("n" * 200)
        folder.mkdir()
        _, me = server.running(lambda: find(folder, None))
        assert 0 < len(me.name) <= 128
        assert ":nnn" in me.name

    def test_two_folders_are_two_clients_with_their_own_keys(
        self, server: Server, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            server.running(lambda name=name: find(tmp_path / name, None))
        sent = [fields["keys"]["curve"] for _, fields in server.asked]
        assert sent[0] != sent[1]

    def test_a_certificate_of_another_federation_is_refused_and_nothing_is_kept(
        self, server: Server, data: Path
    ) -> None:
        server.certificate = ROOT2.certify(SERVER.public)
        with pytest.raises(TrustError, match="another federation"):
            server.running(lambda: find(data, None))
        assert Home.known(data) == []

    def test_a_certificate_that_the_root_did_not_sign_is_refused_and_nothing_is_kept(
        self, server: Server, data: Path
    ) -> None:
        """Found now, in a sentence, and not at every later start."""
        good = server.certificate
        forged = type(good)(good.body, bytes(64))
        server.certificate = forged
        with pytest.raises(TrustError):
            server.running(lambda: find(data, None))
        assert Home.known(data) == []

    def test_a_refusal_of_the_server_is_told_as_it_is(
        self, server: Server, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(op: str, fields: dict[str, Any]) -> dict[str, Any]:
            raise UsageError("not today.")

        monkeypatch.setattr(server, "_handle", refuse)
        with pytest.raises(UsageError, match="not today"):
            server.running(lambda: find(data, None))

    def test_keys_that_were_made_before_a_failed_enrolment_are_used_again(
        self, server: Server, data: Path
    ) -> None:
        """The server knows the key by then, if only its answer was lost."""
        with pytest.raises(LinkError):
            find(data, None)
        first = PrivateKeys.load_or_new(Home.of(ROOT.federation, data).keys_path).public
        server.running(lambda: find(data, None))
        assert server.asked[0][1]["keys"]["curve"] == first.curve.hex()


class TestNobodyThere:
    def test_without_a_server_and_never_enrolled_it_says_how_to_start_one(self, data: Path) -> None:
        with pytest.raises(Unreachable, match="not enrolled") as error:
            find(data, None)
        assert "fcil-server serve" in error.value.action
        assert f"fcil-client join --data {data} --ticket FILE" in error.value.action
        with pytest.raises(Unreachable, match="'lab'"):
            find(data, "lab")

    def test_a_server_that_was_killed_left_its_join_file(self, server: Server, data: Path) -> None:
        # Not any LinkError: `join` waits for this one.
        with pytest.raises(Unreachable, match="lab.*does not answer") as error:
            find(data, None)
        assert error.value.action.endswith(f"fcil-server serve --dir {server.directory}")
        assert Home.known(data) == []


class TestAgain:
    @pytest.fixture
    def enrolled(self, server: Server, data: Path) -> tuple[Home, Any]:
        return server.running(lambda: find(data, None))

    def test_an_enrolled_folder_needs_no_answer(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        home, me = find(data, None)
        assert (home.directory, me) == (enrolled[0].directory, enrolled[1])
        assert len(server.asked) == 1

    def test_nor_the_time(
        self,
        server: Server,
        data: Path,
        enrolled: tuple[Home, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A device without a battery learns it after its start."""
        monkeypatch.setattr(enrol.time, "time", lambda: 0.0)
        assert server.running(lambda: find(data, None))[1] == enrolled[1]
        with pytest.raises(WrongClock):
            server.running(lambda: find(data.parent, None))  # a new folder waits

    def test_nor_a_server_on_this_machine(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        server.join_file.unlink()
        assert find(data, None)[1] == enrolled[1]

    def test_a_server_that_moved_is_followed_and_its_key_stays_pinned(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        server.addresses = ["127.0.0.1:9999", "[::1]:9999"]
        server.write()
        home, me = server.running(lambda: find(data, None))
        assert me.addresses == ("127.0.0.1:9999", "[::1]:9999")
        assert me.certificate == enrolled[1].certificate
        assert home.enrolment() == me

    def test_the_doctor_and_who_leaves_look_where_it_moved_to(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        home, me = enrolled
        assert moved(me) is None
        server.addresses = ["127.0.0.1:1"]  # nothing listens there
        server.write()
        facts = server.running(lambda: clients.look(home))
        assert [a.address for a in facts.network.addresses] == ["127.0.0.1:1"]
        assert moved(me) is None, "the join file of a server that was killed"
        assert home.enrolment() == me, "the doctor changes nothing"
        assert moved(replace(me, link_key="relay")) is None

    def test_a_known_server_that_was_killed_changes_no_address(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        server.addresses = ["127.0.0.1:1"]
        server.write()
        assert find(data, None)[1] == enrolled[1]

    def test_who_leaves_hears_how_to_do_so_without_the_server(
        self,
        server: Server,
        data: Path,
        enrolled: tuple[Home, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        asked = []

        async def away(_: Home, enrolment: Any) -> None:
            asked.append(enrolment.addresses)
            raise Unreachable("no server answers.")

        monkeypatch.setattr(leave, "notify_server", away)
        server.addresses = ["127.0.0.1:1"]
        server.write()
        done = server.running(
            lambda: CliRunner().invoke(app, ["leave", "--data", str(data), "--yes"])
        )
        assert done.exit_code == 2
        assert "give --without-server" in done.stderr
        assert asked == [("127.0.0.1:1",)]
        assert enrolled[0].enrolment() is not None

    def test_a_key_file_that_others_may_read_is_not_used(
        self, server: Server, data: Path, enrolled: tuple[Home, Any]
    ) -> None:
        enrolled[0].keys_path.chmod(0o644)
        with pytest.raises(KeyFileError, match="0600"):
            PrivateKeys.load_or_new(enrolled[0].keys_path)


class TestSeveral:
    @pytest.fixture
    def servers(self, tmp_path: Path) -> tuple[Server, Server]:
        return (
            Server(tmp_path / "one", ROOT, "lab"),
            Server(tmp_path / "two", ROOT2, "office"),
        )

    def test_one_must_be_named_and_the_choices_are(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        with pytest.raises(UsageError, match=r"lab \(127\.0\.0\.1:7710\)") as error:
            find(data, None)
        assert "office" in error.value.message
        assert "--server" in error.value.action

    @pytest.mark.parametrize("by", ["name", "id", "address"])
    def test_it_is_named_by_name_id_or_address(
        self, servers: tuple[Server, Server], data: Path, by: str
    ) -> None:
        word = {"name": "office", "id": ROOT2.federation, "address": "127.0.0.1:7711"}[by]
        _, me = servers[1].running(lambda: find(data, word))
        assert me.federation == ROOT2.federation
        assert servers[0].asked == []

    def test_a_join_file_whose_server_is_gone_does_not_count(
        self, servers: tuple[Server, Server], data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def handle(op: str, fields: dict[str, Any]) -> dict[str, Any]:
            if op == "status":
                return {"federation": {"id": ROOT2.federation}}
            return await Server._handle(servers[1], op, fields)

        monkeypatch.setattr(servers[1], "_handle", handle)
        _, me = servers[1].running(lambda: find(data, None))
        assert me.federation == ROOT2.federation

    def test_who_was_invited_elsewhere_is_not_enrolled_with_a_server_that_runs_here(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        servers[0].running(lambda: find(data, "lab"))
        home, me = find(data, ROOT.federation)
        servers[0].join_file.unlink()
        home.save_enrolment(replace(me, ticket="a" * 64))
        assert servers[1].running(lambda: find(data, None))[1].federation == ROOT.federation
        assert servers[1].running(lambda: find(data, "office"))[1].federation == ROOT2.federation

    def test_an_enrolled_folder_may_be_named_by_its_federations_name(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        for server, word in zip(servers, ("lab", "office"), strict=True):
            server.running(lambda word=word: find(data, word))
        assert find_member(data, "office")[1].federation == ROOT2.federation
        assert find_member(data, "nowhere") is None

    def test_asking_leaves_no_directories_behind(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        with pytest.raises(UsageError):
            find(data, None)
        assert {p.name for p in state_home().iterdir()} == {"servers"}

    def test_an_unknown_name_is_told(self, servers: tuple[Server, Server], data: Path) -> None:
        with pytest.raises(Unreachable, match="'nowhere'"):
            find(data, "nowhere")

    def test_a_name_that_none_of_the_running_servers_has_is_not_waited_for(
        self, servers: tuple[Server, Server], data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def handle(_op: str, _fields: dict[str, Any]) -> dict[str, Any]:
            return {"federation": {"id": ROOT2.federation}}

        monkeypatch.setattr(servers[1], "_handle", handle)
        with pytest.raises(LinkError, match=r"'nowhere'.*; there is office \(127.*7711\)") as error:
            servers[1].running(lambda: find(data, "nowhere"))
        assert not isinstance(error.value, Unreachable)

    def test_enrolled_with_both_and_none_running_one_must_be_named(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        for server, word in zip(servers, ("lab", "office"), strict=True):
            server.running(lambda word=word: find(data, word))
        for server in servers:
            server.join_file.unlink()
        known = r"2 federations: \w{12} \(127\.0\.0\.1:771\d\), \w{12} \(127\.0\.0\.1:771\d\)\."
        with pytest.raises(UsageError, match=known):
            find(data, None)
        assert find(data, "127.0.0.1:7711")[1].federation == ROOT2.federation
        assert find(data, ROOT.federation)[1].federation == ROOT.federation

    def test_a_member_of_both_is_meant_where_the_server_runs(
        self, servers: tuple[Server, Server], data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for server, word in zip(servers, ("lab", "office"), strict=True):
            server.running(lambda word=word: find(data, word))

        async def handle(_op: str, _fields: dict[str, Any]) -> dict[str, Any]:
            return {"federation": {"id": ROOT2.federation}}

        monkeypatch.setattr(servers[1], "_handle", handle)
        found = servers[1].running(lambda: find_member(data, None))
        assert found[1].federation == ROOT2.federation
        with pytest.raises(UsageError, match="2 federations"):
            find_member(data, None)

    def test_one_enrolled_and_its_server_away_the_other_servers_are_no_obstacle(
        self, servers: tuple[Server, Server], data: Path
    ) -> None:
        """A folder goes back to its own federation when that is named."""
        servers[0].running(lambda: find(data, "lab"))
        servers[0].join_file.unlink()
        assert find(data, ROOT.federation)[1].federation == ROOT.federation


@pytest.mark.parametrize(
    "change",
    [{"federation": "../../../escape"}, {"federation": 7}, {"addresses": []}],
    ids=["path", "number", "nowhere"],
)
def test_a_join_file_that_no_server_writes_is_passed_over(
    server: Server, data: Path, change: dict[str, Any]
) -> None:
    """The federation becomes the name of a directory."""
    fields = json.loads(server.join_file.read_text())
    server.join_file.write_text(json.dumps(fields | change))
    with pytest.raises(Unreachable):
        find(data, None)
    assert {p.name for p in state_home().iterdir()} == {"servers"}
    assert not (state_home() / "../../../escape").exists()
