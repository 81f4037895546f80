"""How the doctor finds out: in a process that may die, in folders that it leaves as they were."""

import io
import json
import os
import socket
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from fcil_adapters.backbones.known import embedded_file
from fcil_adapters.images.decoding import open_source
from fcil_adapters.images.sources import FolderSource
from fcil_client.data.manifest import NAME, scan
from fcil_client.doctor.checks.facts import BackboneFacts, DoctorFacts, EngineFacts, Skip
from fcil_client.doctor.checks.findings import exit_code
from fcil_client.doctor.checks.register import examine
from fcil_client.doctor.examination import Examination, Wishes
from fcil_client.doctor.probes import clients, engine_child, engines, images, network, system
from fcil_client.state.home import Enrolment, Home
from fcil_protocol.errors import DataError, Timeout, WorkerDied, WorkerError
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.certificate import RootKey
from fcil_protocol.trust.keys import PrivateKeys
from fcil_protocol.trust.ticket import Ticket
from orphans import ends_with_its_parent

FED = FederationId("0123456789abcdef" * 2)


def write_images(folder, *, per_class=6, classes=("cat", "dog")):
    for name in classes:
        rng = np.random.default_rng(crc32(name.encode()))
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def _raise(error):
    raise error


def everything_below(folder):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def states(facts):
    return {finding.id: finding.level.value for finding in examine(DoctorFacts(images=facts))}


