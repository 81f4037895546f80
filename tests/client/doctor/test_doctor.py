"""Each check of the doctor with made-up facts: what it says, how bad that is, what to do."""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcil_client.doctor.checks import (
    backbone,
    daemon,
    disk,
    engines,
    images,
    machine,
    membership,
    network,
)
from fcil_client.doctor.checks.backbone import BackboneFacts, Loaded, Wanted
from fcil_client.doctor.checks.daemon import DaemonFacts, UnitFacts
from fcil_client.doctor.checks.disk import DiskFacts, HoldingFacts
from fcil_client.doctor.checks.engines import EngineFacts, Gpu, OnnxFacts, TorchFacts
from fcil_client.doctor.checks.images import ImageFacts
from fcil_client.doctor.checks.line import (
    IDS,
    Line,
    State,
    exit_code,
    failure,
    guarded,
    of_client,
    ok,
    skipped,
    warning,
)
from fcil_client.doctor.checks.machine import JetsonNeed, MachineFacts, MemoryNeed
from fcil_client.doctor.checks.membership import MemberFacts, TicketFacts
from fcil_client.doctor.checks.network import AddressFacts, NetworkFacts, ServerFacts
from fcil_client.doctor.examination import in_order
from fcil_client.state.home import Enrolment
from fcil_protocol.errors import (
    BackboneMismatch,
    CorruptFile,
    DataError,
    DiskFull,
    KeyFileError,
    Revoked,
    TicketUsed,
    WorkerDied,
)
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.trust.ticket import Ticket

ROOT = Path(__file__).resolve().parents[3]
FED = FederationId("0123456789abcdef" * 2)
MACHINE = MachineFacts("Linux", "6.1", "x86_64", "3.11.7", "0.1.0", 4, None, 8 << 30, 6 << 30)
ENROLMENT = Enrolment(ClientId("a" * 26), "camera", FED, "", ("a:1",), "/images")
DAY = 86400.0


def the(lines, name):
    """Return the one line with an id."""
    (line,) = [line for line in lines if line.id == name]
    return line


def state(lines, name):
    return the(lines, name).state.value


# --- lines ----------------------------------------------------------------------------------


def test_every_id_is_listed_in_the_document_with_what_it_is_about():
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (.+) \|$", text, re.MULTILINE)) == IDS


def test_every_id_is_used_by_some_check():
    code = "".join(p.read_text() for p in (ROOT / "client/fcil_client/doctor").rglob("*.py"))
    used = {name for name in IDS if code.count(f'"{name}"') >= 2}
    assert used == set(IDS)


def test_a_check_that_breaks_is_a_failure_that_asks_for_a_report_and_the_others_go_on():
    def broken():
        raise ZeroDivisionError("by nothing")

    (line,) = guarded(["disk.space", "disk.inodes"], broken)
    assert (line.id, line.state, line.code) == ("disk.space", State.FAILURE, "internal")
    assert "ZeroDivisionError" in line.text
    assert "broken" in line.text
    assert line.action.startswith("Report this")
    assert exit_code([line]) == 5


def test_an_error_with_a_name_keeps_its_code_and_action():
    def full():
        raise DiskFull("no room", action="make some")

    (line,) = guarded(["disk.space"], full)
    assert (line.code, line.text, line.action) == ("disk_full", "no room", "make some")


def test_the_exit_code_is_that_of_the_first_failure_and_warnings_have_none():
    fine = [ok("disk.space", "a"), warning("disk.sync", "b", "c"), skipped("disk.inodes", "d")]
    assert exit_code(fine) == 0
    failed = [*fine, failure("network.reach", "e", "f", "unreachable")]
    assert exit_code([*failed, failure("images.folder", "g", "h", "data_invalid")]) == 2
    assert exit_code([failure("images.folder", "g", "h", "data_invalid"), *failed]) == 4


def test_a_failure_without_a_code_and_a_line_without_a_known_id_are_our_defects():
    with pytest.raises(AssertionError):
        Line("disk.space", State.FAILURE, "x")
    with pytest.raises(AssertionError):
        ok("disk.nothing", "x")


