"""The dry run: what would leave, told without taking part."""

import asyncio
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from client.daemon_kit import DIGEST, HPARAMS, RUN, Server
from client.round_kit import TERMS
from fcil_adapters.contract import TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_fields
from fcil_adapters.masks.exchanges import MASKING, with_masks
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.cli.main import app
from fcil_client.cli.show_sent import show_dry_run
from fcil_client.data.inventory import Inventory
from fcil_client.link import visit
from fcil_client.membership import ask_terms
from fcil_client.membership.ask_terms import TaskClasses, TermsPreview, look, say_hello
from fcil_client.membership.dry_run import count_images, dry_run
from fcil_client.membership.enrol import JoinFile
from fcil_client.state import sent_journal
from fcil_client.state.home import Enrolment, Home, state_home
from fcil_client.state.privacy_budget import PrivacyLimits
from fcil_protocol.envelopes.header import sealed_size
from fcil_protocol.errors import (
    ConfigError,
    EgressRefused,
    Locked,
    MethodMismatch,
    TrustError,
    Unreachable,
    UsageError,
    WireError,
)
from fcil_protocol.ids import new_client_id
from fcil_protocol.messages.messages import Bye, Hello, Nack, PrivacyTerms
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.federation.sections import MethodSection

FOLDER = Inventory({"cat": 8, "dog": 2}, {"cat": 1})


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def data(tmp_path):
    """Two classes of five small pictures."""
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(5):
            pixels = np.full((4, 4, 3), 40 * i + len(name) + ord(name[0]) % 30, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


def told(tmp_path, inventory=FOLDER, **outlook):
    made = TermsPreview(TERMS, "method", "as told", **outlook)
    return dry_run(tmp_path, made, inventory, enrolled=True)


def tasks(tmp_path, *named, inventory=FOLDER, **outlook):
    return told(tmp_path, inventory, tasks=named, **outlook)["tasks"]


def kinds(task):
    return [exchange["kind"] for exchange in task["exchanges"]]


# --- the numbers ----------------------------------------------------------------------------


def test_the_sizes_of_an_update_are_those_of_a_real_one(tmp_path):
    (task,) = told(tmp_path)["tasks"]
    exchange = task["exchanges"][0]
    real = Payload(
        {
            "mean": np.random.default_rng(1).random((2, 64), np.float32),
            "count": np.array([8, 2], np.int64),
            "n": np.array([10], np.int64),
        }
    )
    assert TERMS.check_upload("train", real, TaskInfo(0, (0, 1))) == []
    assert exchange["tensors"] == [
        {"name": "mean", "kind": "prototype", "shape": [2, 64], "dtype": "F32", "bytes": 512,
         "at_most": False, "optional": False},
        {"name": "count", "kind": "count", "shape": [2], "dtype": "I64", "bytes": 16,
         "at_most": False, "optional": False},
        {"name": "n", "kind": "count", "shape": [1], "dtype": "I64", "bytes": 8,
         "at_most": False, "optional": False},
    ]  # fmt: skip
    assert exchange["tensor_bytes"] == real.tensor_bytes
    assert exchange["sealed_bytes"] == sealed_size(len(pack(real)))
    assert exchange["at_most"] is False


def test_the_announcement_names_classes_and_counts(tmp_path):
    said = told(tmp_path)["announcement"]
    assert said["classes"] == [
        {"name": "cat", "train": 8, "test": 1},
        {"name": "dog", "train": 2, "test": 0},
    ]
    assert said["tensor_bytes"] == 32
    assert said["sealed_bytes"] == sealed_size(len(pack(FOLDER.payload())))
    assert said["refused"] == []


def test_an_object_store_is_told_of(tmp_path, capsys):
    assert told(tmp_path)["object_store"] is None
    terms = replace(TERMS, object_store="https://store.example/parts/")
    preview = TermsPreview(terms, "method", "as told")
    without = dry_run(tmp_path, preview, FOLDER, enrolled=True, link_only=True)
    assert without["object_store"] is None
    row = dry_run(tmp_path, preview, FOLDER, enrolled=True)
    show_dry_run(row)
    assert "come from https://store.example/parts/ (--link-only" in capsys.readouterr().out


def test_the_clients_own_limits_count(tmp_path, capsys):
    preview = TermsPreview(TERMS, "method", "as told", tasks=(TaskClasses(("cat", "dog")),))
    row = dry_run(tmp_path, preview, FOLDER, enrolled=True, limits=PrivacyLimits(min_count=3))
    assert [c["name"] for c in row["announcement"]["classes"]] == ["cat"]
    assert row["tasks"][0]["held"] == ["cat"]
    show_dry_run(row)
    assert "fewer than 3 images stay out (--min-count)" in capsys.readouterr().out
    masked = PrivacyLimits(min_masked=5)
    row = dry_run(tmp_path, preview, FOLDER, enrolled=True, limits=masked)
    assert row["declined"] == "", "no server has set terms"
    asked = replace(preview, source="hello")
    row = dry_run(tmp_path, asked, FOLDER, enrolled=True, limits=masked)
    assert kinds(row["tasks"][0]) == ["evaluate"]
    show_dry_run(row)
    assert "declines all rounds but evaluations: the server's terms have no masks" in (
        capsys.readouterr().out.replace("\n", " ")
    )


def test_each_masked_round_brings_the_rounds_of_masks(tmp_path):
    terms = replace(TERMS, method=with_masks(TERMS.method), privacy=PrivacyTerms(secure="masks"))
    preview = TermsPreview(
        terms, "method", "as told", tasks=(TaskClasses(("cat",)),), rounds_per_task=3
    )
    (task,) = dry_run(tmp_path, preview, FOLDER, enrolled=True)["tasks"]
    said = {exchange["kind"]: exchange["rounds"] for exchange in task["exchanges"]}
    # The sums of a task are masked once, whatever the number of rounds of other methods.
    assert said == dict.fromkeys((*MASKING, "train", "evaluate"), 1)


def test_a_name_that_the_guard_would_stop_is_told(tmp_path):
    said = told(tmp_path, Inventory({"two\nlines": 1}, {}))["announcement"]
    assert said["refused"] == ["field 'names' is not of type class_names"]


def late(tmp_path, *named, inventory=FOLDER):
    terms = replace(TERMS, hparams=HPARAMS.model_copy(update={"late": "count"}))
    made = TermsPreview(terms, "method", "as told", tasks=named)
    return dry_run(tmp_path, made, inventory, enrolled=True)["tasks"]


def test_late_images_of_learned_classes_are_told_of_when_their_tasks_are_over(tmp_path):
    """A device that slept through all of them is asked, and says before what would leave."""
    over = (TaskClasses(("cat",), closed=True), TaskClasses(("dog", "elk"), closed=True))
    (task,) = late(tmp_path, *over)
    assert kinds(task) == ["late"]
    (exchange,) = task["exchanges"]
    assert exchange["rounds"] is None
    assert exchange["tensors"][0]["shape"] == [3, 64], "of all classes so far"
    assert late(tmp_path, *over, inventory=Inventory({"yak": 3}, {})) == []
    assert tasks(tmp_path, *over) == [], "without the option none leave"


def test_late_images_are_told_of_beside_those_of_a_task(tmp_path):
    (task,) = late(tmp_path, TaskClasses(("cat",), closed=True), TaskClasses(("dog",)))
    assert kinds(task) == ["train", "late", "evaluate"]
    (other,) = late(tmp_path, TaskClasses(("cat",), closed=True), TaskClasses(("elk",)))
    assert kinds(other)[0] == "late", "it has images of the first task alone"


def test_results_are_at_most_one_row_for_each_class_with_test_images(tmp_path):
    (task,) = told(tmp_path)["tasks"]
    results = task["exchanges"][-1]
    assert results["kind"] == "evaluate"
    assert results["tensors"][0]["shape"] == [1], "of the dog there is no test image"
    assert results["at_most"] is True
    assert results["tensor_bytes"] == 3 * 8 + 8


def test_before_the_split_is_drawn_any_class_may_have_images_for_tests(tmp_path):
    """Else "at most" would be said of less than will leave."""
    outlook = TermsPreview(TERMS, "method", "as told")
    (task,) = dry_run(tmp_path, outlook, FOLDER, enrolled=False)["tasks"]
    assert task["exchanges"][-1]["tensors"][0]["shape"] == [2]
    assert task["images"] == 11


# --- tasks ----------------------------------------------------------------------------------


def test_with_listed_tasks_it_is_each_that_is_not_over(tmp_path):
    first, second = tasks(
        tmp_path,
        TaskClasses(("bird",), closed=True),
        TaskClasses(("CAT", "fox", "emu")),
        TaskClasses(("owl",)),
        rounds_per_task=3,
    )
    assert (first["task"], first["classes"], first["past"]) == (1, 3, 1)
    assert (first["held"], first["images"]) == (["cat"], 8)
    assert kinds(first) == ["train", "evaluate"]
    assert first["exchanges"][0]["rounds"] == 3
    assert first["exchanges"][0]["tensors"][0]["shape"] == [3, 64], "a row for each class of it"
    assert kinds(second) == ["evaluate"], "it has none of its classes, and still test images"


def test_classes_that_are_not_listed_are_never_learned(tmp_path):
    (only,) = tasks(tmp_path, TaskClasses(("owl",)))
    assert (only["held"], only["exchanges"]) == ([], [])


def test_new_classes_make_the_next_task_with_those_that_wait(tmp_path):
    now, coming = tasks(tmp_path, TaskClasses(("cat",)), waiting=("Dog", "eel"))
    assert (now["held"], now["known"]) == (["cat"], True)
    assert (coming["held"], coming["known"]) == (["dog"], False)
    assert (coming["classes"], coming["past"]) == (2, 1)


def test_without_a_new_class_no_next_task_is_foretold(tmp_path):
    rows = tasks(tmp_path, TaskClasses(("cat", "dog"), closed=True), waiting=("eel",))
    assert rows == []


def test_a_server_that_does_not_evaluate_gets_no_results(tmp_path):
    (task,) = told(tmp_path, evaluate=False)["tasks"]
    assert kinds(task) == ["train"]


def test_images_without_a_side_for_training_bring_no_update(tmp_path):
    (task,) = tasks(tmp_path, TaskClasses(("cat",)), inventory=Inventory({}, {"cat": 2}))
    assert kinds(task) == ["evaluate"]


# --- images ---------------------------------------------------------------------------------


def test_a_folder_that_is_enrolled_has_the_counts_that_a_start_would_find(data, monkeypatch):
    # Of five pictures a salt may put all on the test side, which the first look alone mends and
    # tells: with this one it does not.
    monkeypatch.setattr(os, "urandom", lambda size: b"s" * size)
    home = Home.of("f" * 32, data)
    home.salt()
    monkeypatch.undo()
    first, again = count_images(data, home), count_images(data, home)
    assert first == again
    assert first.names == ["cat", "dog"]
    assert sum(first.train.values()) + sum(first.test.values()) <= 10


def test_one_that_is_not_leaves_no_trace(data):
    assert count_images(data, None).names == ["cat", "dog"]
    assert not state_home().exists()


# --- where the terms are from ---------------------------------------------------------------


def test_an_installed_method_with_options(data):
    outlook, home = look(data, None, "pilora", ["method.rank=3", "run.backbone=embedded"])
    assert home is None
    assert outlook.terms.method.name == "pilora"
    assert outlook.terms.hparams.rank == 3
    row = dry_run(data, outlook, count_images(data, None), enrolled=False)
    lora = next(t for t in row["tasks"][0]["exchanges"][1]["tensors"] if t["kind"] == "lora")
    assert lora["shape"] == [3, 128]


@pytest.mark.parametrize(
    ("half", "dtypes"),
    [
        ([], {"lora": {"F16"}, "prototype": {"F16", "F32"}, "count": {"I64"}}),
        (['wire.half=["lora"]'], {"lora": {"F16"}, "prototype": {"F32"}, "count": {"I64"}}),
        (["wire.half=none"], {"lora": {"F32"}, "prototype": {"F32"}, "count": {"I64"}}),
    ],
)
def test_tensors_are_shown_in_the_form_in_which_they_would_travel(data, half, dtypes):
    outlook, _ = look(data, None, "pilora", half)
    row = dry_run(data, outlook, count_images(data, None), enrolled=False)
    shown = {}
    for tensor in row["tasks"][0]["exchanges"][1]["tensors"]:
        shown.setdefault(tensor["kind"], set()).add(tensor["dtype"])
    assert shown == dtypes


@pytest.mark.parametrize(("method", "exact"), [("running_mean", True), ("pilora", False)])
def test_sealed_sizes_are_those_of_the_compact_form_where_they_are_exact(data, method, exact):
    sizes = []
    for compact in ("true", "false"):
        outlook, _ = look(data, None, method, [f"wire.compact={compact}"])
        row = dry_run(data, outlook, count_images(data, None), enrolled=False)
        exchange = next(e for e in row["tasks"][0]["exchanges"] if e["kind"] == "train")
        assert exchange["at_most"] is not exact
        sizes.append(exchange["sealed_bytes"])
    assert (sizes[0] < sizes[1]) is exact
    assert exact or sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["wire.half=lora"], "wire.half should be"),
        (["wire.compact=no"], "wire.compact should be true or false"),
        (['wire.half=["prompt"]'], "the method pilora can send in half precision: lora, prototype"),
        (["wire.window_mb=2"], "no use for wire.window_mb"),
        (["method.no_such=1"], "no option 'no_such'"),
        (["tasks.schedule=listed", "run.seed=1"], "no use for tasks, run.seed"),
        (["rank=3"], "not of the form"),
        (["run.backbone=resnet18"], "cannot be derived from its name"),
    ],
)
def test_options_that_mean_nothing_are_refused(data, options, words):
    with pytest.raises(ConfigError, match=words):
        look(data, None, "pilora", options)


