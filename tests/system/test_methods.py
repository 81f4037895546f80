"""Each published method as a federation of processes on real digits (kit.py).

Three tasks of two rounds. One client is killed after the first task, misses the second and comes
back in the third; another joins in the second. Then the same daemons run the method again
without what its paper claims matters most, and it must lose.

Every method's halves, parts and late clients are tried in one process (adapters/test_contract_kit,
its ablation in its own tests), and daemons know no method by name. So the ordinary run takes the
default method through two tasks of one round; all of this is `-m full`.
"""

from dataclasses import dataclass, field

import pytest

from fcil_protocol.process import control_socket
from fcil_server.lab.local.federation import LocalFederation
from fcil_server.ledger.enums import Outcome, UpdateStatus
from fcil_server.reports.results.run_data import collect
from system.kit import open_ledger, settings, write_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]

TASKS = [["0", "1"], ["2", "3"], ["4", "5"]]
PER_CLASS = 40


@dataclass(frozen=True)
class Case:
    """A method, quick settings, and the ablation that its paper or its page leads to."""

    method: str
    at_least: float  # FAA in %; chance is 17
    options: dict[str, object] = field(default_factory=dict)
    without: dict[str, object] = field(default_factory=dict)
    loses: float = 0.0  # points more that are forgotten then
    frozen: bool = False  # nothing is trained: one round of statistics in each task


CASES = [
    Case("hgp", 60, {}, {"method.rebalance": "off"}, 15),
    # A step so large that the features drift from task to task unless the teacher holds them.
    Case("plora", 55, {"method.lr_lora": 1e-2}, {"method.gamma_kd": 0}, 15),
    Case("pilora", 55),
    # Measured: 45 to 54 in seven runs. With the preset's rates it hangs on the clients' ids: 18 to 60.
    Case("fed_talora", 30, {"method.lr_head": 0.005, "method.lr_lora": 0.0005}),
    Case("hepco", 25, {"method.distillation_steps": 20, "method.generator_steps": 30}),
    # Measured: 47 to 63, Fed-CPrompt 43 to 53 (docs/baselines.md); the last task alone is 33.
    Case("fedavg_prompt", 35),
    Case("l2p", 35),
    Case("coda_prompt", 35),
    Case("fed_cprompt", 30),
    Case("fedavg_lora", 15),
    Case("ffa_lora", 15),
    Case("fedclm", 50),
    Case("ccvr", 50),
    Case("lwf", 15),
    Case("lwf_mc", 15),
    Case("icarl", 55),
    Case("ewc", 15),
    Case("fedproto", 15),
    Case("lorm", 30),
    # Measured: 98 to 100.
    Case("analytic", 85, {"method.group": 2}, frozen=True),
    Case("gaussian_head", 85, {"method.head": "quadratic"}, frozen=True),
]


def arguments(case, **extra):
    given = {"method.name": case.method, "tasks.settle_s": 0.5, "round.settle_s": 0.2}
    if not case.frozen:
        given |= {"method.preset": "short", "method.augment": "jitter", "round.rounds_per_task": 2}
    given |= {**case.options, **extra}
    return settings(**{k.replace(".", "__"): v for k, v in given.items()})


def discovered(case):
    return arguments(
        case, **{"tasks.schedule": "discovered", "tasks.classes": [], "tasks.min_new_classes": 2}
    )


def join(federation, name, folder):
    federation.join(name, folder, "--threads", "1")
    federation.until("announced", text=f":{name}")


@dataclass(frozen=True)
class Result:
    """What a run left behind: its figures, its tasks' class names, who was counted when."""

    faa: float
    forgotten: float  # points, from each task's best accuracy to its last
    tasks: list[list[str]]
    counted: list[tuple[int, str, str]]  # (task, kind, names of the counted clients)


def result(federation):
    with open_ledger(federation) as ledger:
        run = ledger.runs.newest()
        data = collect(ledger, run.run_id)
        names = {k: c.name.rpartition(":")[2] for k, c in data.clients.items()}
        rounds = [
            (r.round.task, r.round.kind, "".join(sorted(names[c] for c in r.counted)))
            for r in data.rounds
        ]
        for row in ledger.rounds.all(run.run_id):
            assert row.outcome is Outcome.DONE
            assert {u.status for u in ledger.updates.of_round(row.key)} == {UpdateStatus.COUNTED}
    classes = [[data.class_names[c] for c in task.class_ids] for task in data.tasks]
    return Result(data.headline[0], data.headline[2], classes, rounds)


