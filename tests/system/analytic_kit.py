"""Federations of the analytic method: run one to its end, and look at the classifier."""

import os
import signal

import numpy as np

from adapters.frozen_kit import exact_analytic
from fcil_adapters.backbones.backbone import load_backbone
from fcil_adapters.images.decoding import open_source
from fcil_adapters.toolkit.closed_form.lift import make_lift
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_client.data.local_data import LocalData
from fcil_client.data.manifest import scan
from fcil_client.state.home import Home, data_digest
from fcil_protocol.process import control_socket
from fcil_server.aggregation.store import StateStore, states_folder
from fcil_server.reports.results.run_data import collect
from system.kit import open_ledger, settings

WIDTH = 300  # of the random projection
# Features of the two engines are some 1e-6 apart, relative to their length (test_onnx_backbone).
# The ridge solution can pass this on times the condition of G + lambda I; what is measured is
# 5e-6, and torch's own is 1e-6 to 1e-5 away from float64's.
TOLERANCE = 1e-4
# Most clients compute with onnxruntime: it is loaded in a tenth of the time that torch takes.
ENGINE = ("--threads", "1", "--engine", "onnx")


def options(tasks, clients, **more):
    given = {
        "method.name": "analytic",
        "method.projection": WIDTH,
        "method.precision": "double",
        "tasks.classes": tasks,
        "round.min_clients": clients,
        "federation.heartbeat_s": 10.0,  # a stopped process keeps its connection
    }
    return settings(**{k.replace(".", "__"): v for k, v in given.items()}, **more)


def newest_state(federation):
    """Return the state of the newest run."""
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
    store = StateStore(states_folder(federation.federation, run))
    return store.load(store.numbers()[-1])


def outcome(federation, folders, adapted=lambda backbone, _state: backbone, **chosen):
    """Return the classifier of the newest run and that of one machine with all train images.

    ``adapted`` makes of the plain backbone the one whose features were summed; ``chosen`` are the
    run's options of the solution.
    """
    with open_ledger(federation) as ledger:
        data = collect(ledger, ledger.runs.newest().run_id)
    state = newest_state(federation)
    names = [data.class_names[c] for c in state.i64("classes").tolist()]
    backbone = adapted(load_backbone(), state)
    doors = [door(federation, folder, names, backbone) for folder in folders]
    labels = np.concatenate([labels for labels, _ in doors])
    features = np.concatenate([features for _, features in doors])
    h = AnalyticHparams(projection=WIDTH, **chosen)
    phi = make_lift(h, backbone.info.dim, state.i64("seed"))(features)
    _, weight, _ = exact_analytic(h, phi, labels)
    counts = np.bincount(labels, minlength=len(names)).tolist()
    counted = state.f32("total.count")  # also of classes that were forgotten: 0
    assert counted[counted > 0].tolist() == counts, "every train image counts once"
    return state.f32("weight").astype(float), weight, data.headline[0]


def door(federation, folder, names, backbone):
    """Return places in ``names`` and features of the images that a client trains with."""
    (home,) = (federation.directory / "state").rglob(data_digest(folder))
    source = open_source(folder)
    manifest = scan(source, None, Home(home).salt(), threads=1)
    data = LocalData(source, manifest, backbone.info.preprocessing, memory_bytes=1 << 20, threads=1)
    own = data.learner_images({name: i for i, name in enumerate(names)}, 1)
    features = backbone.features(own.take(np.arange(len(own))))
    labels = np.asarray(own.labels)
    data.close()
    return labels, features


def learn(federation, folders, tasks, *more, late=None, env=None, engine=ENGINE):
    """Run a federation of these clients to its end; ``late`` sends when the others have sent.

    ``env`` has by client what is added to its environment.
    """
    federation.serve("--until-done", *more, *options(tasks, len(folders)))
    control_socket.ask(federation.federation, "pause")
    for folder in folders:
        federation.join(folder.name, folder, *engine, env=(env or {}).get(folder.name))
    for _ in folders:
        federation.until("announced", timeout_s=300)
    if late:
        os.kill(federation.clients[late].pid, signal.SIGSTOP)
    control_socket.ask(federation.federation, "resume")
    if late:
        for _ in folders[1:]:
            federation.until("update")
        os.kill(federation.clients[late].pid, signal.SIGCONT)
    assert federation.server.wait(300) == 0, federation.last_words("server")
    for name in list(federation.clients):
        federation.kill_client(name)
    return outcome(federation, folders)
