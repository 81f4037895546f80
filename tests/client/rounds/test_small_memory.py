"""A round on a machine with little memory ends in the same update as on a large one."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from adapters.worker_kit import Direct, context, fields_of, fill
from fcil_adapters.contract.backbone_info import backbone_from_fields
from fcil_adapters.worker import host as worker_host
from fcil_adapters.worker.host import WorkerHost
from fcil_adapters.worker.retry import Effort, batch_of, persist
from fcil_client.rounds.worker import ClientWorker
from fcil_protocol.errors import ConfigError
from fcil_protocol.payloads.payload import Payload, unpack
from fcil_server.aggregation.worker import ServerWorker

HERE = str(Path(__file__).parents[1])
OPTIONS = {"preset": "short", "epochs": 1, "batch_size": 16}


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    """Return the fields and payloads of a PILoRA round, and its batch."""
    root = tmp_path_factory.mktemp("small")
    for cls, brightness in (("dark", 40), ("light", 200)):
        fill(root / "data", "train", cls, range(brightness, brightness + 12), brightness)
        fill(root / "data", "test", cls, range(brightness + 50, brightness + 55), brightness)
    server = Direct(ServerWorker())
    described, _ = server("backbone", {"name": "embedded", "weights": None, "device": "cpu"})
    shared = {"options": OPTIONS, "info": backbone_from_fields(described["info"])}
    ctx = context("pilora", "prepare", **shared)
    _, (state,) = server("init", fields_of("pilora", ctx))
    _, (state,) = server("open_task", fields_of("pilora", ctx), [state])
    reply, parts = server("broadcast", fields_of("pilora", ctx), [state])
    (root / "cache").mkdir()
    data = {
        "data": str(root / "data"), "cache": str(root / "cache"), "salt": b"s" * 16,
        "memory_bytes": 1 << 20, "min_count": 1, "classes": {"light": 0, "dark": 1},
        "parts": reply["parts"],
    }  # fmt: skip
    fields = fields_of("pilora", context("pilora", "train", **shared), **data)
    return fields, [Payload(), *parts], batch_of(ctx.hparams)


def learn(order, sight, *, most, effort=None):
    """Return the upload, what was said, and the images in each pass."""
    fields, given, batch = order
    said = []
    sight.write_text("")
    env = {"PYTHONPATH": HERE, "MOST": str(most), "SIGHT": str(sight)}

    async def go():
        host = WorkerHost(
            "starving_worker", name="client", env=env, threads=1, log=Path(os.devnull), stall_s=120
        )
        try:
            return await persist(
                host, effort or Effort(), "run", fields, given, batch=batch, notify=said.append
            )
        finally:
            await host.stop()

    _, answer = asyncio.run(go())
    return unpack(answer[-1]), said, [int(line) for line in sight.read_text().split()]


def assert_alike(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in one.tensors.items():
        np.testing.assert_allclose(array, other.tensors[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.full
def test_a_lack_of_memory_in_training_changes_the_passes_and_not_the_update(
    order, tmp_path, monkeypatch
):
    kills = iter(range(100))
    monkeypatch.setattr(worker_host, "oom_kills", lambda: next(kills))
    sight = tmp_path / "sight"
    fields, given, batch = order
    assert batch == 16
    _, (_, large) = Direct(ClientWorker())("run", fields, given)  # without any limit
    effort = Effort()
    small, said, passes = learn(order, sight, most=8, effort=effort)
    assert effort.fits == {"train": 8}
    assert len(said) == 1
    assert "kernel killed the client worker: the machine ran out of memory" in said[0]
    assert passes.count(8) > 1
    assert_alike(large, small)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux only")
@pytest.mark.full
def test_a_bound_below_what_torch_takes_is_told_before_any_weights_are_loaded():
    async def go():
        host = WorkerHost(
            "fcil_client.rounds.worker", name="client", threads=1, memory_bytes=300_000_000
        )
        try:
            await persist(host, Effort(), "backbone", fields_of_backbone())
        finally:
            await host.stop()

    with pytest.raises(ConfigError, match="max-memory is 300 MB, and the loaded data need"):
        asyncio.run(go())


def fields_of_backbone():
    return {"name": "embedded", "weights": None, "device": "cpu", "engine": "torch"}