def test_options_need_a_method(data):
    with pytest.raises(UsageError, match="but no method"):
        look(data, None, None, ["method.rank=3"])


def test_a_method_that_declares_what_may_not_leave_is_refused(data, monkeypatch):
    from fcil_adapters.contract import Exchange
    from fcil_adapters.numerics.class_reports import count_spec
    from fcil_protocol.payloads.schema import MetaSpec, PayloadSchema

    text = PayloadSchema((count_spec("n", 1),), (MetaSpec("note", "text"),))
    bad = replace(METHOD, exchanges=lambda _h, _b: (Exchange("train", text),))
    monkeypatch.setattr(ask_terms.registry, "load_method", lambda _name: bad)
    with pytest.raises(EgressRefused, match="'note' is of type 'text'"):
        look(data, None, "running_mean", [])


def assumed(data):
    outlook, home = look(data, None, None, [])
    assert (outlook.source, outlook.terms.method.name, home) == ("default", "pilora", None)
    assert "assumed" in outlook.told
    assert "operator" in outlook.told
    assert "--method NAME" in outlook.told


def test_without_a_server_to_ask_its_default_method_is_assumed_and_nobody_enrolled(data):
    assumed(data)
    assert not state_home().exists()


def test_the_assumed_method_is_the_servers_default():
    assert MethodSection().name == ask_terms.DEFAULT_METHOD