def late_and_missing(federation, case, tmp_path):
    """The run of the module's docstring; tasks open as class folders appear."""
    a, b, c = (tmp_path / name for name in "abc")
    federation.serve(*discovered(case))
    write_client(a, (0, 1), per_class=PER_CLASS)
    write_client(b, (0, 1), per_class=PER_CLASS, offset=PER_CLASS)
    for name, folder in (("a", a), ("b", b)):  # both load torch at the same time
        federation.join(name, folder, "--threads", "1")
    federation.until("task_done", text="task 0", timeout_s=1800)
    federation.kill_client("b")
    federation.until("left", text=":b")
    write_client(a, (2,), per_class=PER_CLASS)  # one new class alone opens no task
    federation.until("announced", text="of 3 classes")  # else c alone might be asked
    write_client(c, (2, 3), per_class=PER_CLASS, offset=2 * PER_CLASS)
    join(federation, "c", c)  # late: it needs all that the first task left behind
    federation.until("task_done", text="task 1")
    write_client(a, (4,), per_class=PER_CLASS)
    federation.until("announced", text="of 4 classes")
    write_client(b, (4, 5), per_class=PER_CLASS, offset=PER_CLASS)
    join(federation, "b", b)  # it missed a whole task
    federation.until("task_done", text="task 2")
    federation.check_clients()


def assert_it_learned(federation, case):
    whole = result(federation)
    assert whole.tasks == TASKS
    trained = [(t, who) for t, kind, who in whole.counted if kind == "train"]
    rounds = 1 if case.frozen else 2
    assert trained == [(t, who) for t, who in enumerate(("ab", "ac", "ab")) for _ in range(rounds)]
    assert whole.faa >= case.at_least
    return whole


@pytest.mark.full
def test_the_default_method_learns_two_tasks(tmp_path):
    case = Case("pilora", 40, {"round.rounds_per_task": 1, "tasks.classes": TASKS[:2]})
    with LocalFederation(tmp_path) as federation:
        federation.serve("--until-done", *arguments(case))
        for name, offset in (("a", 0), ("b", PER_CLASS)):
            folder = write_client(tmp_path / name, range(4), per_class=20, offset=offset)
            federation.join(name, folder, "--threads", "1")
        assert federation.server.wait(1800) == 0, federation.last_words("server")
        whole = result(federation)
    assert whole.tasks == TASKS[:2]
    assert [(t, who) for t, kind, who in whole.counted if kind == "train"] == [(0, "ab"), (1, "ab")]
    assert whole.faa >= case.at_least  # of four classes; chance is 25


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if not c.without], ids=lambda c: c.method)
def test_it_learns_with_a_late_client_and_one_that_misses_rounds(case, tmp_path):
    with LocalFederation(tmp_path) as federation:
        late_and_missing(federation, case, tmp_path)
        assert_it_learned(federation, case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if c.without], ids=lambda c: c.method)
def test_it_learns_likewise_and_without_what_matters_most_it_forgets_more(case, tmp_path):
    with LocalFederation(tmp_path) as federation:
        late_and_missing(federation, case, tmp_path)
        whole = assert_it_learned(federation, case)
        listed = {"tasks.schedule": "listed", "tasks.classes": TASKS, "round.min_clients": 3}
        ask_stop(federation)
        federation.serve("--until-done", "--new-run", *arguments(case, **listed, **case.without))
        assert federation.server.wait(1800) == 0, federation.last_words("server")
        ablated = result(federation)
        assert ablated.faa < whole.faa
        # Which images are for testing is chance; what is forgotten stands out of it all the same.
        assert ablated.forgotten - whole.forgotten >= case.loses


def ask_stop(federation):
    control_socket.ask(federation.federation, "stop")
    assert federation.server.wait(60) == 0, federation.last_words("server")