def test_lines_are_read_by_section_the_machines_own_first_then_client_by_client():
    a, b = of_client("a", [ok("disk.outbox", "1")]), of_client("b", [ok("daemon.running", "2")])
    found = in_order([*b, *a, ok("disk.space", "3"), ok("machine.system", "4")])
    assert [line.text for line in found] == ["4", "3", "1", "2"]


# --- machine --------------------------------------------------------------------------------


def test_a_system_that_is_not_tested_is_said_to_be_so():
    assert state(machine.system_lines(MACHINE), "machine.system") == "ok"
    mac = machine.system_lines(replace(MACHINE, system="Darwin", arch="arm64"))
    assert state(mac, "machine.system") == "warning"


def test_a_containers_share_of_the_cores_is_named_with_the_option_for_it():
    assert state(machine.core_lines(MACHINE), "machine.cores") == "ok"
    line = the(machine.core_lines(replace(MACHINE, quota=1.5)), "machine.cores")
    assert line.state is State.WARNING
    assert "--max-threads 1" in line.action


@pytest.mark.parametrize(
    ("need", "limit", "expected"),
    [
        (MemoryNeed(), None, "ok"),
        (MemoryNeed(1 << 30, 1 << 30), None, "ok"),
        (MemoryNeed(1 << 30, 6 << 30), None, "warning"),
        (MemoryNeed(7 << 30, 0), None, "failure"),
        (MemoryNeed(1 << 30, 1 << 30), (2 << 30, 1 << 29), "warning"),  # the container's limit
        (MemoryNeed(1 << 30, 0), (2 << 30, 3 << 29), "failure"),
    ],
)
def test_memory_is_compared_with_what_backbone_and_images_take(need, limit, expected):
    facts = MACHINE
    if limit:
        facts = replace(MACHINE, limit_bytes=limit[0], limit_used_bytes=limit[1])
    line = the(machine.memory_lines(facts, need), "machine.memory")
    assert line.state.value == expected
    assert ("limit" in line.text) == bool(limit)


def test_clients_on_one_gpu_are_named_as_a_swarm_and_two_on_two_are_not():
    apart = membership.by_device({"a": "cuda:0 (H)", "b": "cuda:1 (H)", "c": "cpu (x)"})
    assert state(machine.shared_gpu_lines(apart), "machine.shared_gpu") == "skipped"
    together = membership.by_device({"a": "cuda (H)", "b": "cuda:0 (H)", "c": "cpu"})
    line = the(machine.shared_gpu_lines(together), "machine.shared_gpu")
    assert line.state is State.WARNING
    assert "a, b" in line.text
    assert "swarm" in line.text


def test_a_jetson_is_known_by_its_files_and_told_what_it_needs():
    model = machine.jetson_model("NVIDIA Jetson Orin Nano Developer Kit\0")
    l4t = machine.l4t_release("# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic")
    assert (model, l4t) == ("NVIDIA Jetson Orin Nano Developer Kit", "L4T 36.4.3")
    assert machine.jetson_model("Raspberry Pi 5 Model B\0") == ""
    jetson = replace(MACHINE, arch="aarch64", jetson=model, l4t=l4t)
    assert state(machine.jetson_lines(MACHINE, JetsonNeed()), "machine.jetson") == "skipped"
    bare = the(machine.jetson_lines(jetson, JetsonNeed(providers=["CPUExecutionProvider"])),
               "machine.jetson")  # fmt: skip
    assert bare.state is State.WARNING
    assert "NVIDIA's index" in bare.action
    for have in (JetsonNeed(torch_cuda=True), JetsonNeed(providers=["TensorrtExecutionProvider"])):
        assert state(machine.jetson_lines(jetson, have), "machine.jetson") == "ok"


# --- engines --------------------------------------------------------------------------------

CPU_TORCH = TorchFacts("2.13.0+cpu")
CUDA_TORCH = TorchFacts("2.13.0", "12.8", (Gpu("H", 1 << 30, 2 << 30),))
ORT = OnnxFacts("1.31.1", {"CPUExecutionProvider": ""})
BOTH = {"torch": "2.13.0", "timm": "1.0", "onnxruntime": "1.31.1"}


