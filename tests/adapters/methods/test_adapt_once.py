"""adapt_once: what is trained and frozen, which features are summed, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from adapters.frozen_kit import exact_analytic, pooled
from adapters.kit import Federation, client_id, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.backbones.feature_cache import FeatureMemory
from fcil_adapters.backbones.frozen_features import plain_features
from fcil_adapters.backbones.onnx_backbone import load_onnx_backbone
from fcil_adapters.contract import Kind, Payload, Update
from fcil_adapters.contract.half_precision import Forms
from fcil_adapters.contract.registry import load_half, load_method
from fcil_adapters.export.model_file import torch_score
from fcil_adapters.methods.adapt_once.options import AdaptHparams
from fcil_adapters.numerics.update_list import UpdateList
from fcil_adapters.toolkit.closed_form.lift import make_lift
from fcil_adapters.toolkit.closed_form.sums import joined
from fcil_adapters.toolkit.lora import merging
from fcil_adapters.toolkit.lora.tensors import draw_lora, lora_names, lora_of, lora_places
from fcil_protocol.errors import BackboneMismatch, DataError
from fcil_protocol.payloads.payload import pack

TASKS = make_tasks([0, 1], [5], [4, 2])
CLIENTS = [toy_images({0: 6, 1: 2, 5: 4, 2: 5}, 1), toy_images({0: 4, 5: 3}, 2),
           toy_images({1: 4, 4: 5, 2: 3}, 3)]  # fmt: skip
LORA = {"rank": 2, "blocks": [0, 1], "epochs": 1, "batch_size": 4, "augment": "none",
        "lr_lora": 0.5}  # fmt: skip
SEEN = toy_images({0: 2, 1: 2, 2: 2}, 9).pictures


@pytest.fixture
def backbone():
    """One for each test: it keeps what was merged last."""
    return toy_backbone()


def federation(backbone, clients=CLIENTS, name="adapt_once", **kw) -> Federation:
    adapt = {**LORA, "rounds": 2, **kw.pop("adapt", {})}
    return Federation.of(name, clients, backbone, **{"projection": 24, "adapt": adapt, **kw})


def analytic(backbone, clients=CLIENTS, **kw) -> Federation:
    return Federation.of("analytic", clients, backbone, **{"projection": 24, **kw})


def classifier(fed) -> dict[str, bytes]:
    return {n: fed.state.tensors[n].tobytes() for n in ("classes", "weight", "bias")}


def drawn(backbone, h, *, b_too=True):
    """A LoRA whose B is not zero."""
    names = lora_names(lora_places(h.blocks, h.modules))
    lora = draw_lora(names, h.rank, backbone.info, np.random.default_rng(3))
    rng = np.random.default_rng(4)
    return {n: rng.normal(0, 0.1, a.shape).astype(np.float32) if b_too and n.endswith("B") else a
            for n, a in lora.items()}  # fmt: skip


class TestMerging:
    H = AdaptHparams(**{**LORA, "scale": 0.7})

    def test_the_weights_are_those_of_the_definition_in_float64(self, backbone):
        lora = drawn(backbone, self.H)
        merged = merging.merged_weights(backbone, self.H, lora)
        state, d = backbone.module.state_dict(), backbone.info.dim
        assert sorted(merged) == [f"blocks.{b}.{place}.weight" for b in (0, 1)
                                  for place in ("attn.qkv", "mlp.fc1", "mlp.fc2")]  # fmt: skip
        for block in (0, 1):
            for name, module, rows in (
                ("attn.qkv", "q", slice(0, d)), ("attn.qkv", "v", slice(2 * d, 3 * d)),
                ("mlp.fc1", "fc1", slice(None)), ("mlp.fc2", "fc2", slice(None)),
            ):  # fmt: skip
                A, B = (lora[f"lora.{block}.{module}.{m}"].astype(np.float64) for m in "AB")
                W = state[f"blocks.{block}.{name}.weight"].numpy()
                got = merged[f"blocks.{block}.{name}.weight"]
                expected = (W[rows].astype(np.float64) + 0.7 * (B @ A)).astype(np.float32)
                np.testing.assert_array_equal(got[rows], expected)
                if name == "attn.qkv":
                    np.testing.assert_array_equal(got[d : 2 * d], W[d : 2 * d])

    def test_its_features_are_those_of_the_adapter_beside_the_weights(self, backbone):
        from fcil_adapters.backbones.backbone import cls_features
        from fcil_adapters.toolkit.lora.views import training_view

        lora = drawn(backbone, self.H)
        weights = merging.merged_weights(backbone, self.H, lora)
        made = backbone.with_weights(weights, "1" * 64)
        view = training_view(backbone, self.H, lora)
        beside = cls_features(view, backbone.normalise(SEEN)).detach().numpy()
        np.testing.assert_allclose(made.features(SEEN), beside, rtol=1e-4, atol=1e-5)
        assert not any(p.requires_grad for p in made.module.parameters())

    def test_a_b_of_zero_changes_no_bit(self, backbone):
        weights = merging.merged_weights(backbone, self.H, drawn(backbone, self.H, b_too=False))
        for name, array in weights.items():
            np.testing.assert_array_equal(array, backbone.weight(name))
        made = backbone.with_weights(weights, "1" * 64)
        np.testing.assert_array_equal(made.features(SEEN), backbone.features(SEEN))

    def test_the_memory_of_the_plain_backbone_is_never_asked(self, backbone):
        """Its features, those of the merged weights, and those of the next: three things."""

        def through_memory(one):
            return one.memory.of(SEEN, "cls", one.features)

        plain, lora = through_memory(backbone), drawn(backbone, self.H)
        seen = [plain]
        for scale in (0.7, 1.4):
            h = self.H.model_copy(update={"scale": scale})
            weights = merging.merged_weights(backbone, h, lora)
            digest = merging.merged_digest(backbone.info, weights)
            made = merging.merged_backbone(backbone, h, lora, digest)
            assert merging.merged_backbone(backbone, h, lora, digest) is made, "once is enough"
            assert made.info.digest == digest
            np.testing.assert_array_equal(through_memory(made), made.features(SEEN))
            seen.append(through_memory(made))
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert np.abs(seen[one] - seen[other]).max() > 1e-2
        np.testing.assert_array_equal(through_memory(backbone), plain)
        np.testing.assert_array_equal(backbone.features(SEEN), plain)

    def test_an_experiments_store_has_the_features_of_both_weights(self, backbone, monkeypatch):
        class Shelf(dict):
            def get(self, keys):
                return {k: self[k] for k in keys if k in self}

            put = dict.update

        monkeypatch.setattr(backbone.memory, "store", Shelf())
        weights = merging.merged_weights(backbone, self.H, drawn(backbone, self.H))
        made = backbone.with_weights(weights, merging.merged_digest(backbone.info, weights))
        wanted = plain_features(made, SEEN)
        assert np.abs(wanted - plain_features(backbone, SEEN)).max() > 1e-2
        made.memory = FeatureMemory()  # as in another process
        made.memory.store = backbone.memory.store
        monkeypatch.setattr(made, "features", lambda _: pytest.fail("computed again"))
        np.testing.assert_array_equal(plain_features(made, SEEN), wanted)

    def test_other_weights_than_the_servers_are_refused_before_the_first_image(self, backbone):
        with pytest.raises(BackboneMismatch, match="and 222222222222 on the server"):
            merging.merged_backbone(backbone, self.H, drawn(backbone, self.H), "2" * 64)

    def test_weights_that_are_not_finite_are_refused(self, backbone):
        lora = drawn(backbone, self.H)
        lora["lora.1.fc1.B"][0, 0] = np.nan
        with pytest.raises(DataError, match="the LoRA of block 1, fc1, holds NaN or infinity"):
            merging.merged_weights(backbone, self.H, lora)


class TestTraining:
    def test_is_fedavg_loras_to_the_bit(self, backbone):
        fed, plain = federation(backbone), Federation.of("fedavg_lora", CLIENTS, backbone, **LORA)
        for f in (fed, plain):
            f.open(TASKS[0])
            for r in range(2):
                f.round("train", r, 2)
        trained = {n: a.tobytes() for n, a in lora_of(plain.state).items()}
        assert {n: a.tobytes() for n, a in lora_of(fed.state).items()} == trained
        assert any(a.any() for n, a in lora_of(fed.state).items() if n.endswith(".B"))

    def test_ends_with_the_first_task(self, backbone):
        fed = federation(backbone)
        adapters, heads = set(), []
        for task in TASKS:
            fed.open(task)
            assert [e.kind for e in fed.exchanges] == ["train", "finish"][task.index > 0 :]
            for exchange in fed.exchanges:
                heads.append("head" in fed.parts())
                if exchange.kind == "finish":
                    adapters.add(pack(fed.parts()["adapter"]))
                for r in range(exchange.rounds):
                    fed.round(exchange.kind, r, exchange.rounds)
        assert len(adapters) == 1, "frozen for good"
        assert heads == [True, True, False, False], "later clients have no use for it"

    def test_in_half_precision_what_clients_decode_is_what_is_frozen(self, backbone):
        fed = federation(backbone, forms=Forms(frozenset({Kind.LORA, Kind.HEAD})))
        for task in TASKS[:2]:
            fed.run(task)  # every client compares the digest
        for array in lora_of(fed.state).values():
            np.testing.assert_array_equal(array.astype(np.float16).astype(np.float32), array)
        schemas = fed.method.broadcast(fed.hparams, backbone.info)
        assert {t.dtype for t in schemas["adapter"].tensors} == {"F16", "U8"}
        assert {t.dtype for t in schemas["current"].tensors} == {"F32", "I64"}

    def test_a_lora_of_nan_is_never_frozen(self, backbone):
        fed = federation(backbone)
        fed.open(TASKS[0])
        fed.round("train", 0, 2)
        before = pack(fed.state)
        sent = fed.upload("train", 0)
        tensors = {**sent.tensors, "lora.0.q.B": np.full_like(sent.f32("lora.0.q.B"), np.nan)}
        (exchange, _) = fed.exchanges
        faults = exchange.upload.check(Payload(tensors, sent.meta), fed.dims)
        assert faults == ["tensor 'lora.0.q.B' holds NaN or infinity"], "it does not leave a client"
        with pytest.raises(DataError, match="holds NaN or infinity"):
            fed.aggregate("train", UpdateList.of([Update(client_id(0), Payload(tensors))]))
        assert pack(fed.state) == before


class TestSums:
    def test_the_classifier_is_that_of_one_machine_on_the_frozen_features(self, backbone):
        fed = federation(backbone, features="both", precision="double")
        for task in TASKS:
            fed.run(task)
        together = pooled(CLIENTS)
        frozen = backbone.variant
        assert frozen.info.digest == fed.state.tensors["digest"].tobytes().hex()
        lift = make_lift(fed.hparams, backbone.info.dim, fed.state.i64("seed"))
        phi = lift(frozen.features(together.pictures))
        classes, weight, bias = exact_analytic(fed.hparams, phi, together.labels)
        assert fed.state.i64("classes").tolist() == classes.tolist()
        np.testing.assert_allclose(fed.state.f32("weight"), weight, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(fed.state.f32("bias"), bias, rtol=1e-3, atol=1e-3)
        plain = lift(backbone.features(together.pictures))
        assert np.abs(plain - phi).max() > 1e-3, "the LoRA changed the features"

    @pytest.mark.parametrize("options", [{}, {"features": "linear", "group": 2}])
    def test_without_rounds_it_is_analytic_to_the_bit(self, backbone, options):
        fed = federation(backbone, adapt={"rounds": 0}, **options)
        plain = analytic(backbone, **options)
        for task in TASKS:
            fed.open(task)
            plain.open(task)
            assert pack(fed.upload("finish", 0)) == pack(plain.upload("train", 0))
            fed.round("finish")
            plain.round("train")
            assert pack(fed.state) == pack(plain.state)
        assert {n: pack(p) for n, p in fed.parts().items()} == {
            n: pack(p) for n, p in plain.parts().items()
        }

    def test_where_nobody_trained_it_is_analytic_to_the_bit(self, backbone):
        """No client with torch: the rounds of training close without an update."""
        fed, plain = federation(backbone), analytic(backbone)
        for task in TASKS:
            fed.open(task)
            fed.round("finish")
            plain.run(task)
            assert classifier(fed) == classifier(plain)

    def test_a_first_task_of_one_class_leaves_the_backbone_as_it_is(self, backbone):
        fed, plain = federation(backbone), analytic(backbone)
        for task in make_tasks([5], [0, 1]):
            fed.run(task)
            plain.run(task)
            assert not any(a.any() for n, a in lora_of(fed.state).items() if n.endswith(".B"))
            assert classifier(fed) == classifier(plain)

    def test_sums_of_other_features_are_refused(self, backbone):
        fed = federation(backbone)
        fed.open(TASKS[0])
        fed.round("train", 0, 2)
        sent = [fed.upload("finish", k) for k in range(3)]
        foreign = {**sent[1].tensors, "adapter_digest": np.full(32, 0xAB, np.uint8)}
        sent[1] = Payload(foreign, sent[1].meta)
        before = pack(fed.state)
        updates = [Update(client_id(k), payload) for k, payload in enumerate(sent)]
        with pytest.raises(DataError, match="a backbone with digest abababababab, and the frozen"):
            fed.aggregate("finish", UpdateList.of(updates))
        assert pack(fed.state) == before
        honest = fed.aggregate("finish", UpdateList.of([updates[0], updates[2]]))
        assert joined(honest.tensors, "total.count").tolist() == [6.0, 6.0]

    def test_an_export_scores_with_the_merged_weights(self, backbone):
        import torch

        fed = federation(backbone)
        fed.run(TASKS[0])
        predictor = fed.predictor()
        with torch.no_grad():
            scores = torch_score(predictor)(torch.tensor(SEEN)).numpy()
        np.testing.assert_allclose(scores, predictor.logits(SEEN), rtol=1e-3, atol=1e-3)
        plain = replace(predictor, extractor=backbone).logits(SEEN)
        assert np.abs(plain - scores).max() > 1e-2


# A client without torch: it takes no part in training, and sums features and predicts with
# onnxruntime, which is given the merged weights.
CLIENT = """
import sys
sys.modules["torch"] = sys.modules["timm"] = sys.modules["torchvision"] = None
from pathlib import Path
import numpy as np
from fcil_adapters.backbones.onnx_backbone import load_onnx_backbone
from fcil_adapters.contract import Context, State, TaskInfo
from fcil_adapters.contract.registry import load_half, load_method, make_hparams
from fcil_protocol.payloads.payload import pack, unpack