# --- the child process ----------------------------------------------------------------------


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Let a program of the test's be the child."""

    def make(body):
        (tmp_path / "made_child.py").write_text(f"import os, sys, json, signal\n{body}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(engines, "CHILD", "made_child")

    return make


def test_a_driver_that_crashes_ends_a_child_and_not_the_doctor(child):
    body = "sys.stdin.readline(); print('libcuda: boom', file=sys.stderr, flush=True)"
    child(f"{body}; os.kill(os.getpid(), signal.SIGSEGV)")
    for _ in range(2):  # the next request gets a child of its own
        with pytest.raises(WorkerDied, match=r"ended by SIGSEGV: libcuda: boom"):
            engines.ask("torch", 30)


def test_a_driver_that_hangs_costs_no_more_than_its_time(child, tmp_path):
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    child(f"{note}; os.read(os.pipe()[0], 1)")  # nobody ever writes to that pipe
    with pytest.raises(Timeout, match="no answer within 1 s"):
        engines.ask("torch", 1)
    if (tmp_path / "pid").exists() and (number := (tmp_path / "pid").read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def test_what_the_child_raises_comes_back_with_its_code(child):
    fault = {"fault": "no such weights.", "action": "Give others.", "code": "data_invalid"}
    child(f"sys.stdin.readline(); print(json.dumps({fault!r}), flush=True)")
    with pytest.raises(DataError, match="no such weights"):
        engines.ask("forward", 30)


def test_the_real_child_answers_a_wrong_request_and_the_next_one():
    with pytest.raises(WorkerError, match="KeyError"):
        engines.ask("nothing", 60)
    said = engines.ask("onnxruntime", 60)
    assert said["providers"]["CPUExecutionProvider"] == ""


def test_a_driver_that_hangs_when_the_child_ends_is_not_waited_for(child):
    """It has been of use until then, and its answer is there."""
    child(
        "import atexit; from fcil_client.doctor.probes import engine_child\n"
        "atexit.register(lambda: os.read(os.pipe()[0], 1))\n"
        "engine_child.answer = lambda line: print('noise') or {'said': len(line) > 0}\n"
        "engine_child.main()"
    )
    assert engines.ask("torch", 60) == {"said": True}


def test_a_driver_that_hangs_ends_with_a_doctor_that_is_killed(child, tmp_path):
    os.mkfifo(tmp_path / "pid")
    child(
        "from fcil_client.doctor.probes import engine_child\n"
        "def hang(_request):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    signal.pause()\n"
        "engine_child._TASKS['torch'] = hang\n"
        "engine_child.main()"
    )
    ends_with_its_parent(
        "import sys, threading\n"
        "from fcil_client.doctor.probes import engines\n"
        "engines.CHILD = 'made_child'\n"
        "threading.Thread(target=engines.ask, args=('torch', 600), daemon=True).start()\n"
        f"print(open({str(tmp_path / 'pid')!r}).read(), flush=True)\n"
        "sys.stdin.read()\n"
    )


def test_the_embedded_backbone_is_loaded_timed_and_compared_with_what_the_package_brings(
    monkeypatch,
):
    def ask(task, _limit_s, **fields):
        return json.loads(json.dumps(engine_child.answer(json.dumps({"task": task, **fields}))))

    monkeypatch.setattr(engine_child, "FORWARD_S", 0.01)
    monkeypatch.setattr(engines, "ask", ask)
    wanted = clients.embedded()
    loaded = engines.load(wanted, "onnx", "cpu")
    facts = BackboneFacts(wanted, loaded, np.load(embedded_file(".probe.npy")))
    found = examine(DoctorFacts(backbone=facts))
    assert [finding.level.value for finding in found] == ["ok"] * 4
    assert loaded.images_per_s > 0
    assert loaded.peak_bytes > 10_000_000


def test_without_torch_and_without_onnxruntime_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(engines, "installed", dict)
    monkeypatch.setattr(engines, "ask", lambda *_args: pytest.fail("a child"))
    facts = engines.look("auto", "auto", "", jetson=False)
    assert (facts.torch, facts.onnx) == (None, None)


def test_an_engine_that_dies_leaves_the_other_to_be_asked(monkeypatch, child):
    both = {"torch": "2", "timm": "1", "onnxruntime": "1"}
    monkeypatch.setattr(engines, "installed", lambda: both)
    good = {"version": "1", "providers": {"CPUExecutionProvider": ""}}
    child(
        "task = json.loads(sys.stdin.readline())['task']\n"
        f"print(json.dumps({good!r}), flush=True) if task == 'onnxruntime' else os.abort()\n"
    )
    facts = engines.look("auto", "auto", "", jetson=False)
    assert "SIGABRT" in facts.torch.message
    assert facts.usable == ["CPUExecutionProvider"]


# --- folders --------------------------------------------------------------------------------


def test_a_folder_that_is_not_enrolled_is_left_as_it_was_and_so_is_the_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data = write_images(tmp_path / "data")
    before = everything_below(tmp_path)
    facts = images.look(data, None)
    assert everything_below(tmp_path) == before
    assert not (tmp_path / "state").exists()
    assert facts.images("train", "select", "test") == 12
    assert not facts.enrolled
    levels = states(facts)
    levels.pop("images.sides")  # its split is drawn: a small class may have no image on a side
    assert set(levels.values()) == {"ok"}


def test_an_enrolled_folder_is_told_with_its_own_split_and_its_manifest_stays(home, tmp_path):
    data = write_images(tmp_path / "images")
    first = scan(open_source(data), home.directory / NAME, home.salt())
    write_images(data, classes=["new"])
    before = everything_below(tmp_path)
    facts = images.look(data, home)
    assert everything_below(tmp_path) == before
    assert facts.enrolled
    for side in ("train", "select", "test"):
        known = first.counts(side)
        assert {c: facts.counts[c][side] for c in known} == known
    assert sum(facts.counts["new"].values()) == 6


def test_an_enrolled_folder_that_was_never_scanned_gets_no_salt(home, tmp_path):
    data = write_images(tmp_path / "images")
    assert not images.look(data, home).enrolled
    assert not (home.directory / "salt").exists()
    assert not (home.directory / NAME).exists()


def test_a_client_of_a_partition_is_told_of_its_own_images_alone(tmp_path):
    data = write_images(tmp_path / "images")
    home = Home(tmp_path / "state" / "0123-4567-1")
    assert home.seat
    home.make()
    assert isinstance(images.look(data, home), Skip)  # it has not read its part

    class Part(FolderSource):
        def listing(self):
            return replace(listed := super().listing(), entries=listed.entries[::2])

    own = scan(Part(data), home.directory / NAME, home.salt())
    facts = images.look(data, home)
    assert facts.files == len(own.images) == 6
    assert {c: sum(sides.values()) for c, sides in facts.counts.items()} == {"cat": 3, "dog": 3}
    (data / "cat").rename(data / "cats")
    (data / "dog").rename(data / "dogs")
    assert "none of the images" in images.look(data, home).error.message


def test_broken_files_refused_names_and_copies_in_two_classes_are_all_found(tmp_path):
    data = write_images(tmp_path / "data")
    (data / "cat" / "broken.png").write_bytes(b"no image")
    for copy in ("cat/1000.png", "dog/copy.png"):
        (data / copy).write_bytes((data / "cat" / "0.png").read_bytes())
    write_images(data, classes=["zebra", "ZEBRA"], per_class=1)
    write_images(data, classes=["x" * 200], per_class=1)
    write_images(data, classes=["rare"], per_class=2)
    facts = images.look(data, None)
    found = states(facts)
    assert {n for n, s in found.items() if s == "warning"} >= {
        "images.layout", "images.unreadable", "images.duplicates", "images.small",
    }  # fmt: skip
    assert len(facts.left_out) == 2
    assert any("same class" in fault for fault in facts.left_out)
    assert facts.duplicates == (("cat/0.png", "dog/copy.png"),)
    assert len(facts.unreadable) == 1


def test_a_zip_file_is_looked_at_as_a_folder_is_and_a_broken_one_named(tmp_path):
    data = write_images(tmp_path / "data")
    archive = tmp_path / "images.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in data.rglob("*.png"):
            file.write(path, path.relative_to(data))
    facts = images.look(archive, None)
    assert (facts.form, facts.files) == ("zip file", 12)
    archive.write_bytes(b"PK no more")
    assert states(images.look(archive, None))["images.folder"] == "failure"
    assert states(images.look(tmp_path / "nowhere", None))["images.folder"] == "failure"


def test_what_there_is_no_time_for_is_counted_and_not_called_broken(home, tmp_path):
    data = write_images(tmp_path / "images")
    (data / "cat" / "broken.png").write_bytes(b"no image")
    late = images.look(data, None, limit_s=-1)
    assert (late.unlooked, late.unreadable, late.error) == (13, (), None)
    assert "failure" not in states(late).values()
    # What an enrolled folder's client knows already takes no time.
    home.make()
    scan(open_source(data), home.directory / NAME, home.salt())
    facts = images.look(data, home, limit_s=-1)
    assert facts.images("train", "select", "test") == 12
    assert facts.unlooked == 1  # a broken file is looked at again every time


# --- a client's directory -------------------------------------------------------------------


@pytest.fixture
def enrolled(home):
    """A home as an enrolled client has it."""
    root, server = RootKey.generate(), PrivateKeys.generate()
    certificate = root.certify(server.public).to_bytes().hex()
    home.save_enrolment(
        Enrolment(ClientId("a" * 26), "c", root.federation, certificate, ("127.0.0.1:1",), "/x")
    )
    PrivateKeys.generate().save(home.keys_path)
    return home


def test_a_client_as_it_should_be_has_keys_that_fit_and_a_certificate(enrolled):
    facts = clients.look_member(enrolled)
    assert facts.fingerprint == PrivateKeys.load(enrolled.keys_path).public.fingerprint
    assert facts.enrolment.name == "c"
    assert facts.valid[0] < time.time() < facts.valid[1]


def test_keys_that_others_may_read_or_that_are_damaged_are_told(enrolled):
    enrolled.keys_path.chmod(0o644)
    assert "0644" in clients.look_member(enrolled).fingerprint.message
    enrolled.keys_path.chmod(0o600)
    text = enrolled.keys_path.read_text()
    enrolled.keys_path.write_text(text[:-20])
    assert "damaged" in clients.look_member(enrolled).fingerprint.message


def test_a_damaged_client_json_is_told_and_a_certificate_of_somebody_else(enrolled):
    path = enrolled.directory / "client.json"
    fields = json.loads(path.read_text())
    other = RootKey.generate().certify(PrivateKeys.generate().public).to_bytes().hex()
    for certificate in (other, "00", "no hex", fields["certificate"][:-2]):
        path.write_text(json.dumps(fields | {"certificate": certificate}))
        assert clients.look_member(enrolled).valid.message, certificate
    path.write_bytes(b"{")
    facts = clients.look_member(enrolled)
    assert "client.json" in facts.enrolment.message
    assert len(facts.fingerprint) == 32


def test_a_ticket_is_read_from_a_file_or_standard_input_and_nothing_else_is_one(tmp_path, home):
    ticket = Ticket.new(bytes(32), FED, ("127.0.0.1:1",), 60)
    (tmp_path / "t").write_text(ticket.to_text())
    assert clients.look_ticket(tmp_path / "t", io.BytesIO()).ticket == ticket
    words = io.BytesIO(ticket.to_text().encode())
    assert clients.look_ticket(tmp_path / "-", words).ticket.message  # a file of that name
    assert clients.look_ticket(Path("-"), words).ticket == ticket
    for bad in (tmp_path / "none", tmp_path):
        assert clients.look_ticket(bad, io.BytesIO()).ticket.message


def test_a_directory_holds_what_it_holds(enrolled):
    enrolled.outbox_path("1" * 64).write_bytes(bytes(1000))
    enrolled.part_path("2" * 64).write_bytes(bytes(500))
    facts = clients.look_holding(enrolled, running=False)
    assert (facts.sizes["outbox"], facts.sizes["parts"], facts.outbox) == (1000, 500, 1)


def test_the_disk_is_asked_where_the_state_will_be_and_nothing_stays_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "yet"))
    facts = system.look_disk()
    assert facts.place == str(tmp_path.resolve())
    assert facts.kept_s >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def refuse(*_args, **_options):
        raise OSError(28, "no space")

    monkeypatch.setattr(system.tempfile, "mkstemp", refuse)
    facts = system.look_disk()
    assert facts.kept_s.code == "disk_full"