def test_torch_alone_and_onnxruntime_alone_are_both_enough():
    alone = EngineFacts(installed={"torch": "2", "timm": "1"}, torch=CPU_TORCH)
    edge = EngineFacts(installed={"onnxruntime": "1"}, onnx=ORT)
    for facts in (alone, edge):
        assert not [x for x in engines.lines(facts) if x.state in (State.WARNING, State.FAILURE)]


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (EngineFacts(), "neither torch nor onnxruntime"),
        (EngineFacts(installed={"torch": "2"}, torch=CPU_TORCH), "timm is not"),
        (EngineFacts("onnx", installed={"torch": "2", "timm": "1"}, torch=CPU_TORCH), "onnxrun"),
        (EngineFacts("torch", installed={"onnxruntime": "1"}, onnx=ORT), "torch cannot be used"),
    ],
)
def test_nothing_that_runs_a_backbone_as_asked_is_a_failure(facts, word):
    line = the(engines.lines(facts), "engine.installed")
    assert line.state is State.FAILURE
    assert word in line.text
    assert "pip install" in line.action


def test_torch_that_dies_when_it_is_imported_is_a_failure_with_its_last_words():
    facts = EngineFacts(installed=BOTH, torch_fault="was ended by SIGSEGV", onnx=ORT)
    line = the(engines.lines(facts), "engine.torch")
    assert line.state is State.FAILURE
    assert "SIGSEGV" in line.text
    assert state(engines.lines(facts), "engine.onnxruntime") == "ok"


@pytest.mark.parametrize(
    ("torch", "driver", "expected", "word"),
    [
        (CPU_TORCH, "", "ok", "no GPU"),
        (CPU_TORCH, "550.1", "warning", "CPU build"),
        (CUDA_TORCH, "550.1", "ok", "1.1 GB of 2.1 GB free"),
        (TorchFacts("2", "13.0", (), "driver too old"), "390.1", "warning", "driver too old"),
        (TorchFacts("2", "13.0", (), "no driver"), "", "ok", "no GPU"),
    ],
)
def test_torchs_build_is_compared_with_the_driver(torch, driver, expected, word):
    facts = EngineFacts(installed=BOTH, torch=torch, onnx=ORT, driver=driver)
    line = the(engines.lines(facts), "engine.torch")
    assert line.state.value == expected
    assert word in line.text


def test_two_onnxruntimes_clash_and_what_to_uninstall_is_named():
    two = BOTH | {"onnxruntime-gpu": "1.31.1"}
    facts = EngineFacts(installed=two, torch=CPU_TORCH, onnx=ORT)
    line = the(engines.lines(facts), "engine.clash")
    assert line.state is State.WARNING  # torch does the work meanwhile
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in line.action
    assert line.action.endswith("pip install onnxruntime")
    gpu = EngineFacts("onnx", installed=two, torch=CPU_TORCH, onnx=ORT, driver="550")
    line = the(engines.lines(gpu), "engine.clash")
    assert line.state is State.FAILURE
    assert line.action.endswith("pip install onnxruntime-gpu")


def test_a_provider_that_is_listed_and_takes_no_session_is_named():
    ort = OnnxFacts("1", {"CUDAExecutionProvider": "libcudnn.so.9 is missing",
                          "CPUExecutionProvider": ""})  # fmt: skip
    facts = EngineFacts(installed={"onnxruntime-gpu": "1"}, onnx=ort)
    line = the(engines.lines(facts), "engine.providers")
    assert line.state is State.WARNING
    assert "libcudnn.so.9" in line.text
    assert "CUDA" not in the(engines.lines(facts), "engine.onnxruntime").text
    none = OnnxFacts("1", {"CPUExecutionProvider": "broken"})
    facts = EngineFacts(installed={"onnxruntime": "1"}, onnx=none)
    assert state(engines.lines(facts), "engine.onnxruntime") == "failure"


