"""Masked rounds as processes: the run learns what it learns without masks, from sums alone."""

import signal

import numpy as np
import pytest

from fcil_protocol.errors import LinkError
from fcil_protocol.process import control_socket
from fcil_server.aggregation.store import StateStore
from fcil_server.lab.local.federation import LocalFederation
from system.kit import open_ledger, settings, signal_workers, write_client
from system.test_relay import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

CLIENTS = "abc"


def masked(secure="masks", **extra):
    """Settings of either kind of run; masks cap no weight, and the sides of images are drawn."""
    given = {
        "trust__max_weight_share": 1.0,
        "method__name": "fedncm", "tasks__classes": [["0", "1"], ["2"]],
        "round__min_clients": 3, "round__settle_s": 0.2, "privacy__secure": secure,
    }  # fmt: skip
    return settings(**given | extra)


def join_all(federation, tmp_path, names=CLIENTS):
    for k, name in enumerate(names):
        folder = tmp_path / name
        if not folder.exists():
            write_client(folder, (0, 1, 2), per_class=6, offset=6 * k)
        federation.join(name, folder, "--threads", "1")


def final_state(federation):
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest().run_id
        newest = ledger.states.newest(run)
        states = StateStore(federation.federation / "runs" / run / "states")
        return states.load(newest.state), ledger.rounds.all(run)


def run_once(federation, tmp_path, *arguments, **extra):
    """Run to the end; clients of an earlier run come back, with the same images."""
    federation.serve("--until-done", *arguments, *masked(**extra))
    if not federation.clients:
        join_all(federation, tmp_path)
    assert federation.server.wait(300) == 0, federation.last_words("server")
    return final_state(federation)


@pytest.mark.full
@pytest.mark.parametrize("method", ["running_mean", "fedncm"])
def test_a_run_of_sums_learns_what_it_learns_of_single_updates(tmp_path, method):
    options = {"method__name": method}
    with LocalFederation(tmp_path) as federation:
        plain, _ = run_once(federation, tmp_path, secure="off", **options)
        hidden, rounds = run_once(federation, tmp_path, "--new-run", **options)
    assert [r.kind for r in rounds if r.task == 0] == [
        "mask_keys", "mask_shares", "train", "mask_vote", "unmask", "evaluate"
    ]  # fmt: skip
    same(hidden, plain)


def same(one, other):
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in other.tensors.items():
        assert np.allclose(one.tensors[name], array, rtol=1e-5, atol=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize("method", ["analytic", "fedavg_lora", "l2p"])
def test_methods_that_add_up_and_that_train_learn_the_same_behind_masks(tmp_path, method):
    options = {"method__name": method, "tasks__classes": [["0", "1"]]}
    if method == "analytic":
        options["method__projection"] = 64
    if method != "analytic":
        options |= {"method__preset": "short", "round__rounds_per_task": 2}
    with LocalFederation(tmp_path) as federation:
        plain, _ = run_once(federation, tmp_path, secure="off", **options)
        hidden, _ = run_once(federation, tmp_path, "--new-run", **options)
    if method == "analytic":  # its solution is as uncertain as its sums, times a condition number
        assert np.allclose(hidden.tensors["total.sum"], plain.tensors["total.sum"], rtol=1e-5)
        return
    for name, array in plain.tensors.items():
        assert np.allclose(hidden.tensors[name], array, rtol=1e-2, atol=1e-3), name


@pytest.mark.full
def test_the_server_is_killed_in_each_round_of_a_masked_one(tmp_path):
    """Nothing is only in memory: the same rounds go on, and lead to the same state."""
    one_task = {"tasks__classes": [["0", "1"]], "method__name": "running_mean"}
    with LocalFederation(tmp_path) as federation:
        plain, _ = run_once(federation, tmp_path, secure="off", **one_task)
        federation.serve("--until-done", "--new-run", *masked(**one_task))
        for kind in ("mask_keys", "mask_shares", "train", "mask_vote", "unmask"):
            federation.until("round_opened", text=kind)
            federation.kill_server()
            federation.serve("--until-done", *masked(**one_task))
        assert federation.server.wait(300) == 0, federation.last_words("server")
        hidden, rounds = final_state(federation)
    assert [r.kind for r in rounds][:5] == [
        "mask_keys", "mask_shares", "train", "mask_vote", "unmask"
    ]  # fmt: skip
    same(hidden, plain)


@pytest.mark.full
def test_a_client_is_killed_in_each_round_of_a_masked_one_and_comes_back(tmp_path):
    one_task = {"tasks__classes": [["0", "1"]], "method__name": "running_mean"}
    with LocalFederation(tmp_path) as federation:
        plain, _ = run_once(federation, tmp_path, secure="off", **one_task)
        federation.serve("--until-done", "--new-run", *masked(round__grace_s=60.0, **one_task))
        for kind in ("mask_keys", "mask_shares", "train", "mask_vote", "unmask"):
            federation.until("round_opened", text=kind)
            federation.kill_client("b")
            federation.join("b", tmp_path / "b", "--threads", "1")
        assert federation.server.wait(300) == 0, federation.last_words("server")
        hidden, _ = final_state(federation)
        secrets = list(federation.directory.rglob("masks.json"))
    assert len(secrets) == 3
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in secrets)
    same(hidden, plain)


