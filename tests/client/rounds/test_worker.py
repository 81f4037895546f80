"""The client's worker scans, learns and evaluates, each call with all that it needs."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adapters.worker_kit import Direct, context, fields_of, fill
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.backbones.probes import compare_probes
from fcil_adapters.contract import registry
from fcil_adapters.contract.averaging import Averaging
from fcil_adapters.contract.backbone_info import NO_BACKBONE, backbone_from_fields
from fcil_adapters.contract.registry import find_exchange, load_method
from fcil_adapters.worker.feature_folder import VARIABLE, FeatureFolder, counted, environment
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.loop import Call, context_fields, context_from
from fcil_adapters.worker.models import LoadedModels
from fcil_client.rounds.worker import ClientWorker
from fcil_protocol.errors import BackboneMismatch, ConfigError, DataError, WireError, WorkerError
from fcil_protocol.payloads.builtin import EVALUATE_SCHEMA
from fcil_protocol.payloads.payload import Payload, pack, unpack

MEAN = "running_mean"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    for cls, brightness in (("dark", 40), ("light", 200), ("other", 120)):
        seed = brightness * 1000
        fill(root, "train", cls, range(seed, seed + 8), brightness)
        fill(root, "test", cls, range(seed + 50, seed + 53), brightness)
    return root


def data_fields(folder, **more):
    cache = folder.parent / "cache"
    cache.mkdir(exist_ok=True)
    fields = {"data": str(folder), "cache": str(cache), "salt": b"s" * 16}
    return {**fields, "memory_bytes": 1 << 20, "min_count": 1, **more}


def run_fields(folder, ctx, classes, parts=(), method=MEAN):
    return fields_of(method, ctx, classes=classes, parts=list(parts), **data_fields(folder))


def means(classes, values, side=8):
    """Return a running_mean part that says: these classes are this bright."""
    mean = np.repeat(np.float32(values)[:, None] / 255, side * side, axis=1)
    count = np.ones(len(classes), np.int64)
    return Payload({"mean": mean, "count": count, "classes": np.array(classes, np.int64)})


@pytest.mark.parametrize(
    ("returned", "named"),
    [(None, "NoneType"), (Payload(), "Payload"), ((Payload(), {}), r"\(Payload, dict\)")],
)
def test_a_learner_that_returns_no_pair_is_named(folder, monkeypatch, returned, named):
    careless = SimpleNamespace(run=lambda *_: returned)
    monkeypatch.setattr(registry, "load_half", lambda _path: careless)
    fields = run_fields(folder, context(MEAN), {"dark": 0, "light": 1})
    words = rf"^the learner of running_mean returned {named}; run must return \(State, Payload\)"
    with pytest.raises(WorkerError, match=words):
        Direct(ClientWorker())("run", fields, [Payload()])


def test_a_scan_counts_by_side_and_tells_what_changed(folder):
    worker = Direct(ClientWorker())
    first, _ = worker("scan", data_fields(folder))
    assert first["counts"]["test"] == {"dark": 3, "light": 3, "other": 3}
    in_all = {
        c: first["counts"]["train"][c] + first["counts"]["select"].get(c, 0)
        for c in ("dark", "light")
    }
    assert in_all == {"dark": 8, "light": 8}
    assert (first["changes"], first["faults"]) == ([], [])
    fill(folder, "train", "new", [9])
    (folder / "train/dark/broken.png").write_bytes(b"")
    second, _ = worker("scan", data_fields(folder))
    assert second["changes"] == ["new class 'new': 1 image"]
    assert len(second["faults"]) == 1
    assert second["digest"] != first["digest"]
    assert worker.sent[0] == {"progress": {"done": 1, "total": 33, "loss": None}}
    third, _ = Direct(ClientWorker())("scan", data_fields(folder))
    assert (third["digest"], third["changes"]) == (second["digest"], [])
    for side in ("train", "test"):
        (folder / side / "other").rename(folder / side / "another")
    (said,) = worker("scan", data_fields(folder))[0]["notes"]
    assert said.startswith("the images of class 'other' are in class 'another' now: ")
    assert worker("scan", data_fields(folder))[0]["notes"] == []


def test_the_learner_gets_exactly_the_train_images_of_the_named_classes(folder):
    worker = Direct(ClientWorker())
    ctx = context(MEAN, classes=(4, 7))
    counts = worker("scan", data_fields(folder))[0]["counts"]["train"]
    fields = run_fields(folder, ctx, {"light": 4, "dark": 7})
    reply, (state, upload) = worker("run", fields, [Payload()])
    assert upload.i64("count").tolist() == [counts["light"], counts["dark"]]
    assert reply == {"images": counts["light"] + counts["dark"], "faults": []}
    assert upload.f32("mean")[0].mean() > 0.6 > 0.3 > upload.f32("mean")[1].mean()
    assert state == Payload()
    exchange = find_exchange(load_method(MEAN), ctx.hparams, NO_BACKBONE, "train")
    dims = load_method(MEAN).dims(ctx.hparams, NO_BACKBONE, ctx.task)
    assert exchange.upload.check(upload, dims) == []


def test_a_worker_started_anew_gives_the_same_bytes_without_a_scan_of_its_own(folder):
    fields = run_fields(folder, context(MEAN), {"light": 0, "dark": 1})
    old = Direct(ClientWorker())
    old("scan", data_fields(folder))
    one = old("run", fields, [Payload()])[1]
    other = Direct(ClientWorker())("run", fields, [Payload()])[1]
    assert [pack(p) for p in one] == [pack(p) for p in other]


def test_new_images_reach_the_learner_after_the_next_scan(folder):
    worker = Direct(ClientWorker())
    fields = run_fields(folder, context(MEAN), {"light": 0, "dark": 1})
    before = worker("run", fields, [Payload()])[0]["images"]
    fill(folder, "train", "light", range(9000, 9020), 200)
    assert worker("run", fields, [Payload()])[0]["images"] == before
    worker("scan", data_fields(folder))
    assert worker("run", fields, [Payload()])[0]["images"] > before


def test_an_image_that_vanished_since_the_scan_is_told(folder):
    worker = Direct(ClientWorker())
    worker("scan", data_fields(folder))
    for path in (folder / "test/dark").iterdir():
        path.unlink()
    ctx = context(MEAN, "evaluate")
    fields = run_fields(folder, ctx, {"light": 0, "dark": 1}, ["current"])
    reply, _ = worker("evaluate", fields, [means([0, 1], [200, 40])])
    assert reply["images"] == 3
    assert len(reply["faults"]) == 3


def test_evaluation_counts_by_class_in_the_form_that_travels(folder):
    ctx = context(MEAN, "evaluate", classes=(2,), past=(0, 1))
    fields = run_fields(folder, ctx, {"light": 0, "dark": 1, "other": 2}, ["task/0", "current"])
    parts = [means([0, 1], [200, 40]), means([2], [255])]
    reply, (counts,) = Direct(ClientWorker())("evaluate", fields, parts)
    assert EVALUATE_SCHEMA.check(counts, {"seen": 3}) == []
    assert counts.i64("classes").tolist() == [0, 1, 2]
    assert counts.i64("correct").tolist() == [3, 3, 0]
    assert counts.i64("total").tolist() == [3, 3, 3]
    assert counts.i64("n").tolist() == [9]
    assert reply == {"images": 9, "faults": []}


def test_a_class_of_an_earlier_task_cannot_be_opened_for_the_learner(folder):
    fields = run_fields(folder, context(MEAN, classes=(2, 3), past=(0, 1)), {"light": 2, "dark": 0})
    with pytest.raises(WireError, match=r"class ids \[0\] do not belong"):
        Direct(ClientWorker())("run", fields, [Payload()])


def test_calls_that_do_not_fit_together_are_named(folder):
    worker = Direct(ClientWorker())
    ctx = context(MEAN)
    fields = run_fields(folder, ctx, {"light": 0}, ["current"])
    with pytest.raises(WireError, match="1 parts are named, 0 payloads"):
        worker("run", fields, [Payload()])
    with pytest.raises(WireError, match="needs the client's state"):
        worker("run", {**fields, "parts": []}, [])
    with pytest.raises(ConfigError, match="no installed package offers"):
        worker("run", {**fields, "method": "nothing"}, [Payload()])
    broken = {**fields["context"], "hparams": {"side": -1}}
    with pytest.raises(WireError, match="context for the worker is malformed"):
        worker("run", {**fields, "context": broken}, [Payload()])
    with pytest.raises(DataError, match="no folder or file"):
        worker("scan", data_fields(folder, data=str(folder / "nowhere")))


def test_a_context_comes_through_its_fields_unchanged():
    ctx = context(
        MEAN, "prepare", (5, 6), (1, 2, 3), {"side": 4}, micro_batch=7, max_weight_share=0.5,
        averaging=Averaging("clip", trim=0.1, clip=3.0),
    )  # fmt: skip
    fields = context_fields(ctx)
    assert context_from(fields, load_method(MEAN)) == ctx
    del fields["masked_run"]  # as in the model of a client that was upgraded
    assert context_from(fields, load_method(MEAN)) == ctx


def test_a_backbone_with_another_digest_than_the_runs_is_refused():
    engine = LoadedModels()
    engine._meant = ("torch", "embedded", None, "cpu", None)
    other = replace(NO_BACKBONE, digest="1" * 64)
    engine._loaded = SimpleNamespace(info=other, device="cpu", choose_precision=str)
    fields = fields_of("pilora", context("pilora"))
    with pytest.raises(BackboneMismatch, match="has digest 1{12}, the run's 'none' has 0{12}"):
        engine.prepare(Call(fields, [], None))


def test_a_method_without_backbone_keeps_torch_out_of_the_worker(folder):
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'timm'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from fcil_client.rounds.worker import ClientWorker\n"
        "from adapters.worker_kit import Direct, context, fields_of\n"
        "from fcil_protocol.payloads.payload import Payload\n"
        f"data = {data_fields(folder)!r}\n"
        "worker = Direct(ClientWorker())\n"
        "fields = fields_of('running_mean', context('running_mean'), classes={'dark': 1}, parts=[], **data)\n"
        "print(worker('run', fields, [Payload()])[0]['images'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_a_second_round_loads_decodes_and_queries_nothing_anew(folder, monkeypatch):
    """HGP, round, evaluation, round, evaluation, in one worker."""
    from fcil_adapters.backbones import backbone
    from fcil_adapters.images import cache as image_store
    from fcil_adapters.toolkit.prompts import prefix as prompts
    from fcil_server.aggregation.worker import ServerWorker

    calls = []
    for module, name in ((backbone, "load_backbone"), (image_store, "decode"),
                         (prompts, "_queries")):  # fmt: skip
        original = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, n=name, f=original: (calls.append(n), f(*a))[1]
        )
    server = Direct(ServerWorker())
    described, _ = server("backbone", {"name": "embedded", "weights": None, "device": "cpu"})
    options = {"preset": "short", "epochs": 1}
    shared = {"options": options, "info": backbone_from_fields(described["info"])}
    ctx = context("hgp", **shared)
    _, (state,) = server("init", fields_of("hgp", ctx))
    _, (state,) = server("open_task", fields_of("hgp", ctx), [state])
    reply, parts = server("broadcast", fields_of("hgp", ctx), [state])
    worker = Direct(ClientWorker())
    calls.clear()

    def visit(kind):
        these = context("hgp", kind, **shared)
        fields = run_fields(folder, these, {"light": 0, "dark": 1}, reply["parts"], "hgp")
        fields["memory_bytes"] = 10 << 20
        if kind == "evaluate":
            worker("evaluate", fields, parts)
        else:
            answer, (_, upload) = worker("run", fields, [Payload(), *parts])
            images.append(answer["images"])
            uploads.append(pack(upload))
        found = Counter(calls)
        calls.clear()
        return found

    images, uploads = [], []
    first = visit("train")
    assert first["load_backbone"] == 1
    assert first["decode"] == images[0]
    assert first["_queries"] > 0
    assert visit("evaluate")["decode"] == 6
    assert visit("train") == visit("evaluate") == {}
    assert uploads[0] == uploads[1]


def test_a_worker_shares_frozen_features_only_if_the_environment_names_a_folder(
    folder, tmp_path, monkeypatch
):
    shared = FeatureFolder(tmp_path / "features", 1 << 30, tmp_path / "counts")
    ctx = context("fedncm", info=load_backbone().info)
    fields = run_fields(folder, ctx, {"light": 0, "dark": 1}, method="fedncm")

    def upload():
        return pack(Direct(ClientWorker())("run", fields, [Payload()])[1][1])

    bare = upload()
    assert not shared.folder.exists()
    monkeypatch.setenv(VARIABLE, environment(shared)[VARIABLE])
    assert upload() == upload() == bare
    counts = counted(shared.counts)
    assert counts.read == counts.computed > 0
    monkeypatch.setenv(VARIABLE, "")
    assert upload() == bare
    assert counted(shared.counts) == counts
    monkeypatch.setenv(VARIABLE, "/some/folder")
    with pytest.raises(ConfigError, match="FCIL_FEATURE_CACHE is '/some/folder'"):
        upload()


@pytest.mark.full
def test_a_real_process_loads_the_embedded_backbone_learns_and_evaluates(folder, tmp_path):
    """PILoRA, end to end through `python -m fcil_client.rounds.worker`, with a server's broadcast."""
    from fcil_server.aggregation.worker import ServerWorker

    options = {"preset": "short", "epochs": 1}
    server = Direct(ServerWorker())
    described, (probe,) = server("backbone", {"name": "embedded", "weights": None, "device": "cpu"})
    shared = {"options": options, "info": backbone_from_fields(described["info"])}
    ctx = context("pilora", "prepare", **shared)
    _, (state,) = server("init", fields_of("pilora", ctx))
    _, (state,) = server("open_task", fields_of("pilora", ctx), [state])
    reply, parts = server("broadcast", fields_of("pilora", ctx), [state])

    async def go():
        host = WorkerHost(
            "fcil_client.rounds.worker", name="client", threads=1, log=tmp_path / "worker.log"
        )
        seen = []
        try:
            backbone = await host.call("backbone", fields_of("pilora", ctx)["backbone"])
            results = {}
            for kind in ("prepare", "train", "evaluate"):
                these = context("pilora", kind, micro_batch=4, **shared)
                fields = run_fields(
                    folder, these, {"light": 0, "dark": 1}, reply["parts"], "pilora"
                )
                given = [*parts] if kind == "evaluate" else [Payload(), *parts]
                op = "evaluate" if kind == "evaluate" else "run"
                results[kind] = await host.call(op, fields, given, on_progress=seen.append)
            return backbone, results, seen
        finally:
            await host.stop()

    (described_there, (probe_there,)), results, seen = asyncio.run(go())
    assert described_there["info"] == described["info"]
    assert described_there["device"] == "cpu"
    assert "1 thread," in described_there["description"]
    assert compare_probes(unpack(probe_there).f32("probe"), probe.f32("probe")) < 1e-5
    method, hparams = load_method("pilora"), ctx.hparams
    for kind in ("prepare", "train"):
        upload = unpack(results[kind][1][1])
        exchange = find_exchange(method, hparams, shared["info"], kind)
        assert exchange.upload.check(upload, method.dims(hparams, shared["info"], ctx.task)) == []
        assert exchange.check(upload, ctx.task) == []
    assert seen[-1].done == seen[-1].total
    assert unpack(results["evaluate"][1][0]).i64("n").tolist() == [6]