# --- the network ----------------------------------------------------------------------------


def test_an_address_that_answers_refuses_or_has_no_name_is_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        good = network.look_address(f"127.0.0.1:{port}")
        assert good.took_s is not None
        assert good.resolved == ("127.0.0.1",)
    assert network.look_address(f"127.0.0.1:{port}").number == 111
    assert network.look_address("no host at all:1").name_fault
    assert network.look_address("127.0.0.1:99999999").name_fault
    assert network.look_address("nothing").name_fault


def test_a_directory_that_another_process_holds_is_not_connected_for(enrolled):
    enrolment = enrolled.enrolment()
    with DirectoryLock.acquire(enrolled.directory, "client"):
        facts, terms = network.say_hello(enrolled, enrolment)
    assert terms is None
    assert isinstance(facts.told, Skip)
    assert "in use" in str(facts.told)


def test_a_daemon_that_runs_is_asked_and_no_second_link_is_made(enrolled, monkeypatch):
    status = {"link": "offline", "work": "idle", "round": None, "notes": [], "server": ["a:1"]}
    monkeypatch.setattr(clients.swarm_status, "ask", lambda *_args, **_more: status)
    monkeypatch.setattr(network, "say_hello", lambda *_: pytest.fail("a second link"))
    facts = clients.look(enrolled)
    assert facts.network.server.waits
    status |= {"link": "ready", "clock_s": [0.0, 0.1], "run": "r", "backbone": "vit",
               "backbone_digest": "d" * 64}  # fmt: skip
    facts = clients.look(enrolled)
    assert not facts.network.server.waits
    assert facts.network.server.clock_s == [0.0, 0.1]
    assert (facts.wanted.name, facts.wanted.digest) == ("vit", "d" * 64)


