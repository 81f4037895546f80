"""Each check of the doctor with made-up facts: what it says, how bad that is, what to do."""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcil_client.doctor.checks.facts import (
    AddressFacts,
    BackboneFacts,
    ClientFacts,
    DaemonFacts,
    DiskFacts,
    DoctorFacts,
    EngineFacts,
    Gpu,
    HoldingFacts,
    ImageFacts,
    Loaded,
    MachineFacts,
    MemberFacts,
    NetworkFacts,
    OnnxFacts,
    ServerFacts,
    Skip,
    TicketFacts,
    TorchFacts,
    Wanted,
)
from fcil_client.doctor.checks.findings import (
    Finding,
    Level,
    exit_code,
    failure,
    of_error,
    ok,
    skipped,
    warning,
)
from fcil_client.doctor.checks.register import CHECKS, examine, of_clients, of_facts
from fcil_client.doctor.examination import by_device
from fcil_client.doctor.probes import system
from fcil_client.state.home import Enrolment
from fcil_protocol.errors import (
    BackboneMismatch,
    CorruptFile,
    DataError,
    DiskFull,
    KeyFileError,
    Revoked,
    TicketUsed,
    Unreachable,
    WorkerDied,
)
from fcil_protocol.ids import ClientId, FederationId
from fcil_protocol.trust.ticket import Ticket

ROOT = Path(__file__).resolve().parents[3]
FED = FederationId("0123456789abcdef" * 2)
MACHINE = MachineFacts("Linux", "6.1", "x86_64", "3.11.7", "0.1.0", 4, None, 8 << 30, 6 << 30)
ENROLMENT = Enrolment(ClientId("a" * 26), "camera", FED, "", ("a:1",), "/images")
DAY = 86400.0


def look(**facts):
    """Return what all checks find that have something to look at, by id."""
    return {finding.id: finding for finding in examine(DoctorFacts(**facts))}


def levels(**facts):
    return " ".join(finding.level.value for finding in examine(DoctorFacts(**facts)))


def client(name="", **facts):
    """Return facts of one client; what is not given is as it should be."""
    member = MemberFacts("/d", enrolment=replace(ENROLMENT, name=name), fingerprint="f" * 32,
                         valid=(0.0, 400 * DAY), now_s=10 * DAY)  # fmt: skip
    return ClientFacts(**{"member": member, "network": NetworkFacts(HELLO, (GOOD,))} | facts)


# --- the register ---------------------------------------------------------------------------


def test_every_id_is_listed_in_the_document_with_what_it_is_about():
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(f.id, CHECKS[f.id].about) for f in in_order()]


def in_order():
    return examine(DoctorFacts(), [Finding(Level.OK, "", id=name) for name in reversed(CHECKS)])


@pytest.fixture
def register(monkeypatch):
    """Start with no check, so that a test registers its own."""
    monkeypatch.setattr("fcil_client.doctor.checks.register.CHECKS", {})
    return of_facts(lambda facts: facts.machine)


def test_a_check_is_one_function_and_what_it_finds_gets_its_id(register):
    @register("disk.space", "space")
    def space(machine):
        return ok(machine)

    @register("disk.inodes", "inodes")
    def inodes(machine):
        return [ok(machine), warning("b", "c")]

    found = examine(DoctorFacts(machine="a"))
    assert [(f.id, f.text) for f in found] == [
        ("disk.space", "a"), ("disk.inodes", "a"), ("disk.inodes", "b"),
    ]  # fmt: skip
    assert examine(DoctorFacts()) == []  # nothing has been looked at


def test_what_cannot_be_looked_at_is_skipped_with_the_reason(register):
    @register("disk.space", "space")
    def space(machine):
        raise Skip(f"no {machine}")

    @of_facts(lambda _: Skip("no ticket"))("disk.inodes", "inodes")
    def inodes(_):
        raise AssertionError

    found = [(f.level, f.text) for f in examine(DoctorFacts(machine="space"))]
    assert found == [(Level.SKIPPED, "no space"), (Level.SKIPPED, "no ticket")]