folder = Path(sys.argv[1])
pictures = np.load(folder / "pictures.npy")

class Images:
    labels = np.array([0, 0, 1, 1])
    def __len__(self):
        return 4
    def take(self, index):
        return pictures[index]

method = load_method("adapt_once")
backbone = load_onnx_backbone(device="cpu", threads=1)
hparams = make_hparams(method, {"features": "linear", "adapt": {"rank": 2, "blocks": [0, 5]}})
ctx = Context(kind="finish", task=TaskInfo(0, (0, 1)), round=0, rounds=1, hparams=hparams,
              backbone_info=backbone.info, backbone=backbone)
parts = {p.stem: unpack(p.read_bytes()) for p in folder.glob("*.part")}
before = backbone.features(pictures)
_, sent = load_half(method.learner).run(ctx, State(), parts, Images())
(folder / "sent").write_bytes(pack(sent))
model = load_half(method.model).compose(ctx, parts, backbone)
np.save(folder / "logits.npy", model.logits(pictures))
assert (backbone.features(pictures) == before).all()
print(sys.modules["torch"])
"""


class TestWithoutTorch:
    H = AdaptHparams(rank=2, blocks=(0, 5))

    def test_both_engines_merge_the_same_weights_and_compute_the_same_features(self):
        full, free = load_backbone(), load_onnx_backbone(device="cpu", threads=1)
        images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
        before, lora = free.features(images), drawn(full, self.H)
        weights = merging.merged_weights(full, self.H, lora)
        digest = merging.merged_digest(full.info, weights)
        merged = [merging.merged_backbone(one, self.H, lora, digest) for one in (full, free)]
        assert [one.info.digest for one in merged] == [digest, digest]
        here, there = (one.features(images) for one in merged)
        assert np.abs(here - there).max() < 1e-5 * np.abs(here).max()
        assert np.abs(there - before).max() > 1e-2 * np.abs(here).max()
        np.testing.assert_array_equal(free.features(images), before)

    def test_a_client_sums_and_predicts_as_one_with_torch(self, tmp_path):
        backbone = load_backbone()
        images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
        options = {"features": "linear", "adapt": {"rank": 2, "blocks": [0, 5]}}
        clients = [replace(toy_images({0: 2, 1: 2}), pictures=images)]
        fed = Federation.of("adapt_once", clients, backbone, **options)
        fed.open(make_tasks([0, 1])[0])
        lora = drawn(backbone, self.H)
        weights = merging.merged_weights(backbone, self.H, lora)
        digest = bytes.fromhex(merging.merged_digest(backbone.info, weights))
        named = {**lora, "digest": np.frombuffer(digest, np.uint8)}
        fed.state = replace(fed.state, tensors={**fed.state.tensors, **named})
        sent = fed.upload("finish", 0)
        fed.round("finish")
        np.save(tmp_path / "pictures.npy", images)
        for name, part in fed.parts().items():
            (tmp_path / f"{name}.part").write_bytes(pack(part))
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(tmp_path)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.stdout.strip(), done.stderr) == ("None", "")
        from fcil_protocol.payloads.payload import unpack

        theirs = unpack((tmp_path / "sent").read_bytes())
        assert theirs.tensors["adapter_digest"].tobytes() == digest
        np.testing.assert_allclose(theirs.f32("sum"), sent.f32("sum"), atol=1e-5)
        assert theirs.i64("count").tolist() == [2, 2]
        logits = fed.predictor().logits(images)
        np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), logits, rtol=1e-2, atol=1e-2)


def test_the_halves_are_found_by_name():
    method = load_method("adapt_once")
    assert [vars(load_half(h)) for h in (method.learner, method.aggregator, method.model)] == [
        {}
    ] * 3