TOLD = {
    "run": RUN, "method": METHOD.name, "method_version": METHOD.version, "method_package": "",
    "hparams": HPARAMS.model_dump_json(), "schema_digest": DIGEST, "protocol": 1,
    "backbone": json.dumps(backbone_fields(NO_BACKBONE)), "needs_backbone": False,
    "max_payload_bytes": 10**6, "credit": 8,
}  # fmt: skip
REPLY = {
    "terms": TOLD, "rounds_per_task": 2, "evaluate": True, "waiting": ["eel"],
    "tasks": [{"classes": ["cat"], "closed": True}],
}  # fmt: skip


@pytest.fixture
def neighbour(tmp_path, monkeypatch):
    """A server of this machine; its answers, by command."""
    join = JoinFile("f" * 32, "lab", tmp_path / "federation", ("127.0.0.1:7710",))
    monkeypatch.setattr(ask_terms, "find_server", lambda _server: join)
    answers = {"outlook": REPLY}

    def ask(directory, op, **fields):
        assert (directory, fields) == (join.directory, {})
        if isinstance(answers[op], Exception):
            raise answers[op]
        return answers[op]

    monkeypatch.setattr(ask_terms.control_socket, "ask", ask)
    return answers


def test_a_server_of_this_machine_is_asked_without_enrolling(data, neighbour):
    outlook, home = look(data, None, None, [])
    assert home is None
    assert not state_home().exists()
    assert (outlook.terms.run, outlook.terms.method) == (RUN, METHOD)
    assert outlook.tasks == (TaskClasses(("cat",), closed=True),)
    assert (outlook.waiting, outlook.rounds_per_task) == (("eel",), 2)
    row = dry_run(data, outlook, FOLDER, enrolled=False)
    assert [t["task"] for t in row["tasks"]] == [1], "the first is over, the dog makes the next"


