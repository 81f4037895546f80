"""The work of `flower_app` behind masks: Flower's own SecAgg+, as its workflow and its mod.

Every client weighs 1. All are neighbours, and two thirds of the shares open a secret. What else
the workflow can be told is left as it is, but for the largest weight.
"""

import time

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import arrayrecord_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

server = ServerApp()


def _draw(config, seed):
    rng = np.random.default_rng(seed)
    count, each = int(config["tensors"]), round(config["kilobytes"] * 250 / config["tensors"])
    return [rng.random(each, dtype=np.float32) for _ in range(count)]


class _Client(NumPyClient):
    def __init__(self, node_id: int) -> None:
        self.node_id = node_id

    def fit(self, parameters, config):
        """Answer with other numbers in every round."""
        del parameters
        return _draw(config, (int(config["round"]), self.node_id % 2**32)), 1, {}


client = ClientApp(
    client_fn=lambda context: _Client(context.node_id).to_client(), mods=[secaggplus_mod]
)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    clients, rounds = int(config["clients"]), int(config["rounds"])
    order = {"kilobytes": config["kilobytes"], "tensors": int(config["tensors"])}
    while len(ids := list(grid.get_node_ids())) < clients:
        time.sleep(0.2)
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        on_fit_config_fn=lambda number: {"round": number, **order},
        initial_parameters=ndarrays_to_parameters(_draw(config, 0)),
    )
    secure = SecAggPlusWorkflow(1.0, 2 / 3, max_weight=float(config["max-weight"]))
    done = []

    def fit(grid: Grid, context: LegacyContext) -> None:
        began = time.monotonic()
        secure(grid, context)
        seconds = time.monotonic() - began
        now = time.time()
        done.append(seconds)
        if len(done) == rounds:
            record = context.state.array_records["parameters"]
            found = parameters_to_ndarrays(arrayrecord_to_parameters(record, keep_input=True))
            drawn = [_draw(config, (rounds, i % 2**32)) for i in ids]
            true = [np.mean(same, axis=0, dtype=np.float64) for same in zip(*drawn, strict=True)]
            error = max(float(np.abs(a - b).max()) for a, b in zip(found, true, strict=True))
            print(f"OFF {error:.3e}", flush=True)
        print(f"TOOK {seconds:.4f} {now:.3f}", flush=True)

    legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), strategy)
    DefaultWorkflow(fit_workflow=fit)(grid, legacy)