@pytest.mark.parametrize(
    ("device", "torch", "expected"),
    [
        ("auto", CPU_TORCH, "ok"),
        ("cpu", CUDA_TORCH, "ok"),
        ("cuda", CUDA_TORCH, "ok"),
        ("cuda:0", CUDA_TORCH, "ok"),
        ("cuda:1", CUDA_TORCH, "failure"),
        ("cuda", CPU_TORCH, "failure"),
        ("cuda:\N{ARABIC-INDIC DIGIT ZERO}", CUDA_TORCH, "failure"),
        ("tpu", CPU_TORCH, "failure"),
    ],
)
def test_the_device_asked_for_must_be_there(device, torch, expected):
    facts = EngineFacts(device=device, installed=BOTH, torch=torch, onnx=ORT)
    assert state(engines.lines(facts), "engine.device") == expected


# --- backbone -------------------------------------------------------------------------------

PROBE = np.ones((4, 3))
WANTED = Wanted("vit", "d" * 64, "as the server says")


def loaded(**changes):
    given = {"engine": "torch", "digest": "d" * 64, "size": 32, "device": "cpu", "probe": PROBE,
             "loaded_s": 1.0, "images_per_s": 100.0, "peak_bytes": 1 << 28}  # fmt: skip
    return Loaded(**given | changes)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (BackboneFacts(WANTED, loaded()), "ok ok ok ok"),
        (BackboneFacts(WANTED, loaded(), reference=PROBE), "ok ok ok ok"),
        (BackboneFacts(WANTED, loaded(digest="e" * 64), reference=PROBE), "ok failure ok ok"),
        (BackboneFacts(WANTED, loaded(), reference=PROBE * 1.01), "ok ok failure ok"),
        (BackboneFacts(WANTED, loaded(probe=PROBE * np.nan)), "ok ok failure ok"),
        (BackboneFacts(WANTED, loaded(), images=100), "ok ok ok ok"),
        (BackboneFacts(WANTED, loaded(), images=1_000_000), "ok ok ok warning"),
        (BackboneFacts(WANTED, error=WorkerDied("by SIGSEGV")), "ok failure skipped skipped"),
        (BackboneFacts(WANTED, skipped="busy"), "ok skipped skipped skipped"),
        (BackboneFacts(Wanted("none", "", "x", needed=False)), "ok skipped skipped skipped"),
    ],
)  # fmt: skip
def test_a_backbone_is_compared_with_what_is_expected(facts, expected):
    assert " ".join(line.state.value for line in backbone.lines(facts)) == expected


def test_a_slow_pass_is_told_in_minutes():
    line = the(backbone.lines(BackboneFacts(WANTED, loaded(), images=120_000)), "backbone.speed")
    assert "120,000 training images takes about 20 minutes" in line.text


def test_a_crash_of_the_driver_is_told_with_its_code():
    facts = BackboneFacts(WANTED, error=WorkerDied("was ended by SIGSEGV"))
    assert the(backbone.lines(facts), "backbone.digest").code == "worker_died"
    mismatch = BackboneFacts(WANTED, loaded(digest="e" * 64))
    assert the(backbone.lines(mismatch), "backbone.digest").code == BackboneMismatch.code


# --- images ---------------------------------------------------------------------------------

FULL = {"cat": {"train": 7, "select": 1, "test": 2}, "dog": {"train": 8, "test": 2}}


