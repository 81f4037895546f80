"""What a swarm decides: who its members are, what it says of them, what they share."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from client.round_kit import FED
from fcil_client.doctor import examination
from fcil_client.membership import rotate_keys, wait_for_server
from fcil_client.notes import Note, Notes
from fcil_client.rounds import compute
from fcil_client.rounds.compute import Workplace
from fcil_client.rounds.options import ClientOptions
from fcil_client.session.events import Link, Work
from fcil_client.state.home import Home
from fcil_client.swarm import (
    seats as swarm_seats,
)
from fcil_client.swarm import (
    shared as swarm_shared,
)
from fcil_client.swarm import (
    status as swarm_status,
)
from fcil_client.swarm import (
    swarm,
)
from fcil_client.swarm.screen import Screen, end_line
from fcil_client.swarm.seats import (
    Enroller,
    find_seats,
    read_slots,
    restart_arguments,
    swarm_digest,
    swarm_name,
)
from fcil_client.swarm.swarm import Ends, Swarm, SwarmOutcome
from fcil_protocol.errors import DataError, FcilError, Unreachable, UsageError
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import RUN_DONE
from fcil_protocol.process import control_socket
from fcil_protocol.process.terminal import Format

KEY = RoundKey("r", 0, "train", 1)


# --- who the members are --------------------------------------------------------------------


def test_slots_are_numbers_and_ranges_each_once_in_order():
    assert read_slots("3, 0-2,2", 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "a", "2-1", "-1", "1-", "0-4", "4", "9" * 5000])
def test_slots_that_are_none_are_refused_in_words(text):
    with pytest.raises(UsageError, match="--slots"):
        read_slots(text, 4)


def test_each_folder_and_zip_file_of_a_folder_is_a_member(tmp_path):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("c.zip", "about.csv", "backup.tar", "notes.txt"):
        (tmp_path / name).touch()
    seats = find_seats(tmp_path, None, None, "lab")
    assert [s.name for s in seats] == ["lab-a", "lab-b", "lab-c.zip"]
    assert [s.data.name for s in seats] == ["a", "b", "c.zip"]
    assert swarm_name(seats) == "lab-a ... lab-c.zip"
    assert restart_arguments(seats) == f"--data {tmp_path}"
    assert swarm_digest(seats) != swarm_digest(seats[:2])


def test_lists_and_tars_are_members_where_no_folder_or_zip_file_is(tmp_path):
    for name in ("b.TAR", "a.csv", ".c.csv", "notes.txt"):
        (tmp_path / name).touch()
    seats = find_seats(tmp_path, None, None, "lab")
    assert [s.name for s in seats] == ["lab-a.csv", "lab-b.TAR"]


def test_a_folder_without_folders_and_slots_without_a_partition_are_refused(tmp_path):
    with pytest.raises(DataError, match="one folder"):
        find_seats(tmp_path, None, None, "swarm")
    with pytest.raises(UsageError, match="--partition"):
        find_seats(tmp_path, None, "0-1", "swarm")


def test_a_member_without_its_ticket_is_told_which_file_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "data" / "a").mkdir(parents=True)
    (seat,) = find_seats(tmp_path / "data", None, None, "swarm")
    with pytest.raises(UsageError, match=r"swarm-a\.ticket"):
        asyncio.run(Enroller(tickets=tmp_path).enrol(seat, None))


# --- what they share ------------------------------------------------------------------------


def test_open_files_that_are_not_enough_are_told_before_anybody_starts(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 500))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    with pytest.raises(UsageError, match=r"needs 928 open files.*may have 100"):
        swarm.raise_descriptor_limit(100)
    assert asked == [(500, 500)]


def test_a_backbone_is_described_once_for_all_and_asked_for_anew_if_it_is_another(
    tmp_path, monkeypatch
):
    calls = []

    async def persist(_host, _effort, op, fields):
        calls.append((op, fields["name"]))
        return {"description": "cpu", "info": None}, [b""]

    monkeypatch.setattr(compute, "persist", persist)
    info = SimpleNamespace(digest="0" * 64, preprocessing=None)
    monkeypatch.setattr(compute.backbone_info, "backbone_from_fields", lambda _: info)
    monkeypatch.setattr(compute.backbone_info, "preprocessing_digest", lambda _: "1" * 64)
    monkeypatch.setattr(compute, "unpack", lambda _: SimpleNamespace(f32=lambda _: [[0.0] * 4] * 4))

    async def ask(place):
        await asyncio.gather(*(place.backbone({"name": "a"}) for _ in range(5)))
        await place.backbone({"name": "b"})
        return list(calls)

    shared = Workplace(ClientOptions(tmp_path), tmp_path / "log", remembers=True)
    assert asyncio.run(ask(shared)) == [("backbone", "a"), ("backbone", "b")]
    calls.clear()
    assert len(asyncio.run(ask(Workplace(ClientOptions(tmp_path), tmp_path / "log")))) == 6


def test_what_fits_into_memory_holds_for_all_members_of_a_run(tmp_path):
    place = Workplace(ClientOptions(tmp_path), tmp_path / "log")
    place.enter("r1")
    place.effort.fits["train"] = 8
    place.enter("r1")  # a member that comes later
    assert place.effort.fits == {"train": 8}
    place.enter("r2")
    assert place.effort.fits == {}


class Waiting:
    """A client that has not connected yet."""

    def __init__(self):
        self.session = SimpleNamespace(link=Link.OFFLINE)


def test_members_start_a_few_at_a_time_and_give_their_turn_on_when_the_server_knows_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(swarm_shared, "STARTS", 2)

    async def scenario():
        shared = swarm_shared.Shared(
            ClientOptions(tmp_path), 4, tmp_path / "log", notes=Notes(lambda _: None),
            said_goodbye=lambda _: None,
        )  # fmt: skip
        clients = [Waiting() for _ in range(4)]
        around = [swarm_shared.SwarmHost(shared) for _ in clients]
        begun = [asyncio.create_task(a.begin(c)) for a, c in zip(around, clients, strict=True)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert [t.done() for t in begun] == [True, True, False, False]
        around[0].client_changed()  # it is still offline
        await asyncio.sleep(0)
        assert not begun[2].done()
        clients[0].session.link = Link.READY
        around[0].client_changed()
        around[0].client_changed()  # once is enough
        around[1].client_stopping()
        around[1].client_stopping()
        await asyncio.gather(*begun[2:])
        assert len(shared.members) == 3
        for one in around:
            one.client_stopping()
        assert shared.starts._value == 2
        await shared.close()

    asyncio.run(scenario())


# --- what it says ---------------------------------------------------------------------------


def member(name, *, link=Link.READY, work=Work.IDLE, key=None, error=None, counted=0):
    client = SimpleNamespace(
        session=SimpleNamespace(link=link, work=work, key=key), counted=counted,
        terms=SimpleNamespace(run="r"), application_bytes=(1_000_000, 2_000_000),
    )  # fmt: skip
    seat = SimpleNamespace(name=name)
    return SimpleNamespace(seat=seat, home=object(), client=client, error=error)


def test_a_summary_counts_members_by_what_they_do_and_leaves_out_who_failed():
    members = [
        member("a", work=Work.WORKING, key=KEY, counted=2),
        member("b", work=Work.FETCHING, key=KEY),
        member("c", link=Link.OFFLINE),
        member("d", error=DataError("no images"), counted=1),
        SimpleNamespace(seat=SimpleNamespace(name="e"), home=None, client=None, error=None),
    ]
    told = swarm.summary_of(members)
    assert (told["members"], told["connected"], told["enrolled"]) == (5, 2, 4)
    assert (told["working"], told["fetching"], told["counted"]) == (1, 1, 3)
    assert (told["bytes_up"], told["bytes_down"]) == (4_000_000, 8_000_000)
    assert list(told["failed"]) == ["d"]
    json.dumps(told)
    line = swarm_status.line(told)
    assert "2 of 5 connected" in line
    assert "task 0 train round 1: 1 fetching, 1 working" in line
    assert "1 failed" in line
    assert swarm_status.line(swarm.summary_of([])).startswith("0 of 0 connected")


def test_what_many_members_say_is_shown_once_with_how_many_said_it(capsys):
    screen = Screen(Format.JSONL, None)
    for name in "abc":
        screen.note(name, Note(1.0, "info", "asked"))
        screen.note(name, Note(1.0, "warning", "disk full"))
    screen.note("", Note(2.0, "info", "the run is done"))
    told = swarm.summary_of([member("a")])
    screen.summary(told)
    screen.summary(told)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    notes = [(n["member"], n["text"]) for n in lines if n["event"] == "note"]
    assert notes == [
        ("a", "disk full"), ("", "the run is done"),
        ("", "2 other members say the same: disk full"),
    ]  # fmt: skip
    assert [n["connected"] for n in lines if n["event"] == "summary"] == [1]


@pytest.mark.parametrize(
    ("outcome", "until_done", "code", "words"),
    [
        (SwarmOutcome(True, False), True, 0, "the run is done"),
        (SwarmOutcome(False, True), True, 1, "the server stopped"),
        (SwarmOutcome(False, False), True, 1, "stopped"),
        (SwarmOutcome(False, False), False, 0, "stopped"),
        (SwarmOutcome(True, False, {"a": DataError("x")}), True, 1, "1 failed: a"),
        (
            SwarmOutcome(False, False, {n: DataError("x") for n in "abcdefg"}),
            False,
            1,
            "and 2 more",
        ),
    ],
)
def test_the_exit_code_says_whether_all_went_to_the_end(outcome, until_done, code, words):
    told = SwarmOutcome(outcome.done, outcome.stopped, outcome.failed, {"members": 9, "counted": 3})
    assert told.code(until_done=until_done) == code
    assert words in end_line(told)


# --- a swarm whose members cannot start, and its ends ----------------------------------------


class NoDoor(Enroller):
    """Nobody is enrolled; with ``wait`` one is asked for ever."""

    async def enrol(self, seat, make):
        if seat.name.endswith("wait"):
            await asyncio.Event().wait()
        raise DataError(f"{seat.data.name} is no folder of images.")


def run(tmp_path, monkeypatch, names, *, beside=None, door=None, **ends):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in names:
        (tmp_path / "data" / name).mkdir(parents=True)
    said = []

    async def go():
        made = Swarm(
            find_seats(tmp_path / "data", None, None, "s"), ClientOptions(tmp_path), door or NoDoor(),
            notify=lambda name, note: said.append((name, note.text)), ends=Ends(**ends),
        )  # fmt: skip
        monkeypatch.setattr(swarm, "changes", _no_changes)
        running = asyncio.create_task(made.run())
        if beside is not None:
            await beside(made)
        return await running

    return asyncio.run(go()), said


async def _no_changes(*_):
    await asyncio.Event().wait()
    yield set()


def test_a_swarm_of_which_nobody_can_start_ends_and_names_each(tmp_path, monkeypatch):
    outcome, said = run(tmp_path, monkeypatch, ["a", "b"])
    assert list(outcome.failed) == ["s-a", "s-b"]
    assert outcome.code(until_done=False) == 1
    assert said[0][0] == "s-a"
    assert "takes no further part" in said[0][1]
    assert "a is no folder" in said[0][1]


class LateServer(NoDoor):
    """Nobody answers for the first two times."""

    tried = 0

    async def enrol(self, seat, make):
        LateServer.tried += 1
        if LateServer.tried <= 2:
            raise Unreachable("nobody answers.")
        return await super().enrol(seat, make)


@pytest.mark.parametrize("waits", [True, False])
def test_a_swarm_waits_for_its_server_unless_it_is_not_to(tmp_path, monkeypatch, waits):
    monkeypatch.setattr(wait_for_server, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(LateServer, "tried", 0)
    outcome, said = run(tmp_path, monkeypatch, ["a"], door=LateServer(waits=waits))
    assert LateServer.tried == (3 if waits else 1)
    assert ("a is no folder" in str(outcome.failed["s-a"])) == waits
    waited = [text for name, text in said if name == "s-a" and "keeps trying" in text]
    assert len(waited) == int(waits)


@pytest.mark.parametrize("together", [False, True])
def test_one_that_fails_ends_the_others_only_where_they_go_together(
    tmp_path, monkeypatch, together
):
    async def stop(made):
        while made.members[0].error is None:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
        assert not made._ending.is_set()
        made.stop()

    # The second stays at the door for ever.
    beside = None if together else stop
    outcome, said = run(tmp_path, monkeypatch, ["a", "wait"], beside=beside, together=together)
    assert list(outcome.failed) == ["s-a"]
    assert any("--together" in text for _, text in said) == together


@pytest.mark.parametrize(("code", "done"), [(RUN_DONE, True), ("", False)])
def test_a_goodbye_ends_a_swarm_that_was_to_stay_until_then(tmp_path, monkeypatch, code, done):
    async def beside(made):
        while not hasattr(made, "_shared"):  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
        made._shared.said_goodbye(code)
        made._shared.said_goodbye("")  # the same server stops after it

    outcome, _ = run(tmp_path, monkeypatch, ["wait"], until_done=True, beside=beside)
    assert (outcome.done, outcome.stopped) == (done, not done)
    assert outcome.code(until_done=True) == int(not done)


def test_a_swarm_that_was_not_told_to_end_stays_when_the_server_says_goodbye(tmp_path, monkeypatch):
    async def beside(made):
        while not hasattr(made, "_shared"):  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)
        made._shared.said_goodbye(RUN_DONE)
        made._shared.said_goodbye("")
        assert not made._ending.is_set()
        made.stop()

    outcome, _ = run(tmp_path, monkeypatch, ["wait"], beside=beside)
    assert (outcome.done, outcome.stopped) == (True, False)


# --- how other commands see it --------------------------------------------------------------


def test_homes_are_found_in_the_swarms_that_have_them_and_a_damaged_record_is_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    homes = [Home.of(FED, tmp_path / name) for name in "ab"]
    for number, content in enumerate((
        swarm_status.record_bytes("s", "--data x", {"s-a": str(homes[0].directory)}),
        b"{}", b"\xff",
    )):  # fmt: skip
        folder = swarm_status.swarms() / str(number)
        folder.mkdir(parents=True)
        (folder / swarm_status.RECORD).write_bytes(content)
    inside = swarm_status.swarms_of(homes)
    assert list(inside) == [homes[0].directory]
    # The doctor looks at one of each swarm: all of them share machine, worker and network.
    more = [Home.of(FED, tmp_path / name) for name in "cd"]
    for home in (*homes, *more):
        (home.directory / "client.json").touch()
    members = {n: str(h.directory) for n, h in zip("acd", (homes[0], *more), strict=True)}
    record = swarm_status.record_bytes("s", "--data x", members)
    (swarm_status.swarms() / "0" / swarm_status.RECORD).write_bytes(record)
    seen = {home.directory for home in examination._all()}
    assert len(seen) == 2
    assert homes[1].directory in seen
    row = swarm_status.one_swarm(inside[homes[0].directory], 1.0)
    assert (row["members"], row["running"], row["answers"]) == (1, False, False)
    with pytest.raises(FcilError):
        swarm_status.ask(homes[0], 1.0)


def test_of_two_swarms_with_the_same_members_the_one_counts_that_runs_or_ran_last(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # Where the sockets of long paths are: another run of the tests may have left this very one.
    monkeypatch.setattr(control_socket.tempfile, "tempdir", str(tmp_path))
    home = Home.of(FED, tmp_path / "a")
    content = swarm_status.record_bytes("s", "--data x", {"s-a": str(home.directory)})
    folders = [swarm_status.swarms() / name for name in ("1", "0", "2")]
    for began, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / swarm_status.RECORD).write_bytes(content)
        os.utime(folder / swarm_status.RECORD, (began, began))
        assert swarm_status.swarms_of([home])[home.directory].directory == folder
    socket = control_socket.socket_path(folders[1])
    socket.parent.mkdir(exist_ok=True)
    socket.touch()
    assert swarm_status.swarms_of([home])[home.directory].directory == folders[1]


def test_a_swarm_stays_when_the_folder_of_its_folders_is_touched(tmp_path, monkeypatch):
    data, seen = tmp_path / "data", asyncio.Event()

    async def changes(*_):
        yield {str(data)}
        yield {str(data / "new")}
        seen.set()
        await asyncio.Event().wait()

    async def beside(made):
        monkeypatch.setattr(swarm, "changes", changes)
        async with asyncio.timeout(5):
            await seen.wait()
        await asyncio.sleep(0)
        assert not made._ending.is_set()
        made.stop()

    _, said = run(tmp_path, monkeypatch, ["wait"], beside=beside)
    assert said == []


def test_a_key_change_that_a_kill_interrupted_is_finished_for_a_slot_too(tmp_path, monkeypatch):
    asked = []

    async def finish(data, seat):
        asked.append((data, seat))
        return ()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(rotate_keys, "finish", finish)
    monkeypatch.setattr(swarm_seats.Seat, "seat", "0123abcd-000")
    with pytest.raises(UsageError, match="no ticket"):
        asyncio.run(Enroller(tickets=tmp_path).enrol(swarm_seats.Seat("s", tmp_path), None))
    assert asked == [(tmp_path, "0123abcd-000")]


def test_a_swarm_goes_on_when_nobody_reads_what_it_prints():
    code = (
        "from fcil_client.notes import Note\n"
        "from fcil_client.swarm.screen import Screen\n"
        "from fcil_protocol.process.terminal import Format, errors\n"
        "screen = Screen(Format.JSONL, None)\n"
        "with errors(Format.JSONL):\n"
        "    input()\n"
        "    for _ in range(3):\n"
        "        screen.note('a', Note(1.0, 'error', 'x' * 10_000))\n"
        "        screen.note('', Note(1.0, 'info', 'y'))\n"
        "    raise SystemExit(7)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.close()  # as `| head` does
        _, said = process.communicate(b"\n", timeout=60)
    assert (process.returncode, said) == (7, b"")
