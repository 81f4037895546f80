"""The bytes that manifests announce: the published figures, and what a federation really sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from adapters.exemplar_kit import KeepingFederation
from adapters.kit import make_tasks, toy_backbone, toy_images
from adapters.small import SMALL
from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Exchange
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.contract.traffic import Cadence, Largest
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import pack
from fcil_protocol.payloads.schema import Kind, PayloadSchema, TensorSpec
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.prediction import predict
from fcil_server.reports.traffic.sizes import NOTHING, Size
from tiers import OF_EACH_KIND, sampled

F32, I64 = 4, 8
D, MLP = 768, 3072  # ViT-B/16
ROW = D * F32
PAGE_OF = Path(__file__).parents[4] / "docs" / "methods"
PAGE = (PAGE_OF / "README.md").read_text(encoding="utf-8")


def vit_base(name, /, options=None, **kw):
    method = load_method(name)
    setting = TrafficSetting(backbone_by_name("vit_base_patch16_224"), **kw)
    return predict(method, make_hparams(method, options or {}), setting)


def upload(traffic, exchange="train"):
    return next(u.size for u in traffic.up if u.exchange == exchange)


def part(traffic, kind):
    return next(d for d in traffic.down if d.part == kind)


class TestPublishedFigures:
    """docs/methods/README.md, "Sizes": ViT-B/16, 10 classes per task, fp32, a client and round.

    Counts, class ids and n are int64 on top; the published figures leave them out.
    """

    def test_pilora(self):
        traffic = vit_base("pilora")
        sent = upload(traffic)
        assert sent.kinds["lora"] + sent.kinds["prototype"] == 110_592
        assert sent.bytes == 110_592 + (10 + 10 + 10 + 1) * I64
        assert not sent.exact  # a client without some of the classes has fewer means
        assert upload(traffic, "prepare").bytes == 10 * ROW + 31 * I64
        task = part(traffic, "task").each
        assert task.bytes == 79_872 + (10 + 10) * I64
        assert task.exact
        assert part(traffic, "current").each == NOTHING

    def test_plora(self):
        traffic = vit_base("plora")
        assert upload(traffic).bytes == 307_200 + 31 * I64
        assert part(traffic, "lora").each.bytes == 61_440 * F32
        assert part(traffic, "task").each.bytes == 10 * ROW + 20 * I64
        assert traffic.round[1].bytes == 276_480 + 20 * I64

    def test_fed_talora(self):
        """The residual of ten clients has rank 36; its log costs what ten LoRAs cost."""
        traffic = vit_base("fed_talora", {"catch_up": "factors"})
        sent = upload(traffic)
        assert sent.bytes == 718_888 + 21 * I64
        assert sent.exact
        assert part(traffic, "residual").each.bytes == 6_193_152
        assert traffic.round[1].bytes == 6_912_040 + 20 * I64
        assert [d.part for d in traffic.down] == ["current", "task", "residual"]

    def test_fed_talora_rolls_its_log_into_a_base_that_everybody_fetches(self):
        """16 x 6,193,152 is the first log of at least 94,371,840 bytes."""
        traffic = vit_base("fed_talora", rounds=30)
        base = part(traffic, "base")
        assert (base.each.bytes, base.every) == (94_371_840, 16)
        assert base.task.bytes == 94_371_840
        assert part(traffic, "residual").task.bytes == 29 * 6_193_152
        assert traffic.round[1].kinds["residual"] == (15 * 6_193_152 + 94_371_840) / 16

    def test_fed_talora_dense_or_with_one_client(self):
        dense = vit_base("fed_talora", {"residual": "dense"})
        assert part(dense, "base").every == 1
        assert dense.round[1].bytes == 718_888 + 94_371_840 + 20 * I64
        alone = vit_base("fed_talora", clients=1)
        assert [d.part for d in alone.down] == ["current", "task"]
        # 192 clients: factors of rank 193 x 4 would be no smaller than the matrices.
        assert [d.part for d in vit_base("fed_talora", clients=192).down][2:] == ["base"]

    def test_a_task_of_one_class_sends_a_mean_instead_of_learning_a_head(self):
        traffic = vit_base("fed_talora", classes=1)
        assert upload(traffic).kinds["prototype"] == ROW
        assert not upload(traffic).exact
        assert [d.part for d in traffic.down] == ["current", "task"]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            # mean and diagonal, as the claim's table counts them
            ({"cov": "diag", "pool_sharing": "shared"}, 368_680),
            ({"cov": "full", "pool_sharing": "shared"}, 12_149_800),
            ({"cov": "diag"}, 1_413_160 + 10 * 2 * ROW),
            ({}, 1_413_160 + 10 * (2 + 16) * ROW),
        ],
        ids=str,
    )
    def test_hgp(self, options, expected):
        traffic = vit_base("hgp", options)
        assert upload(traffic).bytes == expected + 21 * I64

    def test_hgp_sends_the_whole_head_down(self):
        """Past prompts come once a task; 70 rows of the head in the seventh task."""
        traffic = vit_base("hgp", past=60)
        pools = 5 * 10 * (8 + 1) * ROW
        assert part(traffic, "current").each.bytes == 70 * (ROW + F32) + 2 * 70 * I64
        assert part(traffic, "task").each.bytes == pools
        assert traffic.missed.bytes == 6 * pools

    def test_hepco(self):
        traffic = vit_base("hepco", past=90)
        assert upload(traffic).bytes == 32_286_760 + 21 * I64
        assert traffic.round[1].bytes == 32_563_600 + 20 * I64
        assert part(traffic, "pools").task.bytes == 5 * part(traffic, "pools").each.bytes

    def test_lorm_has_the_sizes_of_its_page(self):
        traffic = vit_base("lorm", {"blocks": list(range(12))}, past=10)
        page = (PAGE_OF / "lorm.md").read_text(encoding="utf-8")
        sent = upload(traffic)
        lora, layers, rows, head = 5_308_416, 26_112, 30_760, 1_181_184
        assert f"| up, a round of $B$ | {lora:,} | {layers:,} | {rows:,} | {head:,} |" in page
        assert sent.kinds == {
            "lora": lora, "head": rows, "gaussian": layers + head, "count": 21 * I64,
        }  # fmt: skip
        down, squares = 9_437_184, 258_048
        assert f"| down, each round | {down:,} | | {rows:,} | |" in page
        assert part(traffic, "current").each.kinds == {
            "lora": down, "head": rows, "count": 20 * I64,
        }  # fmt: skip
        assert f"| up, `finish` | | {squares:,} | | |" in page
        assert upload(traffic, "finish").kinds["gaussian"] == squares
        assert part(traffic, "lora").task.bytes == down  # the last task's, once
        a_rounds = vit_base("lorm", {"blocks": list(range(12)), "modules": ["fc2"]})
        assert upload(a_rounds).kinds["lora"] == 12 * 16 * MLP * F32

    @pytest.mark.parametrize(
        ("row", "method", "options", "past"),
        [
            ("PILoRA", "pilora", {}, 10),
            ("PLoRA", "plora", {}, 10),
            ("Fed-TaLoRA", "fed_talora", {"catch_up": "factors"}, 10),
            ("HGP, one pool, diagonals", "hgp", {"cov": "diag", "pool_sharing": "shared"}, 90),
            (
                "HGP, full covariances, one pool",
                "hgp",
                {"cov": "full", "pool_sharing": "shared"},
                90,
            ),
            ("HePCo", "hepco", {}, 90),
        ],
    )
    def test_the_page_on_the_methods_has_these_sizes(self, row, method, options, past):
        traffic = vit_base(method, options, past=past)
        up, down = (
            {kind: size for kind, size in one.kinds.items() if kind != Kind.COUNT}
            for one in (upload(traffic), traffic.round[1])
        )
        residual = down.pop(Kind.RESIDUAL, 0)
        line = f"| {row} | {sum(up.values()):,} | {sum(down.values()):,}"
        line += f" and a residual of {residual:,} |" if residual else ""
        assert line in PAGE

    def test_running_mean_does_not_depend_on_the_backbone(self):
        assert upload(vit_base("running_mean")).bytes == 10 * 64 * F32 + 11 * I64


class TestTasks:
    def test_a_task_has_its_rounds_the_preparation_and_an_evaluation(self):
        traffic = vit_base("pilora", rounds=30)
        up, down = traffic.task
        assert up.bytes == 30 * upload(traffic).bytes + (10 * ROW + 31 * I64) + 31 * I64
        assert down.bytes == 32 * (79_872 + 160)
        assert traffic.missed.bytes == 0
        without = vit_base("pilora", rounds=30, evaluate=False)
        assert without.task[1].bytes == 31 * (79_872 + 160)
        assert [u.exchange for u in without.up] == ["prepare", "train"]

    def test_finished_tasks_are_fetched_once_and_all_by_who_joins(self):
        """Five old classes in a first small task, then ten."""
        traffic = vit_base("fed_talora", past=15)
        assert part(traffic, "task").task.bytes == 10 * (ROW + F32 + 2 * I64)
        assert part(traffic, "task").missed.bytes == 5 * (ROW + F32 + 2 * I64)

    def test_a_part_of_its_own_for_each_task_is_not_fetched_again_when_the_task_is_over(self):
        """Five old classes in a first small task, ten in a second, then ten in five rounds."""
        task = part(vit_base("plora", past=15), "task")
        assert task.task.bytes == 7 * 10 * (ROW + 2 * I64)  # prepare, 5 rounds, evaluation
        assert task.missed.bytes == 15 * (ROW + 2 * I64)

    def test_what_training_alone_changes_is_fetched_once_a_training_round(self):
        """The LoRA that a task ends with is what the next one begins with, and its teacher."""
        lora = 61_440 * F32
        first, later = (part(vit_base("plora", past=past), "lora") for past in (0, 15))
        assert (first.task.bytes, first.missed.bytes) == (6 * lora, 0)
        assert (later.task.bytes, later.missed.bytes) == (5 * lora, lora)
        unseen = part(vit_base("plora", past=15, evaluate=False), "lora")
        assert (unseen.task.bytes, unseen.missed.bytes) == (5 * lora, 0)

    def test_earlier_tasks_are_as_large_as_this_but_for_the_first(self):
        tasks = TrafficSetting(backbone_by_name("embedded"), classes=10, past=25).tasks
        assert [len(t.classes) for t in tasks] == [5, 10, 10, 10]
        assert [t.index for t in tasks] == [0, 1, 2, 3]
        assert tasks[-1].past == tuple(range(25))
        assert tasks[-1].seen == tuple(range(35))

    def test_options_that_do_not_fit_the_backbone_are_refused(self):
        with pytest.raises(ConfigError, match="block 12 does not exist"):
            vit_base("pilora", {"blocks": [12]})

    def test_a_size_that_nothing_bounds_is_named(self):
        method = load_method("running_mean")
        loose = PayloadSchema((TensorSpec("mean", Kind.PROTOTYPE, ("rows", 4)),))
        method = replace(method, broadcast=lambda _h, _b: {"current": loose})
        with pytest.raises(ConfigError, match="'mean': nothing bounds the size 'rows'"):
            predict(method, method.hparams(), TrafficSetting(backbone_by_name("embedded")))

    def test_sums_are_exact_only_if_all_their_terms_are(self):
        exact, bound = Size({"lora": 2}), Size({"lora": 3, "head": 1}, exact=False)
        assert exact + bound == Size({"lora": 5, "head": 1}, exact=False)
        assert (exact + bound.times(0)).exact
        assert bound.times(1, 2).kinds == {"lora": 2}  # half an element is nothing

    def test_a_method_with_no_exchange_besides_a_fixed_number_of_rounds(self):
        method = load_method("running_mean")
        (train,) = method.exchanges(method.hparams(), backbone_by_name("embedded"))
        once = replace(method, exchanges=lambda _h, _b: (Exchange("train", train.upload, 1),))
        traffic = predict(
            once, method.hparams(), TrafficSetting(backbone_by_name("embedded"), rounds=9)
        )
        assert [u.rounds for u in traffic.up] == [1, 1]
        assert part(traffic, "current").task.bytes == 2 * part(traffic, "current").each.bytes


VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("pilora", {"init": "random", "candidates": "all", "total_classes": 7}),
    ("plora", {"blocks": [0], "gamma_kd": 0}),
    ("fed_talora", {"catch_up": "factors"}),
    ("fed_talora", {"residual": "dense"}),
    ("fed_talora", {"residual": "off", "head_loss": "all"}),
    ("fed_talora", {"freeze_a": True}),
    ("ccvr", {"cov": "full"}),
    ("hgp", {"cov": "full", "pool_sharing": "shared"}),
    ("hgp", {"cov": "diag"}),
    ("hgp", {"head": "quadratic", "own_rank": 3}),
    ("ccvr", {"head": "quadratic", "own_rank": 3}),
    ("analytic", {"features": "linear", "precision": "double", "truncate": 3}),
    ("analytic", {"features": "linear", "pseudo": "margin", "pseudo_margin": 1e-4}),
    ("adapt_once", {"features": "linear", "pseudo": "margin", "pseudo_margin": 1e-4}),
    ("gaussian_head", {"cov": "full"}),
    ("gaussian_head", {"head": "quadratic", "own_rank": 3}),
    ("lorm", {"train": "B", "task_merge": "mean"}),
    ("lorm", {"modules": ["q", "v", "fc2"]}),
]
# A round is one step: how much is sent does not depend on how long somebody trained.
QUICK = {"batch_size": 64, "server_epochs": 1, "generator_steps": 2, "distillation_steps": 2}
CASES = [
    (name, {**own, **{k: v for k, v in QUICK.items() if k in own}, **more})
    for name, more in [*((name, {}) for name in SMALL), *VARIANTS]
    for own in [SMALL[name]]
]
of_each_kind = pytest.mark.parametrize(
    ("name", "options"),
    sampled(CASES, lambda *case: case[0] in OF_EACH_KIND and case in CASES[: len(SMALL)]),
    ids=lambda x: str(x)[:60],
)
TASKS = make_tasks([1, 0], [4, 2], [5, 3])
ROUNDS, CLIENTS = 2, 3


@pytest.fixture(scope="module")
def backbone():
    return toy_backbone()


def federation(name, options, backbone):
    """Everybody has images enough of every class to send all that the method would send."""
    counts = dict.fromkeys(range(6), 12)
    clients = [toy_images(counts, seed) for seed in range(CLIENTS)]
    return KeepingFederation.of(name, clients, backbone, **options)


def open_task(fed, task):
    """Open a task; where unlabelled images count, every client has new ones."""
    fed.open(task)
    if getattr(fed.hparams, "pseudo", "off") != "off":
        counts = dict.fromkeys(task.seen, 12)
        seeds = range(100 * (task.index + 1), 100 * (task.index + 1) + CLIENTS)
        fed.unlabelled = [toy_images(counts, seed) for seed in seeds]


def prediction(fed, task):
    setting = TrafficSetting(
        fed.backbone.info, len(task.classes), len(task.past), clients=CLIENTS, rounds=ROUNDS
    )
    return predict(fed.method, fed.hparams, setting)


@of_each_kind
def test_an_upload_is_as_large_as_predicted(name, options, backbone):
    """Kind by kind, in every exchange, in the first task and in a later one."""
    fed = federation(name, options, backbone)
    for task in TASKS[:2]:
        open_task(fed, task)
        predicted = {u.exchange: u.size for u in prediction(fed, task).up}
        for exchange in fed.exchanges:
            kinds = {spec.name: spec.kind.value for spec in exchange.upload.tensors}
            in_turns = any(s.optional and s.kind is Kind.LORA for s in exchange.upload.tensors)
            sent: list[Counter[str]] = []
            for round_ in range(1 + in_turns):
                sent.append(Counter())
                for tensor, array in fed.upload(exchange.kind, 0, round_, 2).tensors.items():
                    sent[-1][kinds[tensor]] += array.nbytes
            assert +max(sent, key=Counter.total) == predicted[exchange.kind].kinds
            fed.round(exchange.kind)


@pytest.mark.parametrize("name", ["fed_talora", "hgp"])
def test_a_single_class_is_uploaded_as_predicted(name, backbone):
    fed = federation(name, dict(next(o for n, o in CASES if n == name)), backbone)
    (task,) = make_tasks([3])
    fed.open(task)
    assert fed.upload("train", 0).tensor_bytes == upload(prediction(fed, task)).bytes


@dataclass
class Resident:
    """A client that keeps every part that it ever fetched."""

    parts: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def fetch(self, fed) -> Counter[str]:
        """Take what is new; bytes by kind of part."""
        fetched: Counter[str] = Counter()
        for name, payload in fed.parts().items():
            data = pack(payload)
            if self.parts.get(name) != data:
                fetched[name.partition("/")[0]] += payload.tensor_bytes
            self.parts[name], self.sizes[name] = data, payload.tensor_bytes
        return fetched


def steps(fed):
    for exchange in fed.exchanges:
        rounds = exchange.rounds or ROUNDS
        for r in range(rounds):
            yield exchange.kind, r, rounds


def scatter(seed):
    """Move every client's LoRA in all directions: a few steps on toy images leave ranks open."""
    rng = np.random.default_rng(seed)

    def alter(payload):
        moved = {
            n: (a + 0.1 * rng.standard_normal(a.shape)).astype(a.dtype)
            for n, a in payload.tensors.items()
            if n.startswith("lora.")
        }
        return replace(payload, tensors={**payload.tensors, **moved})

    return alter