def test_a_check_that_breaks_is_a_failure_that_asks_for_a_report_and_the_others_go_on(register):
    @register("disk.space", "space")
    def broken(_):
        raise ZeroDivisionError("by nothing")

    @register("disk.inodes", "inodes")
    def inodes(_):
        return ok("fine")

    finding, fine = examine(DoctorFacts(machine="a"))
    assert (finding.id, finding.level, finding.code) == ("disk.space", Level.FAILURE, "internal")
    assert "ZeroDivisionError" in finding.text
    assert "broken" in finding.text
    assert finding.remedy.startswith("Report this")
    assert exit_code([finding, fine]) == 5
    assert fine.level is Level.OK


def test_an_error_with_a_name_keeps_its_code_and_action():
    found = of_error(DiskFull("no room", action="make some"))
    assert (found.code, found.text, found.remedy) == ("disk_full", "no room", "make some")


def test_the_exit_code_is_that_of_the_first_failure_and_warnings_have_none():
    fine = [ok("a"), warning("b", "c"), skipped("d")]
    assert exit_code(fine) == 0
    failed = [*fine, failure("e", "f", Unreachable)]
    assert exit_code([*failed, failure("g", "h", DataError)]) == 2
    assert exit_code([failure("g", "h", DataError), *failed]) == 4


def test_a_failure_without_a_code_and_a_check_without_a_section_are_our_defects(register):
    with pytest.raises(AssertionError):
        Finding(Level.FAILURE, "x")
    with pytest.raises(AssertionError):
        register("nothing.space", "x")(ok)
    register("disk.space", "x")(ok)
    with pytest.raises(AssertionError):
        register("disk.space", "again")(ok)


def test_findings_are_read_by_section_the_machines_own_first_then_client_by_client(register):
    each = of_clients(lambda client: client.name)
    for name in ("daemon.running", "disk.space", "disk.outbox", "machine.system"):
        (each if name in ("daemon.running", "disk.outbox") else register)(name, "x")(ok)
    found = examine(DoctorFacts(machine="-", clients=[client("a"), client("b")]))
    assert [(f.id, f.client) for f in found] == [
        ("machine.system", ""), ("disk.space", ""), ("disk.outbox", "a"), ("disk.outbox", "b"),
        ("daemon.running", "a"), ("daemon.running", "b"),
    ]  # fmt: skip


# --- machine --------------------------------------------------------------------------------


def machine(**changes):
    return look(machine=replace(MACHINE, **changes))


def test_a_system_that_is_not_tested_is_said_to_be_so():
    assert machine()["machine.system"].level is Level.OK
    assert machine(system="Darwin", arch="arm64")["machine.system"].level is Level.WARNING


def test_a_containers_share_of_the_cores_is_named_with_the_option_for_it():
    assert machine()["machine.cores"].level is Level.OK
    found = machine(quota=1.5)["machine.cores"]
    assert found.level is Level.WARNING
    assert "--max-threads 1" in found.remedy


@pytest.mark.parametrize(
    ("worker", "images", "limit", "expected"),
    [
        (0, 0, None, "ok"),
        (1 << 30, 1 << 30, None, "ok"),
        (1 << 30, 6 << 30, None, "warning"),
        (7 << 30, 0, None, "failure"),
        (1 << 30, 1 << 30, (2 << 30, 1 << 29), "warning"),  # the container's limit
        (1 << 30, 0, (2 << 30, 3 << 29), "failure"),
    ],
)
def test_memory_is_compared_with_what_backbone_and_images_take(worker, images, limit, expected):
    facts = replace(MACHINE, keep_bytes=images)
    if limit:
        facts = replace(facts, limit_bytes=limit[0], limit_used_bytes=limit[1])
    many = {"cat": {"train": 10**9}}  # as many as are kept
    found = look(
        machine=facts,
        images=ImageFacts("x", counts=many if images else {}),
        backbone=BackboneFacts(WANTED, loaded(peak_bytes=worker)),
    )["machine.memory"]
    assert found.level.value == expected
    assert ("limit" in found.text) == bool(limit)