def test_a_sound_folder_has_nothing_to_complain_of():
    found = images.lines(ImageFacts("x", files=20, counts=FULL, enrolled=True))
    assert {line.state for line in found} == {State.OK}
    assert "15 for training, 1 for tuning, 4 for tests" in the(found, "images.sides").text


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"left_out": ("folder 'a/b' is left out",)}, "images.layout", "warning"),
        ({"unreadable": ("image 'x' is no image",)}, "images.unreadable", "warning"),
        ({"unreadable": ("x",) * 20}, "images.unreadable", "failure"),
        ({"counts": {"cat": {"train": 1}}}, "images.small", "warning"),
        ({"unlooked": 5}, "images.small", "skipped"),
        ({"duplicates": ((("cat", "dog"), ("cat/1", "dog/1")),)}, "images.duplicates", "warning"),
        ({"notes": ("class 'cat' has no image to train on",)}, "images.sides", "warning"),
        ({"counts": {"cat": {"test": 9}}}, "images.sides", "failure"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(changes, name, expected):
    facts = ImageFacts(**{"path": "x", "files": 20, "counts": FULL} | changes)
    assert state(images.lines(facts), name) == expected


def test_a_folder_that_cannot_be_used_is_one_failure_and_the_rest_is_skipped():
    found = images.lines(ImageFacts("x", error=DataError("x holds no images.")))
    assert [line.state.value for line in found] == ["failure", *["skipped"] * 6]
    assert exit_code(found) == 4


# --- membership -----------------------------------------------------------------------------


def member(**changes):
    given = {"directory": "/d", "enrolment": ENROLMENT, "has_keys": True, "fingerprint": "f" * 32,
             "from_s": 0.0, "to_s": 400 * DAY, "now_s": 10 * DAY}  # fmt: skip
    return membership.lines(MemberFacts(**given | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok ok ok"),
        ({"changing": True}, "ok warning ok"),
        ({"keys_error": KeyFileError("0644")}, "ok failure ok"),
        ({"has_keys": False}, "ok failure ok"),
        ({"now_s": 500 * DAY}, "ok ok failure"),
        ({"now_s": -DAY}, "ok ok failure"),
        ({"now_s": 390 * DAY}, "ok ok warning"),
        ({"certificate_error": CorruptFile("none")}, "ok ok failure"),
        ({"enrolment": None, "error": CorruptFile("client.json")}, "failure ok skipped"),
        ({"enrolment": None, "former": "c", "has_keys": False}, "failure skipped skipped"),
        ({"enrolment": None, "has_keys": False}, "warning skipped skipped"),
    ],
)
def test_who_a_client_is_and_what_it_lacks(changes, expected):
    assert " ".join(line.state.value for line in member(**changes)) == expected


def test_no_folder_and_a_strange_folder_are_told_how_to_join():
    assert "join" in the(membership.nobody(), "membership.enrolment").action
    assert "--ticket" in the(membership.not_enrolled("x"), "membership.enrolment").action


def ticket_state(**changes):
    relay = changes.pop("relay", False)
    ticket = Ticket(bytes(32), FED, bytes(16), 1000, ("a:1",), relay=relay)
    given = {"ticket": ticket, "now_s": 500.0} | changes
    return membership.ticket_line(TicketFacts(**given))


def test_a_ticket_is_judged_by_the_server_and_without_it_by_this_clock():
    assert "this machine's clock" in ticket_state().text
    late = ticket_state(now_s=2000.0)
    assert (late.state, late.code) == (State.FAILURE, "ticket_expired")
    # The server's word counts, whatever this clock says.
    assert ticket_state(now_s=2000.0, asked=True).state is State.OK
    used = ticket_state(asked=True, answer=TicketUsed("by another"))
    assert (used.state, used.code) == (State.FAILURE, "ticket_used")


def test_other_tickets_are_told_what_they_are():
    assert membership.ticket_line(None).state is State.SKIPPED
    assert ticket_state(relay=True).code == "bad_ticket"
    assert ticket_state(ticket=None, error=CorruptFile("no ticket")).state is State.FAILURE
    assert "needs it no more" in ticket_state(used_here="camera").text


def test_no_line_shows_a_tickets_secret():
    ticket = Ticket(bytes(32), FED, b"secretsecretsecr", 1000, ("a:1",))
    line = membership.ticket_line(TicketFacts(ticket, now_s=1.0))
    shown = json.dumps(line.fields())
    assert ticket.to_text() not in shown
    assert ticket.secret.hex() not in shown


# --- network --------------------------------------------------------------------------------

GOOD = AddressFacts("a:1", ("1.2.3.4",), took_s=0.01)
HELLO = ServerFacts("hello", "it is the server", clock_s=(-0.2, 0.1))


def net(*addresses, server=HELLO, relay=False):
    return network.lines(NetworkFacts(addresses or (GOOD,), relay, server))


def test_a_clear_way_to_the_server_is_ok_and_says_whether_it_leads_through_a_relay():
    assert {line.state for line in net()} == {State.OK}
    assert "directly" in the(net(), "network.path").text
    assert "relay" in the(net(relay=True), "network.path").text


@pytest.mark.parametrize(
    ("number", "word", "action"),
    [
        (errno.ECONNREFUSED, "refused", "Start the server"),
        (errno.EHOSTUNREACH, "no route", "VPN"),
        (errno.ENETUNREACH, "no network", "Connect"),
        (errno.ETIMEDOUT, "timeout", "firewall"),
        (errno.ECONNRESET, "reset", "proxy"),
        (errno.EACCES, "permission denied", "Check the address"),
    ],
)
def test_why_nobody_answers_is_told_apart(number, word, action):
    bad = AddressFacts("a:1", ("1.2.3.4",), number=number)
    line = the(net(bad, server=ServerFacts(skipped="nobody answers")), "network.reach")
    assert (line.state, line.code) == (State.FAILURE, "unreachable")
    assert word in line.text
    assert action in line.action
    both = the(net(bad, GOOD), "network.reach")
    assert both.state is State.WARNING


def test_a_name_that_is_not_known_is_a_failure_unless_another_address_has_one():
    lost = AddressFacts("nowhere:1", name_fault="this name is not known")
    assert state(net(lost), "network.name") == "failure"
    assert state(net(lost), "network.reach") == "skipped"
    assert state(net(lost, GOOD), "network.name") == "warning"


def test_the_servers_refusal_is_told_in_its_own_words():
    refused = ServerFacts("hello", error=Revoked("client 'c' was taken off the list: lost."))
    line = the(net(server=refused), "network.server")
    assert (line.state, line.code) == (State.FAILURE, "revoked")
    assert "lost" in line.text
    waits = ServerFacts("daemon", "the client has no session now", waits=True)
    assert state(net(server=waits), "network.server") == "warning"


@pytest.mark.parametrize(
    ("between", "expected", "word"),
    [
        (None, "skipped", "not known"),
        ((-3.0, 0.5), "ok", "at most 3.0 s"),
        ((-300.0, 0.5), "ok", ""),  # the answer took long: nothing is known for sure
        ((7200.0, 7201.0), "warning", "2 hours behind"),
        ((-864000.0, -863999.0), "warning", "10 days ahead of"),
    ],
)
def test_the_clock_is_compared_with_the_servers(between, expected, word):
    line = the(net(server=ServerFacts("hello", "x", clock_s=between)), "network.clock")
    assert line.state.value == expected
    assert word in line.text


def test_without_any_server_all_of_it_is_skipped_with_the_reason():
    found = network.lines(NetworkFacts(server=ServerFacts(skipped="no server runs here")))
    assert {(line.state.value, line.text) for line in found} == {("skipped", "no server runs here")}


# --- disk -----------------------------------------------------------------------------------


def on_disk(held=0, **changes):
    given = {"place": "/s", "free_bytes": 10**10, "free_inodes": 10**6, "kind": "ext4",
             "mount": "/", "sync_s": 0.01, "temporary": "/tmp",
             "temporary_free_bytes": 10**9}  # fmt: skip
    return disk.lines(DiskFacts(**given | changes), held)


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"free_bytes": 10**7}, "disk.space", "failure"),
        ({"free_bytes": 4 * 10**8}, "disk.space", "warning"),
        ({"free_inodes": 5}, "disk.inodes", "failure"),
        ({"free_inodes": 500}, "disk.inodes", "warning"),
        ({"free_inodes": None}, "disk.inodes", "skipped"),
        ({"write_error": DiskFull("full"), "sync_s": None}, "disk.writable", "failure"),
        ({"write_error": DiskFull("full"), "sync_s": None}, "disk.sync", "skipped"),
        ({"read_only": True}, "disk.filesystem", "failure"),
        ({"kind": "tmpfs"}, "disk.filesystem", "warning"),
        ({"kind": "nfs4"}, "disk.filesystem", "warning"),
        ({"kind": "vfat"}, "disk.filesystem", "failure"),
        ({"kind": ""}, "disk.filesystem", "skipped"),
        ({"sync_s": 3.0}, "disk.sync", "warning"),
        ({"temporary_free_bytes": 0}, "disk.temporary", "warning"),
        ({"temporary_error": DiskFull("full")}, "disk.temporary", "failure"),
    ],
)
def test_a_disk_on_which_a_client_cannot_keep_things_is_named(changes, name, expected):
    assert {line.state for line in on_disk()} == {State.OK}
    assert state(on_disk(**changes), name) == expected