# --- the machine ----------------------------------------------------------------------------


def test_the_machine_is_read_from_the_files_of_its_system(tmp_path):
    for name, text in (
        ("proc/device-tree/model", "NVIDIA Jetson AGX Orin\0"),
        ("etc/nv_tegra_release", "# R36 (release), REVISION: 4.0, GCID: 1"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54 x"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    facts = system.look_machine(tmp_path)
    assert (facts.jetson, facts.l4t) == ("NVIDIA Jetson AGX Orin", "L4T 36.4.0")
    assert system.nvidia_driver(tmp_path) == "550.54"
    here = system.look_machine(tmp_path / "nowhere")
    assert (here.jetson, here.limit_bytes, here.quota) == ("", None, None)
    assert here.free_bytes > 0
    assert here.cores >= 1


# --- all of it ------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [True, False])
def test_whatever_breaks_is_a_line_and_never_the_end(tmp_path, enrolled, monkeypatch, data):
    def broken(*_args, **_more):
        raise ZeroDivisionError("by nothing")

    for module, name in (
        (clients, "look"), (clients, "look_stranger"), (clients, "look_ticket"),
        (clients, "look_daemon"), (engines, "look"), (engines, "load"), (images, "look"),
        (system, "look_machine"), (system, "look_disk"), (system, "look_units"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, broken)
    folder = tmp_path / "strange" if data else None
    wishes = Wishes(folder, ticket=tmp_path / "ticket")
    found = Examination(wishes, io.BytesIO(), lambda _text: None).findings()
    assert exit_code(found) == 5
    bad = {finding.id for finding in found if finding.code == "internal"}
    assert bad >= {"machine.system", "engine.installed", "disk.space", "daemon.unit"}
    assert all("ZeroDivisionError" in f.text for f in found if f.code == "internal")


def test_a_directory_that_cannot_be_looked_at_hides_no_other_client(enrolled, monkeypatch):
    other = Home(enrolled.directory.parent / "other")
    other.make()
    (other.directory / "client.json").write_bytes((enrolled.directory / "client.json").read_bytes())
    real = clients.look

    def look(home):
        if home.directory == other.directory:
            raise ZeroDivisionError("by nothing")
        return real(home)

    monkeypatch.setattr(clients, "look", look)
    monkeypatch.setattr(engines, "look", lambda *_args, **_more: EngineFacts())
    monkeypatch.setattr(engines, "ask", lambda *_args, **_more: _raise(WorkerDied("x")))
    found = Examination(Wishes(), io.BytesIO(), lambda _text: None).findings()
    about = {(finding.client, finding.id): finding.code for finding in found}
    assert about["other", "membership.enrolment"] == "internal"
    assert about["c", "membership.keys"] == ""