def test_decoded_images_take_their_pixels_or_as_many_as_are_kept():
    ten = ImageFacts("x", counts={"cat": {"train": 7, "select": 1, "test": 2}})
    backbone = BackboneFacts(WANTED, loaded(size=1000))
    for keep, word in ((10**9, "up to 30 MB for decoded"), (10**6, "up to 1 MB for decoded")):
        facts = replace(MACHINE, keep_bytes=keep)
        assert word in look(machine=facts, images=ten, backbone=backbone)["machine.memory"].text


def test_clients_on_one_gpu_are_named_as_a_swarm_and_two_on_two_are_not():
    apart = look(on_gpu=by_device({"a": "cuda:0 (H)", "b": "cuda:1 (H)", "c": "cpu (x)"}))
    assert apart["machine.shared_gpu"].level is Level.SKIPPED
    found = look(on_gpu=by_device({"b": "cuda (H)", "a": "cuda:0 (H)", "c": "cpu"}))[
        "machine.shared_gpu"
    ]
    assert found.level is Level.WARNING
    assert "a, b" in found.text
    assert "swarm" in found.text


def test_a_jetson_is_known_by_its_files_and_told_what_it_needs():
    model = system.jetson_model("NVIDIA Jetson Orin Nano Developer Kit\0")
    l4t = system.l4t_release("# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic")
    assert (model, l4t) == ("NVIDIA Jetson Orin Nano Developer Kit", "L4T 36.4.3")
    assert system.jetson_model("Raspberry Pi 5 Model B\0") == ""
    assert machine()["machine.jetson"].level is Level.SKIPPED
    jetson = replace(MACHINE, arch="aarch64", jetson=model, l4t=l4t)
    bare = look(machine=jetson, engines=EngineFacts(onnx=ORT))["machine.jetson"]
    assert bare.level is Level.WARNING
    assert "NVIDIA's index" in bare.remedy
    ort = OnnxFacts("1", {"TensorrtExecutionProvider": ""})
    for have in (EngineFacts(torch=CUDA_TORCH), EngineFacts(onnx=ort)):
        assert look(machine=jetson, engines=have)["machine.jetson"].level is Level.OK


# --- engines --------------------------------------------------------------------------------

CPU_TORCH = TorchFacts("2.13.0+cpu")
CUDA_TORCH = TorchFacts("2.13.0", "12.8", (Gpu("H", 1 << 30, 2 << 30),))
ORT = OnnxFacts("1.31.1", {"CPUExecutionProvider": ""})
BOTH = {"torch": "2.13.0", "timm": "1.0", "onnxruntime": "1.31.1"}


def test_torch_alone_and_onnxruntime_alone_are_both_enough():
    alone = EngineFacts(installed={"torch": "2", "timm": "1"}, torch=CPU_TORCH)
    edge = EngineFacts(installed={"onnxruntime": "1"}, onnx=ORT)
    for facts in (alone, edge):
        assert set(levels(engines=facts).split()) <= {"ok", "skipped"}


def engine(torch=CPU_TORCH, onnx=ORT, installed=BOTH, **changes):
    return EngineFacts(torch=torch, onnx=onnx, installed=installed, **changes)


TIMM, EDGE, TWO = {"torch": "2", "timm": "1"}, {"onnxruntime": "1"}, BOTH | {"onnxruntime-gpu": "1"}
NO_CUDNN = OnnxFacts("1", {"CUDAExecutionProvider": "no libcudnn.so.9", "CPUExecutionProvider": ""})
NO_CPU = OnnxFacts("1", {"CPUExecutionProvider": "broken"})