@pytest.mark.full
def test_a_client_that_is_gone_for_good_after_its_shares_is_not_in_the_sum(tmp_path):
    """Its masks are removed by the shares of its key; six of seven hold enough of them."""
    names = [f"lab-{k}" for k in range(6)]
    for k, name in enumerate(names):
        write_client(tmp_path / "lab" / name, (0, 1), per_class=4, offset=4 * k)
    given = {"tasks__classes": [["0", "1"]], "method__name": "running_mean",
             "round__min_clients": 7, "run__evaluate": False}  # fmt: skip
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve("--until-done", *masked(**given))
        control_socket.ask(federation.federation, "pause")
        write_client(tmp_path / "gone", (0, 1), per_class=4, offset=30)
        federation.join("gone", tmp_path / "gone", "--threads", "1")
        federation.until("announced", text=":gone")
        signal_workers(federation, "gone", signal.SIGSTOP)  # keys and shares need no worker
        federation.swarm("lab", tmp_path / "lab", None, "--threads", "1")
        control_socket.ask(federation.federation, "resume")
        federation.until("round_opened", text="train")
        federation.kill_client("gone")
        assert federation.server.wait(300) == 0, federation.last_words("server")
        state, rounds = final_state(federation)
        with open_ledger(federation) as ledger:
            train = next(r for r in rounds if r.kind == "train")
            counted = ledger.updates.of_round(train.key)
    assert rounds[-1].kind == "unmask"
    assert state.tensors["task.0.count"].sum() > 0
    assert not any(name.startswith("masks.") for name in state.tensors)
    assert len(counted) == 6


@pytest.mark.full
def test_a_relay_is_killed_in_rounds_of_a_masked_one_and_no_sum_is_missing(tmp_path):
    """Two clients are behind it, the third is not; it comes back while the others wait."""
    one_task = {"tasks__classes": [["0", "1"]], "method__name": "running_mean"}
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *masked(secure="off", **one_task))
        site = Site(federation)
        for k, name in enumerate(CLIENTS):
            folder = write_client(tmp_path / name, (0, 1), per_class=6, offset=6 * k)
            (federation if name == "c" else site).join(name, folder)
        assert federation.server.wait(300) == 0, federation.last_words("server")
        plain, _ = final_state(federation)
        federation.serve("--until-done", "--new-run", *masked(round__grace_s=600.0, **one_task))
        for kind in ("mask_shares", "train", "unmask"):
            federation.until("round_opened", text=kind)
            site.process.kill()
            site.process.wait()
            site.start()
        assert federation.server.wait(300) == 0, federation.last_words("server")
        hidden, rounds = final_state(federation)
        with open_ledger(federation) as ledger:
            rows = {c.name.rpartition(":")[2]: c for c in ledger.clients.all()}
            counted = {r.kind: len(ledger.updates.of_round(r.key)) for r in rounds}
    assert {rows[name].via for name in "ab"} == {rows["site"].client_id}
    assert rows["c"].via != rows["site"].client_id
    assert counted["train"] == 3
    assert [r.kind for r in rounds].count("mask_keys") == 1, "nothing had to begin again"
    same(hidden, plain)