@pytest.mark.parametrize(
    "reply",
    [{}, REPLY | {"tasks": [{}]}, REPLY | {"tasks": 3}, REPLY | {"terms": TOLD | {"credit": "8"}},
     {k: v for k, v in REPLY.items() if k != "evaluate"}],
    ids=["empty", "task", "tasks", "terms", "missing"],
)  # fmt: skip
def test_an_answer_of_another_form_is_a_sentence(data, neighbour, reply):
    neighbour["outlook"] = reply
    with pytest.raises(WireError, match="of another version"):
        look(data, None, None, [])


def test_one_that_left_only_its_join_file_cannot_be_asked(data, neighbour):
    neighbour["outlook"] = Unreachable("gone.")
    assumed(data)


# --- Hello, Welcome, Bye --------------------------------------------------------------------


@pytest.fixture
def far(data):
    """A server elsewhere, the home of a folder that is enrolled with it, and its link."""
    server = Server()
    home = Home.of(server.root.federation, data)
    enrolment = Enrolment(
        new_client_id(), "c", server.root.federation, server.certificate.hex(), ("a:1", "b:2"),
        str(data),
    )  # fmt: skip
    home.save_enrolment(enrolment)
    server.client = PrivateKeys.load_or_new(home.keys_path).public
    return server, home, enrolment