@pytest.mark.parametrize(
    ("facts", "expected", "words"),
    [
        # Nothing that runs a backbone as asked.
        (EngineFacts(), "installed failure", "neither torch nor onnxruntime|pip install"),
        (engine(onnx=None, installed={"torch": "2"}), "installed failure", "timm is not|pip install"),
        (engine(onnx=None, installed=TIMM, asked="onnx"), "installed failure", "onnxrun|pip install"),
        (engine(None, installed=EDGE, asked="torch"), "installed failure", "torch cannot|pip install"),
        # Torch that dies when it is imported has last words, and onnxruntime is there.
        (engine(WorkerDied("by SIGSEGV")), "torch failure", "SIGSEGV"),
        (engine(WorkerDied("by SIGSEGV")), "onnxruntime ok", "CPU"),
        # Its build is compared with the driver.
        (engine(), "torch ok", "no GPU"),
        (engine(driver="550.1"), "torch warning", "CPU build"),
        (engine(CUDA_TORCH, driver="550.1"), "torch ok", "1.1 GB of 2.1 GB free"),
        (engine(TorchFacts("2", "13.0", (), "too old"), driver="390"), "torch warning", "too old"),
        (engine(TorchFacts("2", "13.0", (), "no driver")), "torch ok", "no GPU"),
        # Of two that clash it is named what to uninstall; torch may do the work meanwhile.
        (engine(installed=TWO), "clash warning", "pip uninstall -y onnxruntime onnxruntime-gpu|"),
        (engine(installed=TWO), "clash warning", "pip install onnxruntime$"),
        (engine(installed=TWO, asked="onnx", driver="550"), "clash failure", "onnxruntime-gpu$"),
        # A provider that is listed and takes no session.
        (engine(onnx=NO_CUDNN), "providers warning", "libcudnn.so.9"),
        (engine(onnx=NO_CUDNN), "onnxruntime ok", "providers CPU "),
        (engine(onnx=NO_CPU), "onnxruntime failure", "providers none"),
    ],
)  # fmt: skip
def test_what_cannot_compute_is_named_with_what_mends_it(facts, expected, words):
    name, level = expected.split()
    found = look(engines=facts)[f"engine.{name}"]
    assert found.level.value == level
    for word in words.split("|"):
        assert word in f"{found.text} {found.remedy}$"


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
    assert look(engines=engine(torch, device=device))["engine.device"].level.value == expected


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
        (BackboneFacts(WANTED, WorkerDied("by SIGSEGV")), "ok failure skipped skipped"),
        (BackboneFacts(WANTED, Skip("busy")), "ok skipped skipped skipped"),
        (BackboneFacts(Wanted("none", "", "x", needed=False), Skip("-")), "ok skipped skipped skipped"),
    ],
)  # fmt: skip
def test_a_backbone_is_compared_with_what_is_expected(facts, expected):
    assert levels(backbone=facts) == expected


def test_a_slow_pass_is_told_in_minutes():
    found = look(backbone=BackboneFacts(WANTED, loaded(), images=120_000))["backbone.speed"]
    assert "120,000 training images takes about 20 minutes" in found.text


def test_a_crash_of_the_driver_is_told_with_its_code():
    facts = BackboneFacts(WANTED, WorkerDied("was ended by SIGSEGV"))
    assert look(backbone=facts)["backbone.digest"].code == "worker_died"
    mismatch = BackboneFacts(WANTED, loaded(digest="e" * 64))
    assert look(backbone=mismatch)["backbone.digest"].code == BackboneMismatch.code


# --- images ---------------------------------------------------------------------------------

FULL = {"cat": {"train": 7, "select": 1, "test": 2}, "dog": {"train": 8, "test": 2}}