def test_space_is_compared_with_what_the_clients_hold_already():
    assert state(on_disk(held=2 * 10**10), "disk.space") == "warning"


def test_what_waits_in_the_outbox_is_a_warning_if_nobody_sends_it():
    waits = HoldingFacts({"outbox": 100}, outbox=1, outbox_age_s=7200.0)
    assert state(disk.holding_lines(waits, running=False), "disk.outbox") == "warning"
    assert state(disk.holding_lines(waits, running=True), "disk.outbox") == "ok"
    assert state(disk.holding_lines(HoldingFacts(), running=False), "disk.outbox") == "ok"


def test_the_mount_of_a_path_is_the_nearest_above_it_and_the_latest_there():
    table = (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "30 21 0:30 / /srv\\040two rw - nfs4 host:/x rw\n"
        "31 21 0:31 / /srv rw shared:1 - ext4 /dev/sdb ro\n"
        "32 21 0:32 / /srv ro - tmpfs none rw\n"
        "nonsense\n"
    )
    assert disk.mount_of(table, "/var/x") == ("ext4", "/", False)
    assert disk.mount_of(table, "/srv two/a") == ("nfs4", "/srv two", False)
    assert disk.mount_of(table, "/srv/a") == ("tmpfs", "/srv", True)
    assert disk.mount_of(table, "/srvwork") == ("ext4", "/", False)
    assert disk.mount_of("", "/x") == ("", "", False)