@pytest.mark.full
def test_three_of_thirty_are_gone_after_their_shares_and_the_sum_is_that_of_the_others(tmp_path):
    """Two swarms; the one of three is killed when all have sent shares."""
    given = {"tasks__classes": [["0", "1"]], "method__name": "running_mean",
             "run__evaluate": False}  # fmt: skip
    for k in range(30):
        swarm = "gone" if k < 3 else "lab"
        write_client(tmp_path / swarm / f"{k}", (0, 1), per_class=4, offset=4 * k)
    with LocalFederation(tmp_path / "f") as federation:
        federation.serve("--until-done", *masked(round__min_clients=30, **given))
        control_socket.ask(federation.federation, "pause")
        federation.swarm("gone", tmp_path / "gone", None, "--threads", "1")
        for _ in range(3):
            federation.until("announced", text=":gone")
        signal_workers(federation, "gone", signal.SIGSTOP)  # keys and shares need no worker
        federation.swarm("lab", tmp_path / "lab", None, "--threads", "1")
        control_socket.ask(federation.federation, "resume")
        federation.until("round_opened", text="train")
        federation.kill_client("gone")
        assert federation.server.wait(300) == 0, federation.last_words("server")
        hidden, rounds = final_state(federation)
        with open_ledger(federation) as ledger:
            sent = {r.kind: len(ledger.updates.of_round(r.key)) for r in rounds}
        plain, (alone,) = run_once(
            federation, tmp_path, "--new-run", secure="off", round__min_clients=27, **given
        )
        with open_ledger(federation) as ledger:
            assert len(ledger.updates.of_round(alone.key)) == 27
    assert [r.kind for r in rounds] == ["mask_keys", "mask_shares", "train", "mask_vote", "unmask"]
    assert (sent["mask_keys"], sent["mask_shares"], sent["train"]) == (30, 30, 27)
    same(hidden, plain)


@pytest.mark.full
def test_no_update_is_readable_in_what_the_server_keeps(tmp_path):
    """Every stored upload of a masked round, opened with the server's own keys."""
    one_task = {"tasks__classes": [["0", "1"]], "method__name": "running_mean"}
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *masked(**one_task))
        join_all(federation, tmp_path)
        federation.until("round_opened", text="mask_vote")
        federation.kill_server()
        state, rounds = final_state(federation)
        names = sorted(state.tensors)
    assert rounds[-1].kind == "mask_vote"
    assert "masks.total.mean" in names
    total = state.tensors["masks.total.mean"].astype(float)
    assert np.abs(total).mean() > 2.0**60, "the sum too is masked until it is opened"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method__name": "hepco"}, "needs each client's own update in its rounds: train"),
        ({"round__take": 3}, "round.take is 3"),
        ({"trust__averaging": "median"}, "trust.averaging is 'median'"),
        ({"run__keep_updates": True}, "run.keep_updates"),
        ({"round__min_clients": 2}, "round.min_clients is 2"),
    ],
)
def test_a_run_that_masks_would_break_does_not_start(tmp_path, options, words):
    with LocalFederation(tmp_path) as federation, pytest.raises(LinkError) as caught:
        federation.serve(*masked(**options))
    assert words in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedncm", "analytic"])
def test_the_sum_has_the_noise_of_one_client_and_not_of_each(tmp_path, method):
    """Three clients, and three at least in a sum: each adds 1 / sqrt(3) of the noise."""
    noise = {"privacy__noise_multiplier": 0.5, "privacy__clip": 200.0}  # no feature is longer
    options = {"tasks__classes": [["0", "1"]], "run__evaluate": False, "method__name": method}
    if method == "analytic":
        options["method__projection"] = 32
    with LocalFederation(tmp_path) as federation:
        exact, _ = run_once(federation, tmp_path, secure="off", **options)
        noised, _ = run_once(federation, tmp_path, "--new-run", **options | noise)
        loud, _ = run_once(federation, tmp_path, "--new-run", secure="off", **options | noise)

    def deviation(state):
        if method == "analytic":  # of a product of two features
            change = state.tensors["total.triangle"] - exact.tensors["total.triangle"]
            return float(change.std()) / (0.5 * 200.0**2)
        count = state.tensors["task.0.count"][:, None]
        change = (state.tensors["task.0.mean"] - exact.tensors["task.0.mean"]) * count
        return float(change.std()) / 100.0

    # 256 numbers, or 528: their deviation is certain to 4.4 %, and 3 ** -0.5 is 0.58.
    assert deviation(noised) / deviation(loud) < 0.85
    assert 0.75 < deviation(noised) < 1.35