def test_a_sound_folder_has_nothing_to_complain_of():
    found = look(images=ImageFacts("x", files=20, counts=FULL, enrolled=True))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert "15 for training, 1 for tuning, 4 for tests" in found["images.sides"].text


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"left_out": ("folder 'a/b' is left out",)}, "images.layout", "warning"),
        ({"unreadable": ("image 'x' is no image",)}, "images.unreadable", "warning"),
        ({"unreadable": ("x",) * 20}, "images.unreadable", "failure"),
        ({"counts": {"cat": {"train": 1}}}, "images.small", "warning"),
        ({"unlooked": 5}, "images.small", "skipped"),
        ({"duplicates": (("cat/1", "dog/1"),)}, "images.duplicates", "warning"),
        ({"notes": ("class 'cat' has no image to train on",)}, "images.sides", "warning"),
        ({"counts": {"cat": {"test": 9}}}, "images.sides", "failure"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(changes, name, expected):
    facts = ImageFacts(**{"path": "x", "files": 20, "counts": FULL} | changes)
    assert look(images=facts)[name].level.value == expected


def test_a_folder_that_cannot_be_used_is_one_failure_and_the_rest_is_skipped():
    found = examine(DoctorFacts(images=ImageFacts("x", error=DataError("x holds no images."))))
    assert [finding.level.value for finding in found] == ["failure", *["skipped"] * 6]
    assert exit_code(found) == 4


def test_without_a_folder_all_of_it_is_skipped_with_the_reason():
    found = look(images=Skip("no folder was named"))
    assert len(found) == 7
    assert {(f.level.value, f.text) for f in found.values()} == {("skipped", "no folder was named")}


# --- membership -----------------------------------------------------------------------------


def member(**changes):
    given = client("camera")
    found = look(clients=[replace(given, member=replace(given.member, **changes))])
    return [finding for name, finding in found.items() if name.startswith("membership.")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok ok ok"),
        ({"changing": True}, "ok warning ok"),
        ({"fingerprint": KeyFileError("0644")}, "ok failure ok"),
        ({"fingerprint": ""}, "ok failure ok"),
        ({"now_s": 500 * DAY}, "ok ok failure"),
        ({"now_s": -DAY}, "ok ok failure"),
        ({"now_s": 390 * DAY}, "ok ok warning"),
        ({"valid": CorruptFile("none")}, "ok ok failure"),
        ({"enrolment": CorruptFile("client.json")}, "failure ok skipped"),
        ({"enrolment": None, "former": "c", "fingerprint": ""}, "failure skipped skipped"),
        ({"enrolment": None, "fingerprint": ""}, "warning skipped skipped"),
    ],
)
def test_who_a_client_is_and_what_it_lacks(changes, expected):
    assert " ".join(finding.level.value for finding in member(**changes)) == expected


def test_no_folder_and_a_strange_folder_are_told_how_to_join_and_have_nothing_else():
    for given, word, why in (
        (MemberFacts(), "join --data FOLDER", "no folder of this user is enrolled"),
        (MemberFacts(data="x"), "join --data x, with --ticket", "the folder is not enrolled"),
    ):
        found = look(clients=[ClientFacts(given, NetworkFacts(ServerFacts(Skip("no server"))))])
        assert found["membership.enrolment"].level is Level.WARNING
        assert word in found["membership.enrolment"].remedy
        assert {f.text for f in found.values() if f.level is Level.SKIPPED} == {
            why, "no server", "there is no client here yet",
        }  # fmt: skip
        assert len(found) == 13


def of_ticket(**changes):
    relay = changes.pop("relay", False)
    ticket = Ticket(bytes(32), FED, b"secretsecretsecr", 1000, ("a:1",), relay=relay)
    (found,) = examine(
        DoctorFacts(ticket=TicketFacts(**{"ticket": ticket, "now_s": 500.0} | changes))
    )
    shown = json.dumps(found.fields())
    assert ticket.to_text() not in shown
    assert ticket.secret.hex() not in shown
    return found