def dialled(server, tried):
    def make(address, keys, _server):
        tried.append(address)
        dealer = server.router.dealer(keys.public.curve)
        dealer.connect()
        return dealer

    return make


def play(far, scenario):
    """Say Hello while a scenario plays the server; return the outlook, or the error."""
    server, home, enrolment = far

    async def main():
        async with asyncio.timeout(60):
            return await asyncio.gather(
                say_hello(home, enrolment, dialled(server, [])),
                scenario(server),
                return_exceptions=True,
            )

    outcome, played = asyncio.run(main())
    assert not isinstance(played, BaseException), repr(played)
    return outcome


def test_it_says_hello_takes_the_terms_and_leaves(far):
    async def scenario(server):
        hello = await server.hear(Hello)
        assert (hello.run, hello.schema_digest, hello.backbone) == ("", "", None)
        server.welcome(ready=False)
        bye = await server.hear(Bye)
        assert bye.code == "", "it is no failure"

    outlook = play(far, scenario)
    assert outlook.terms.method is METHOD
    assert outlook.tasks is None
    home = far[1]
    assert home.outbox() == []
    assert sent_journal.files(home.directory) == []
    assert not (home.directory / "run").exists(), "it has not entered the run"


def test_a_refusal_is_told(far):
    async def scenario(server):
        await server.hear(Hello)
        server.say(Nack(code="method_mismatch", text="the client has no such method."))

    outcome = play(far, scenario)
    assert type(outcome) is MethodMismatch
    assert "no such method" in outcome.message


def test_terms_of_a_server_that_did_not_sign_them_are_not_believed(far):
    async def scenario(server):
        await server.hear(Hello)
        server.keys = type(server.keys).generate()
        nonce = server.channel.peer_nonce
        server.channel = type(server.channel)(server.keys, server.client)
        server.channel.peer_nonce = nonce
        server.welcome(ready=False)

    assert isinstance(play(far, scenario), TrustError)


def test_an_old_welcome_is_not_taken(far):
    async def scenario(server):
        await server.hear(Hello)
        nonce, server.channel.peer_nonce = server.channel.peer_nonce, b"x" * 16
        server.welcome(ready=False, run="r20250102-030405-0a0b")
        server.channel.peer_nonce = nonce
        server.welcome(ready=False)

    assert play(far, scenario).terms.run == RUN


def test_a_key_that_is_not_admitted_is_a_sentence(far):
    server, home, enrolment = far
    server.router._admit = lambda _key: False
    with pytest.raises(TrustError, match="does not admit"):
        asyncio.run(say_hello(home, enrolment, dialled(server, [])))


def test_where_nobody_answers_it_tries_the_other_address_and_gives_up(far, monkeypatch):
    server, home, enrolment = far
    server.router.close()
    tried = []
    monkeypatch.setattr(visit, "ADDRESS_S", 0.0)
    monkeypatch.setattr(visit, "ANSWER_S", 0.2)
    with pytest.raises(Unreachable, match="no server at a:1, b:2 answered"):
        asyncio.run(say_hello(home, enrolment, dialled(server, tried)))
    assert tried[:2] == ["a:1", "b:2"]