@of_each_kind
def test_broadcasts_are_fetched_as_often_and_as_large_as_predicted(name, options, backbone):
    """Over three tasks: by a client that is always there, and by one that joins in each task."""
    fed, resident = federation(name, options, backbone), Resident()
    for task in TASKS:
        open_task(fed, task)
        predicted = prediction(fed, task)
        fetched = resident.fetch(fed)
        newcomer = Resident().fetch(fed) - fetched
        for step in steps(fed):
            fed.round(*step, alter=scatter(task.index))
            fetched += resident.fetch(fed)
        for down in predicted.down:
            assert fetched[down.part] == down.task.bytes, down
            assert newcomer[down.part] == down.missed.bytes, down
        assert fetched.total() == predicted.task[1].bytes
        assert newcomer.total() == predicted.missed.bytes


@of_each_kind
def test_parts_change_when_their_cadence_says(name, options, backbone):
    """Only rounds' parts, logs and bases change within a task, and rounds' parts do."""
    fed = federation(name, options, backbone)
    of_rounds = {
        Cadence.ROUND, Cadence.OWN, Cadence.TRAINED, Cadence.COUNTED, Cadence.LOG, Cadence.BASE,
        Cadence.LEARNED, Cadence.FINISHED, Cadence.CLOSED,
    }  # fmt: skip
    never = {Cadence.LOG, Cadence.TASK, Cadence.RUN, Cadence.CLOSED}
    sent: dict[str, bytes] = {}
    for task in TASKS:
        open_task(fed, task)
        before = {n: pack(p) for n, p in fed.parts().items()}
        changed: set[str] = set()
        for step in steps(fed):
            fed.round(*step, alter=scatter(task.index))
            after = {n: pack(p) for n, p in fed.parts().items()}
            names = {n for n in before | after if before.get(n) != after.get(n)}
            changed |= {n.partition("/")[0] for n in names}
            before = after
            own = {n for n in names if cadence_of(fed, n) is Cadence.OWN}
            assert all(n.partition("/")[2] == str(task.index) for n in own)
            if step[0] != "train":
                assert not any(cadence_of(fed, n) is Cadence.TRAINED for n in names)
            for part_name, data in after.items():
                if cadence_of(fed, part_name) in never:
                    assert sent.setdefault(part_name, data) == data
        kinds = {n.partition("/")[0] for n in before}
        assert {k for k in changed if cadence_of(fed, k) not in of_rounds} == set()
        each = {Cadence.ROUND, Cadence.OWN, Cadence.TRAINED, Cadence.COUNTED}
        if all(step[0] != "train" for step in steps(fed)):
            each.remove(Cadence.TRAINED)
        assert {k for k in kinds if cadence_of(fed, k) in each} <= changed


def cadence_of(fed, part_name):
    return fed.method.cadence.get(part_name.partition("/")[0], Cadence.ROUND)


@pytest.mark.parametrize("name", method_names())
def test_cadences_and_bounds_name_what_exists(name, backbone):
    """Under some options of the cases above; a misspelt name would mean nothing."""
    method = load_method(name)
    kinds, symbols, tensors = set(), set(), set()
    bounds = []
    for options in [o for n, o in CASES if n == name] or [{}]:
        hparams = make_hparams(method, options)
        schemas = dict(method.broadcast(hparams, backbone.info))
        kinds |= schemas.keys()
        uploads = [e.upload for e in method.exchanges(hparams, backbone.info)]
        for schema in (*uploads, *schemas.values()):
            tensors |= {t.name for t in schema.tensors if t.optional}
            symbols |= {free for free, _ in schema.at_most}
        bounds += [method.largest(hparams, backbone.info, TASKS[1], k) for k in (1, 3, 500)]
    assert set(method.cadence) <= kinds
    for one in bounds:
        assert set(one.sizes) <= symbols
        assert set(one.without_tensors) <= tensors
        assert set(one.without_parts) <= kinds
    assert Largest() == Largest({}, (), ())