def test_a_ticket_is_judged_by_the_server_and_without_it_by_this_clock():
    assert "this machine's clock" in of_ticket().text
    late = of_ticket(now_s=2000.0)
    assert (late.level, late.code) == (Level.FAILURE, "ticket_expired")
    # The server's word counts, whatever this clock says.
    assert of_ticket(now_s=2000.0, asked=True).level is Level.OK
    used = of_ticket(asked=True, answer=TicketUsed("by another"))
    assert (used.level, used.code) == (Level.FAILURE, "ticket_used")


def test_other_tickets_are_told_what_they_are():
    assert of_ticket(ticket=None).level is Level.SKIPPED
    assert of_ticket(relay=True).code == "bad_ticket"
    assert of_ticket(ticket=CorruptFile("no ticket")).level is Level.FAILURE
    assert "no longer needs it" in of_ticket(used_here="camera").text


# --- network --------------------------------------------------------------------------------

GOOD = AddressFacts("a:1", ("1.2.3.4",), took_s=0.01)
HELLO = ServerFacts("it is the server", clock_s=(-0.2, 0.1))


def net(*addresses, server=HELLO, relay=False):
    found = look(clients=[client(network=NetworkFacts(server, addresses or (GOOD,), relay))])
    return {name: finding for name, finding in found.items() if name.startswith("network.")}


def test_a_clear_way_to_the_server_is_ok_and_says_whether_it_leads_through_a_relay():
    assert {finding.level for finding in net().values()} == {Level.OK}
    assert "directly" in net()["network.path"].text
    assert "relay" in net(relay=True)["network.path"].text


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
    found = net(bad, server=ServerFacts(Skip("nobody answers")))["network.reach"]
    assert (found.level, found.code) == (Level.FAILURE, "unreachable")
    assert word in found.text
    assert action in found.remedy
    assert "LEAVE" not in found.remedy
    both = net(bad, GOOD)["network.reach"]
    assert both.level is Level.WARNING


def test_a_name_that_is_not_known_is_a_failure_unless_another_address_has_one():
    lost = AddressFacts("nowhere:1", name_fault="this name is not known")
    assert net(lost)["network.name"].level.value == "failure"
    assert net(lost)["network.reach"].level.value == "skipped"
    assert net(lost, GOOD)["network.name"].level.value == "warning"


def test_the_servers_refusal_is_told_in_its_own_words():
    refused = ServerFacts(Revoked("client 'c' was removed from the allow list: lost."))
    found = net(server=refused)["network.server"]
    assert (found.level, found.code) == (Level.FAILURE, "revoked")
    assert "lost" in found.text
    waits = ServerFacts("the client has no session now", waits=True)
    assert net(server=waits)["network.server"].level.value == "warning"


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
    found = net(server=ServerFacts("x", clock_s=between))["network.clock"]
    assert found.level.value == expected
    assert word in found.text


# --- disk -----------------------------------------------------------------------------------


def on_disk(**changes):
    given = {"place": "/s", "free_bytes": 10**10, "free_inodes": 10**6, "kind": "ext4",
             "mount": "/", "read_only": False, "kept_s": 0.01, "temporary": "/tmp",
             "temporary_free_bytes": 10**9}  # fmt: skip
    return look(disk=DiskFacts(**given | changes))


@pytest.mark.parametrize(
    ("changes", "name", "expected"),
    [
        ({"free_bytes": 10**7}, "disk.space", "failure"),
        ({"free_bytes": 4 * 10**8}, "disk.space", "warning"),
        ({"held_bytes": 2 * 10**10}, "disk.space", "warning"),  # as much again may come
        ({"free_inodes": 5}, "disk.inodes", "failure"),
        ({"free_inodes": 500}, "disk.inodes", "warning"),
        ({"free_inodes": None}, "disk.inodes", "skipped"),
        ({"kept_s": DiskFull("full")}, "disk.writable", "failure"),
        ({"kept_s": DiskFull("full")}, "disk.sync", "skipped"),
        ({"read_only": True}, "disk.filesystem", "failure"),
        ({"kind": "tmpfs"}, "disk.filesystem", "warning"),
        ({"kind": "nfs4"}, "disk.filesystem", "warning"),
        ({"kind": "vfat"}, "disk.filesystem", "failure"),
        ({"kind": ""}, "disk.filesystem", "skipped"),
        ({"kept_s": 3.0}, "disk.sync", "warning"),
        ({"temporary_free_bytes": 0}, "disk.temporary", "warning"),
        ({"temporary_free_bytes": DiskFull("full")}, "disk.temporary", "failure"),
    ],
)
def test_a_disk_on_which_a_client_cannot_keep_things_is_named(changes, name, expected):
    assert {finding.level for finding in on_disk().values()} == {Level.OK}
    assert on_disk(**changes)[name].level.value == expected