def test_a_client_that_runs_is_not_pushed_off_the_server(far, data):
    """A second link with its key would cut it off, as if it were stolen."""
    _, home, _ = far

    def never(*_):
        raise AssertionError("it connected")

    with (
        DirectoryLock.acquire(home.directory, "client"),
        pytest.raises(Locked, match="in use") as caught,
    ):
        look(data, None, None, [], never)
    assert "--method NAME" in caught.value.action


# --- the commands ---------------------------------------------------------------------------


def command(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done


def test_the_command_prints_one_envelope(data):
    done = command("join", "--data", data, "--dry-run", "--method", "running_mean", "--json")
    envelope = json.loads(done.stdout)
    assert envelope["status"] == "ok"
    assert envelope["data"]["method"] == "running_mean"
    assert envelope["data"]["source"] == "method"
    assert envelope["data"]["enrolled"] is False


def test_or_a_table(data):
    out = command("join", "--data", data, "--dry-run", "--method", "running_mean").stdout
    assert "No class was announced and no update sent." in out
    assert ["train", "mean", "prototype", "2", "x", "64", "F32", "512"] in [
        line.split() for line in out.splitlines()
    ]
    assert not state_home().exists()


@pytest.mark.parametrize(
    "arguments", [["--method", "pilora"], ["-c", "method.rank=1"], ["--json"]], ids=str
)
def test_what_is_for_dry_runs_is_refused_without_one(data, arguments):
    done = command("join", "--data", data, *arguments, code=4)
    assert "for --dry-run" in done.stderr


def test_a_server_that_is_not_here_is_not_taken_for_another(data):
    done = command("join", "--data", data, "--dry-run", "--server", "nosuch", code=2)
    assert "no fcil server that is called 'nosuch' runs" in done.stderr


def test_the_commands_limits_are_those_of_the_dry_run(data):
    given = ("--dry-run", "--method", "running_mean", "--min-count", 6, "--json")
    assert json.loads(command("join", "--data", data, *given).stdout)["data"]["least"] == 6


def test_an_unknown_precision_is_refused_before_anything_is_looked_for(tmp_path):
    done = command("join", "--data", tmp_path / "nowhere", "--precision", "half", code=4)
    assert "known are auto, fp32, amp" in done.stderr


def test_a_dry_run_uses_no_ticket(data, tmp_path):
    done = command("join", "--data", data, "--dry-run", "--ticket", tmp_path / "t", "--json")
    assert "the ticket stays unused" in done.stderr
    assert json.loads(done.stdout)["data"]["source"] == "default"
    assert not state_home().exists()


def test_the_journal_as_text_and_json(far, data):
    _, home, _ = far
    journal = sent_journal.SentJournal(home.directory)
    journal.sent("1" * 64)
    journal.refused("1" * 64, "round_closed")
    (shown,) = json.loads(command("journal", "--data", data, "--json").stdout)["data"]["journals"]
    (row,) = shown["envelopes"]
    assert (row["digest"], row["answer"], row["code"]) == ("1" * 64, "refused", "round_closed")
    lines = command("journal", "--format", "jsonl").stdout.splitlines()
    assert [json.loads(line)["digest"] for line in lines] == ["1" * 64]
    assert "sent, refused (round_closed)" in command("journal").stdout


def test_the_journal_since_a_day(far, data):
    journal = sent_journal.SentJournal(far[1].directory)
    journal.sent("1" * 64)
    assert "111111111111" in command("journal", "--since", "2020-01-01").stdout
    assert "nothing has left" in command("journal", "--since", "2999-01-01").stdout


def test_without_a_client_nothing_has_left(data):
    assert "nothing has left" in command("journal", "--data", data).stdout
    assert json.loads(command("journal", "--json").stdout)["data"] == {"journals": []}


def test_a_method_that_looks_at_past_images_again_is_named_with_how_many(data):
    run = CliRunner().invoke
    line = "icarl re-reads up to 30 images of past classes in place"
    given = ["join", "--data", str(data), "--dry-run", "--method"]
    done = run(app, [*given, "icarl", "-c", "method.memory=30"])
    assert line in " ".join(done.output.split())
    assert "re-reads" not in run(app, [*given, "fedncm"]).output
