"""The guard at the way out of a client: what may not leave is neither sealed nor sent."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from client.daemon_kit import HPARAMS
from client.round_kit import ORDER, SERVER, TERMS, fit, make
from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Exchange, TaskInfo, manifest_checks, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_client.data.inventory import Inventory
from fcil_client.link import handshake
from fcil_client.state import sent_journal
from fcil_protocol import Kind, MetaSpec, Payload, PayloadSchema, TensorSpec, pack
from fcil_protocol.errors import EgressRefused, TooLarge
from fcil_protocol.messages.messages import Bye, Hello

TASK = TaskInfo(0, (0, 1))


def upload(**changes):
    """Return running_mean's upload of one round, with other tensors or fields."""
    good = {
        "mean": np.full((2, 64), 0.5, np.float32),
        "count": np.array([3, 1], np.int64),
        "n": np.array([4], np.int64),
    }
    meta = changes.pop("meta", {})
    return Payload({k: v for k, v in (good | changes).items() if v is not None}, meta)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (upload(images=np.zeros((4, 32, 32, 3), np.uint8)), "'images' is not in the schema"),
        (upload(mean=np.zeros((2, 64), np.float16)), "expected dtype float32, got float16"),
        (upload(mean=np.zeros((2, 65), np.float32)), "expected shape (2, 64), got (2, 65)"),
        (upload(mean=np.zeros((3, 64), np.float32)), "expected shape (2, 64), got (3, 64)"),
        (upload(mean=np.full((2, 64), 1.5, np.float32)), "largest value 1.5 exceeds 1"),
        (upload(mean=None), "'mean' is missing"),
        (upload(meta={"note": "a cat on a sofa"}), "field 'note' is not in the schema"),
        (upload(n=np.array([5], np.int64)), "expected 4, the sum of 'count', got 5"),
    ],
)
def test_what_the_schema_does_not_name_stays_here(payload, words):
    assert TERMS.check_upload("train", upload(), TASK) == []
    (fault,) = TERMS.check_upload("train", payload, TASK)
    assert words in fault


def results(**changes):
    rows = {"classes": (0, 1), "correct": (1, 1), "total": (2, 1), "n": (3,)} | changes
    return Payload({name: np.array(row, np.int64) for name, row in rows.items()})


@pytest.mark.parametrize(
    "payload",
    [
        results(classes=(0, 7)),
        results(classes=(1, 1)),
        results(correct=(1, 2)),
        results(classes=(0, 1, 2)),
        results(images=(1, 2)),
        Payload(results().tensors, {"note": "x"}),
    ],
    ids=["not seen", "twice", "too good", "rows", "tensor", "text"],
)
def test_results_of_another_form_stay_here(payload):
    assert TERMS.check_upload("evaluate", results(), TASK) == []
    assert TERMS.check_upload("evaluate", payload, TASK)


def bad_method(*tensors, meta=()):
    """Return a method like running_mean whose schema declares data that may not leave."""
    schema = METHOD.exchanges(HPARAMS, NO_BACKBONE)[0].upload
    schema = PayloadSchema(schema.tensors + tensors, meta)
    return replace(METHOD, exchanges=lambda _h, _b: (Exchange("train", schema),))


TEXT = bad_method(meta=(MetaSpec("note", "text"),))
IMAGES = bad_method(TensorSpec("pictures", "image", (4, 32, 32, 3), "U8"))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (TEXT, "train: field 'note' is of type 'text', allowed are int, float, bool."),
        (IMAGES, "train: tensor 'pictures' is of kind 'image', allowed are lora, "),
        (
            bad_method(TensorSpec("pile", Kind.GRAM, ("any", 4))),
            "train: tensor 'pile': nothing bounds its size 'any'.",
        ),
    ],
    ids=["text", "kind", "rows"],
)
def test_a_method_that_declares_what_may_not_leave_ends_the_client_with_one_sentence(
    play, monkeypatch, method, words
):
    """Nothing is announced; the server's operator reads the same sentence."""
    monkeypatch.setattr(handshake.registry, "load_method", lambda *_: method)
    digest = registry.schema_digest(method, HPARAMS, NO_BACKBONE)

    async def scenario(server, running):
        await server.hear(Hello)
        server.welcome(ready=False, schema_digest=digest)
        bye = await server.hear(Bye)
        error = await running.end()
        assert type(error) is EgressRefused
        assert error.message.startswith("method 'running_mean' declares data that may not leave")
        assert words in error.message
        assert "\n" not in error.message
        assert (bye.code, bye.reason) == (error.code, error.message)
        assert sent_journal.files(running.home.directory) == []

    play(scenario)


def test_its_payloads_would_be_stopped_all_the_same():
    terms = replace(TERMS, method=TEXT)
    (fault,) = terms.check_upload("train", upload(meta={"note": "a cat on a sofa"}), TASK)
    assert "'note' is of type 'text'" in fault


@pytest.mark.parametrize("name", registry.method_names())
def test_every_installed_method_declares_only_what_may_leave(name):
    method = registry.load_method(name)
    for preset in (None, *method.presets):
        options = registry.make_hparams(method, {"preset": preset} if preset else {})
        manifest_checks.check_uploads(method, options, backbone_by_name("embedded"))


class TestRound:
    """A round whose worker answers with a payload of the test's."""

    @pytest.fixture(autouse=True)
    def _registry(self, monkeypatch):
        fit(monkeypatch)

    @pytest.fixture
    def run(self, home, enrolment, tmp_path):
        def run(payload, **changes):
            async def main():
                work = make(home, enrolment, tmp_path)
                work._host.gate.set()
                work._host.answer = ({"faults": []}, [pack(Payload()), pack(payload)])
                terms = replace(TERMS, **changes)
                return await work.run(ORDER, terms, SERVER.public, lambda *_: None)

            return asyncio.run(main())

        return run

    def test_a_good_payload_is_written_down_and_kept(self, run, home):
        digest = run(upload())
        assert home.outbox() == [digest]
        assert [row["digest"] for row in sent_journal.read(home.directory)[0]] == [digest]

    @pytest.mark.parametrize(
        ("payload", "words"),
        [
            (upload(images=np.zeros((4, 4), np.uint8)), "'images' is not in the schema"),
            (upload(meta={"note": "x"}), "'note' is not in the schema"),
        ],
    )
    def test_another_is_not_even_sealed(self, run, home, payload, words):
        with pytest.raises(EgressRefused, match=words):
            run(payload)
        assert home.outbox() == []
        assert sent_journal.files(home.directory) == []

    def test_nor_is_one_that_the_server_does_not_take(self, run, home):
        with pytest.raises(TooLarge, match="exceeds the 500"):
            run(upload(), max_payload_bytes=500)
        assert sent_journal.files(home.directory) == []


def test_a_list_of_classes_of_another_form_is_not_sent(play):
    """A folder's name that is text of another kind cannot become a class name."""

    async def scenario(server, running):
        running.work.scans = [Inventory({"two\nlines": 3}, {})]
        await server.greet()
        await server.inventory(names=[])
        assert running.said("must not leave the device: field 'names'")
        assert b"two" not in (running.home.directory / sent_journal.NAME).read_bytes()

    play(scenario)