@pytest.mark.parametrize(
    ("waits", "running", "expected"), [(1, False, "warning"), (1, True, "ok"), (0, False, "ok")]
)
def test_what_waits_in_the_outbox_is_a_warning_if_nobody_sends_it(waits, running, expected):
    facts = HoldingFacts({"outbox": 100 * waits}, waits, 7200.0, running)
    assert look(clients=[client(holding=facts)])["disk.outbox"].level.value == expected


def test_the_mount_of_a_path_is_the_nearest_above_it_and_the_latest_there():
    table = (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "30 21 0:30 / /srv\\040two rw - nfs4 host:/x rw\n"
        "31 21 0:31 / /srv rw shared:1 - ext4 /dev/sdb ro\n"
        "32 21 0:32 / /srv ro - tmpfs none rw\n"
        "nonsense\n"
    )
    assert system.mount_of(table, "/var/x") == ("ext4", "/", False)
    assert system.mount_of(table, "/srv two/a") == ("nfs4", "/srv two", False)
    assert system.mount_of(table, "/srv/a") == ("tmpfs", "/srv", True)
    assert system.mount_of(table, "/srvwork") == ("ext4", "/", False)
    assert system.mount_of("", "/x") == ("", "", False)


# --- daemon ---------------------------------------------------------------------------------

STATUS = {"link": "ready", "work": "idle", "round": None, "package": "0.1.0", "notes": []}


def daemon(status=None, **facts):
    found = look(clients=[client(daemon=DaemonFacts(status, "0.1.0", **facts))])
    return {name: finding for name, finding in found.items() if name.startswith("daemon.")}


def test_a_daemon_that_runs_hangs_or_is_away_is_told_apart():
    assert {finding.level for finding in daemon(STATUS).values()} == {Level.OK}
    hangs = daemon(hangs=True)["daemon.running"]
    assert (hangs.level, hangs.code) == (Level.FAILURE, "timeout")
    away = daemon(start="fcil-client join --data /images")["daemon.running"]
    assert away.level is Level.WARNING
    assert "join --data /images" in away.remedy


def test_a_daemon_of_another_version_is_to_be_started_again():
    for old in ({**STATUS, "package": "0.0.9"}, {k: STATUS[k] for k in ("link", "work", "notes")}):
        found = daemon(old)["daemon.version"]
        assert found.level is Level.WARNING


def test_errors_among_the_last_notes_are_repeated():
    notes = [{"at": 1.0, "level": "info", "text": "fine"}, {"at": 2.0, "level": "error",
             "text": "the disk\nis full"}]  # fmt: skip
    found = daemon({**STATUS, "notes": notes})["daemon.notes"]
    assert found.level is Level.WARNING
    assert "is full" in found.text
    assert "\n" not in found.text
    assert "fine" not in found.text


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
    units = system.parse_units(text)
    assert list(units) == ["fcil-client.service"]
    assert levels(units=units) == expected


def test_without_systemd_or_without_a_unit_that_is_said():
    assert (
        "systemd is not available"
        in look(units=Skip("systemd is not available"))["daemon.unit"].text
    )
    assert look(units={})["daemon.unit"].level is Level.SKIPPED
