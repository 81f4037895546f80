"""What it costs to open the updates of a round for the worker: spool, decryption, pipe, sums.

The daemon's half (`fcil_server.aggregation.aggregation`) and a real worker process, with sealed
updates in a spool and a method that only averages them (`payload_method`). The rule against
outliers looks at each update before it is averaged, so each is visited twice.

    .venv/bin/python scripts/bench/opening.py [--clients 8] [--megabytes 30] [--repeat 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from processes import children, cpu_s, peak_mb, with_method

from fcil_adapters.contract import Context, TaskInfo, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_protocol.envelopes.envelope import seal, wrap_key
from fcil_protocol.envelopes.header import Core
from fcil_protocol.ids import ClientId, RunId, UpdateId
from fcil_protocol.payloads.payload import Payload, pack
from fcil_protocol.storage.spool import Spool
from fcil_protocol.trust.keys import PrivateKeys
from fcil_server.aggregation.aggregation import Aggregation
from fcil_server.aggregation.staleness import NO_OLDER_STATES
from fcil_server.federation.config import load
from fcil_server.ledger.enums import UpdateStatus
from fcil_server.ledger.rows import UpdateRow

METHOD = Path(__file__).parent / "payload_method"


def fill(spool: Spool, keys: PrivateKeys, clients: int, values: int) -> list[UpdateRow]:
    """Put sealed updates into a spool; return their rows, as of a ledger."""
    rows = []
    for k in range(clients):
        drawn = np.random.default_rng(k).random(values, np.float32)
        payload = Payload({"w0": drawn, "n": np.ones(1, np.int64)})
        core = Core(
            protocol=1, federation="0" * 32, run="r", direction="update", sender=f"{k:026d}",
            sender_key=keys.public.fingerprint, recipient="server", method="payload", schema="",
            task=0, round=0, kind="train", base=0,
        )  # fmt: skip
        sealed, key = seal(pack(payload), core, keys)
        wrap = wrap_key(key, sealed.header, keys.public)
        update, size = UpdateId(sealed.parsed.update_id), len(sealed.body)
        spool.append(update, sealed.stored(wrap).to_bytes())
        row = UpdateRow(
            run=RunId("r"), client=ClientId(f"{k:026d}"), task=0, kind="train", round=0,
            update_id=update, accepted_at=0.0, samples=1, tensor_bytes=size, sealed_bytes=size,
            status=UpdateStatus.ACCEPTED, reason="", train_loss=None, train_accuracy=None,
        )  # fmt: skip
        rows.append(row)
    spool.sync()
    return rows


async def measure(args: argparse.Namespace, folder: Path) -> None:
    """Aggregate the same updates again and again; print what it took."""
    method = registry.load_method("payload")
    options = {"kilobytes": args.megabytes * 1000}
    hparams = registry.make_hparams(method, options)
    keys, spool = PrivateKeys.generate(), Spool(folder / "spool")
    rows = fill(spool, keys, args.clients, hparams.each)
    aggregation = Aggregation(
        method, hparams, load(None, ["run.threads=1"]), log=folder / "worker.log"
    )
    aggregation.use(NO_BACKBONE, keys, spool)
    ctx = Context(
        kind="train", task=TaskInfo(0, (0,), ()), round=0, rounds=1, hparams=hparams,
        backbone_info=NO_BACKBONE, seed=(1,),
    )  # fmt: skip
    state = await aggregation.init(ctx)
    seconds, cpu, worker_cpu = [], [], []
    for _ in range(args.repeat + 1):
        (worker,) = children(os.getpid())
        began = time.perf_counter(), cpu_s(os.getpid()), cpu_s(worker)
        combined = await aggregation.aggregate(ctx, state, rows, NO_OLDER_STATES)
        assert combined.state is not None
        assert not combined.excluded
        seconds.append(time.perf_counter() - began[0])
        cpu.append(cpu_s(os.getpid()) - began[1])
        worker_cpu.append(cpu_s(worker) - began[2])
    middle = [f"{statistics.median(x[1:]):.2f}" for x in (seconds, cpu, worker_cpu)]  # 0 warms up
    size = f"{args.clients} x {args.megabytes:g} MB"
    print(f"| {size} | {' | '.join(middle)} | {peak_mb(worker):.0f} |")
    await aggregation.close()
    spool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    sys.path.insert(0, str(METHOD))
    with_method(METHOD)
    with tempfile.TemporaryDirectory(prefix="fcil-opening-") as folder:
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
