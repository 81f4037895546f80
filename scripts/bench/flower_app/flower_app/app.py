"""The work of `payload_method` as a Flower app: random tensors up, their average down.

Lines `TOOK <seconds> <time>` in the server app's log are what `rounds.py` reads, and the line
`OFF <largest>`, the last average against that in float64, what `masks_flower.py` reads too.
"""

import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


def _draw(config, seed):
    rng = np.random.default_rng(seed)
    count, each = int(config["tensors"]), round(config["kilobytes"] * 250 / config["tensors"])
    return [rng.random(each, dtype=np.float32) for _ in range(count)]


@client.train()
def train(message: Message, context: Context) -> Message:
    """Answer with other numbers in every round."""
    config = message.content["config"]
    drawn = _draw(config, (int(config["round"]), context.node_id % 2**32))
    return Message(RecordDict({"weights": ArrayRecord(drawn)}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    while len(ids := list(grid.get_node_ids())) < int(config["clients"]):
        time.sleep(0.2)
    weights = _draw(config, 0)
    rounds = int(config["rounds"])
    for number in range(rounds):
        began = time.monotonic()
        order = {"round": number, "kilobytes": config["kilobytes"], "tensors": config["tensors"]}
        content = RecordDict({"weights": ArrayRecord(weights), "config": ConfigRecord(order)})
        messages = [Message(content, dst_node_id=i, message_type="train") for i in ids]
        answers = [
            m.content["weights"].to_numpy_ndarrays() for m in grid.send_and_receive(messages)
        ]
        weights = [np.mean(same, axis=0, dtype=np.float32) for same in zip(*answers, strict=True)]
        seconds, now = time.monotonic() - began, time.time()
        if number == rounds - 1:
            true = [np.mean(same, axis=0, dtype=np.float64) for same in zip(*answers, strict=True)]
            error = max(float(np.abs(a - b).max()) for a, b in zip(weights, true, strict=True))
            print(f"OFF {error:.3e}", flush=True)
        print(f"TOOK {seconds:.4f} {now:.3f}", flush=True)