# --- daemon ---------------------------------------------------------------------------------

STATUS = {"link": "ready", "work": "idle", "round": None, "package": "0.1.0", "notes": []}


def test_a_daemon_that_runs_hangs_or_is_away_is_told_apart():
    runs = daemon.lines(DaemonFacts(STATUS, "0.1.0"))
    assert {line.state for line in runs} == {State.OK}
    hangs = the(daemon.lines(DaemonFacts(None, "0.1.0", hangs=True)), "daemon.running")
    assert (hangs.state, hangs.code) == (State.FAILURE, "timeout")
    away = the(daemon.lines(DaemonFacts(None, "0.1.0", data="/images")), "daemon.running")
    assert away.state is State.WARNING
    assert "join --data /images" in away.action


def test_a_daemon_of_another_version_is_to_be_started_again():
    for old in ({**STATUS, "package": "0.0.9"}, {k: STATUS[k] for k in ("link", "work", "notes")}):
        line = the(daemon.lines(DaemonFacts(old, "0.1.0")), "daemon.version")
        assert line.state is State.WARNING


def test_errors_among_the_last_notes_are_repeated():
    notes = [{"at": 1.0, "level": "info", "text": "fine"}, {"at": 2.0, "level": "error",
             "text": "the disk\nis full"}]  # fmt: skip
    line = the(daemon.lines(DaemonFacts({**STATUS, "notes": notes}, "0.1.0")), "daemon.notes")
    assert line.state is State.WARNING
    assert "is full" in line.text
    assert "\n" not in line.text
    assert "fine" not in line.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("ActiveState=active\nSubState=running\nUnitFileState=enabled", "ok"),
        ("ActiveState=active\nSubState=running\nUnitFileState=disabled", "warning"),
        ("ActiveState=inactive\nSubState=dead", "warning"),
        ("ActiveState=failed\nSubState=failed\nResult=exit-code", "failure"),
        ("ActiveState=activating\nSubState=auto-restart\nNRestarts=7", "failure"),
    ],
)
def test_a_systemd_unit_is_told_as_it_is(fields, expected):
    text = f"Id=fcil-client.service\nLoadState=loaded\n{fields}\n\nId=x\nLoadState=not-found\n"
    units = daemon.parse_units(text)
    assert list(units) == ["fcil-client.service"]
    assert state(daemon.unit_lines(UnitFacts(units, asked=True)), "daemon.unit") == expected


def test_without_systemd_or_without_a_unit_that_is_said():
    assert state(daemon.unit_lines(UnitFacts()), "daemon.unit") == "skipped"
    assert state(daemon.unit_lines(UnitFacts(asked=True)), "daemon.unit") == "skipped"
