"""An experiment's TOML is checked whole, and what it names becomes cells with keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcil_protocol.errors import ConfigError
from fcil_protocol.ids import digest_of
from fcil_server.lab import plan
from fcil_server.lab.cli import _command, app
from fcil_server.lab.experiment import Experiment, load, parse
from server.lab.kit import FIELDS, experiment, fields

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("*.toml")), ids=lambda p: p.stem)
def test_every_experiment_that_comes_along_is_whole(path: Path) -> None:
    found = load(path)
    cells = plan.make(found)
    assert len({c.name for c in cells}) == len(cells)
    assert all(c.expected_s > 0 for c in cells)


def test_what_has_never_run_stands_apart() -> None:
    results = EXPERIMENTS.parent / "docs" / "results"
    measured = {path.parent.name for path in results.glob("*/cells.csv")}
    assert {path.stem for path in EXPERIMENTS.glob("*.toml")} == {"digits", *measured}
    page = (EXPERIMENTS / "not-run" / "README.md").read_text()
    rest = {path.stem: load(path) for path in (EXPERIMENTS / "not-run").glob("*.toml")}
    assert set(re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)) == rest.keys()
    for name, found in rest.items():
        weights = str(found.setting.weights).strip("$")
        assert f"| `{name}` | {found.data.classes:,} | `{weights}` |" in page


def never_run() -> dict[str, tuple[Experiment, dict[str, plan.Cell]]]:
    """Return each experiment that has never run, with a cell of each row."""
    found = {path.stem: load(path) for path in (EXPERIMENTS / "not-run").glob("*.toml")}
    return {name: (one, {c.row: c for c in plan.make(one)}) for name, one in found.items()}


def test_rows_of_published_code_have_what_its_preset_cannot_know() -> None:
    rows = {
        name: (found.data.classes, cells[row])
        for name, (found, cells) in never_run().items()
        for row in cells
        if row.endswith(", published code")
    }
    assert {name.partition("-")[2] for name in rows} == {"pilora", "hepco"}
    for name, (classes, cell) in rows.items():
        assert cell.hparams["total_classes"] == classes, name
        if cell.method == "pilora":
            assert cell.hparams["candidates"] == "all", name
        else:  # its script for DomainNet alone replays as many past latents as new ones
            assert cell.hparams["replay_ratio"] == (1 if "domainnet" in name else 0.5), name


def test_prototypes_and_lora_take_the_papers_steps_for_each_data_set() -> None:
    """PILoRA's and PLoRA's are larger for prototypes on TinyImageNet, and smaller for LoRA."""
    steps = {
        (name.partition("-")[0], cell.hparams["lr_prototype"], cell.hparams["lr_lora"])
        for name, (_, cells) in never_run().items()
        for cell in cells.values()
        if cell.method in ("pilora", "plora") and cell.row != "LoRA frozen"
    }
    assert steps >= {("tinyimagenet", 5e-3, 5e-6), ("cifar100", 2e-3, 1e-5)}
    assert {s for s in steps if s[0] == "tinyimagenet"} == {("tinyimagenet", 5e-3, 5e-6)}
    assert {s[1:] for s in steps if s[0] != "tinyimagenet"} == {(2e-3, 1e-5)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("experiments/digits.toml", "experiments/digits.toml"),
        ("/experiments/of/me/experiments/not-run/x.toml", "experiments/not-run/x.toml"),
        ("x.toml", "experiments/x.toml"),
    ],
)
def test_a_report_names_the_folder_of_its_experiment(given: str, told: str) -> None:
    assert _command(Path(given), None, None) == f"scripts/reproduce {told}"


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ("/experiments/of/me/cifar100.zip", "cifar100.zip"),
        ("hf:a/b@c", "hf:a/b@c"),
        ("cifar10", "cifar10"),
    ],
)
def test_a_command_names_the_images_without_a_path_of_this_machine(images, told):
    command = _command(Path("experiments/x.toml"), Path(images), None)
    assert command == f"scripts/reproduce experiments/x.toml --data {told}"


def test_the_list_has_as_many_cells_to_run_as_it_says(tmp_path: Path) -> None:
    """A joint row is run once for all partitions."""
    words = [str(EXPERIMENTS / "digits.toml"), "--list", "--results", str(tmp_path / "none")]
    *cells, plan_line = CliRunner().invoke(app, words).stdout.splitlines()
    shared = [line for line in cells if "the same as " in line]
    assert [line.split("/")[:2] for line in shared] == [["Joint (analytic)", "beta=0.5"]]
    assert plan_line.startswith(f"{len(cells) - len(shared)} cells to run")


def test_all_faults_are_told_at_once_and_unknown_keys_name_the_nearest() -> None:
    wrong = fields(titel="x")
    wrong["setting"] = {"seeds": [1, 1], "clients": 0, "rounds_per_tsk": 2}
    wrong["partitions"] = [{"kind": "quantity", "name": "a", "alpha": 1, "beta": 2}]
    with pytest.raises(ConfigError) as error:
        parse(wrong, "toy")
    for words in (
        "unknown key 'titel' (did you mean 'title'?)",
        "unknown key 'setting.rounds_per_tsk' (did you mean 'rounds_per_task'?)",
        "setting.rounds_per_task is missing",
        "setting.seeds: a seed is given twice",
        "setting.clients:",
        "beta",
    ):
        assert words in error.value.message, words


def test_a_seed_that_no_ledger_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"setting\.seeds\.0: .*less than"):
        parse(fields(setting={**FIELDS["setting"], "seeds": [2**63]}), "toy")


def test_names_that_lead_nowhere_are_told_with_the_nearest() -> None:
    wrong = fields(
        data={"name": "toys", "classes": 5, "tasks": 2},
        papers=[{"source": "s", "setting": "t", "figures": {"NCN": {"beta=1": {"faa": 1}}}}],
        claims=[
            {"text": "c", "source": "s", "left": "NCM", "right": "Ridge", "partition": "beta=2"}
        ],
    )
    wrong["rows"][0]["title"] = "Ridge"
    wrong["rows"][2]["seeds"] = [1, 3]
    wrong["partitions"][0]["alpha"] = 3
    with pytest.raises(ConfigError) as error:
        parse(wrong, "toy")
    for words in (
        "two rows are called 'Ridge'",
        "5 classes do not make 2 equal tasks",
        "alpha is 3, a task has 2 classes",
        "names the row 'NCN', which does not exist",
        "row 'Joint' names the seed 3, which setting.seeds lacks; it has 1, 2",
        "names the partition 'beta=2', which does not exist, did you mean 'beta=1'?",
    ):
        assert words in error.value.message, words


def test_methods_options_and_settings_are_checked_before_anything_runs() -> None:
    rows = [
        {"title": "a", "method": "fedncn"},
        {"title": "b", "method": "hgp", "preset": "short", "options": {"epoch": 2}},
        {"title": "c", "method": "fedncm", "config": {"run": {"seed": 3}}},
        {"title": "d", "method": "fedncm", "config": {"wire": {"haf": "none"}}},
    ]
    with pytest.raises(ConfigError) as error:
        plan.make(experiment(rows=rows))
    for words in ("'fedncm'", "did you mean 'epochs'?", "run.seed is set by", "wire.haf"):
        assert words in error.value.message, words
    assert error.value.message.isprintable(), "a terminal would show a replacement character"


def test_a_row_of_one_client_that_no_round_of_would_count_is_refused() -> None:
    """It would wait for a second one for ever."""
    noise = {"privacy": {"noise_multiplier": 1.0, "clip": 10.0}}
    rows = [
        {"title": "one", "method": "fedncm", "clients": 1, "config": noise},
        {"title": "two", "method": "fedncm", "clients": 2, "config": noise},
    ]
    with pytest.raises(ConfigError, match="row 'one': it has 1 client.* needs 2 updates") as error:
        plan.make(experiment(rows=rows))
    assert "'two'" not in error.value.message


def test_cells_come_seed_by_seed_and_only_where_a_row_has_the_partition() -> None:
    names = [c.name for c in plan.make(experiment())]
    one = ["NCM/alpha=1/1", "NCM/beta=1/1", "Ridge/beta=1/1", "Joint/alpha=1/1", "Joint/beta=1/1"]
    assert names == [*one, *(n[:-1] + "2" for n in one)]


def test_a_row_with_seeds_of_its_own_has_no_cell_for_others() -> None:
    changed = fields()
    changed["rows"][0]["seeds"] = [2]
    names = [c.name for c in plan.make(parse(changed, "toy"))]
    assert [n for n in names if n.startswith("NCM")] == ["NCM/alpha=1/2", "NCM/beta=1/2"]
    assert len([n for n in names if n.startswith("Joint")]) == 4


def test_cells_are_chosen_by_row_partition_and_seed() -> None:
    cells = plan.make(experiment())
    assert [c.name for c in plan.choose(cells, ["ncm/BETA=1"], [2])] == ["NCM/beta=1/2"]
    assert len(plan.choose(cells, ["NCM", "Ridge"], [])) == 6
    with pytest.raises(ConfigError, match="no cell 'NCM/gamma'"):
        plan.choose(cells, ["NCM/gamma"], [])
    with pytest.raises(ConfigError, match="no seed 3"):
        plan.choose(cells, [], [3])


def keys(**changes: object) -> dict[str, str]:
    """Return a key per cell, as if every split had a digest of its own."""
    return {
        c.name: digest_of(c.identity(c.split.slug, "backbone"))
        for c in plan.make(experiment(**changes))
    }


def test_joint_rows_share_their_result_between_partitions_and_nothing_else_does() -> None:
    found = keys()
    assert found["Joint/alpha=1/1"] == found["Joint/beta=1/1"] != found["Joint/beta=1/2"]
    assert len(set(found.values())) == len(found) - 2


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"title": "other words"}, True),
        ({"budget": {"cell_s": 99}}, True),
        ({"setting": {**FIELDS["setting"], "threads": 2}}, False),
        ({"setting": {**FIELDS["setting"], "rounds_per_task": 3}}, False),
        ({"setting": {**FIELDS["setting"], "config": {"wire": {"half": "none"}}}}, False),
        ({"setting": {**FIELDS["setting"], "config": {"sinks": {"tensorboard": {}}}}}, True),
        ({"data": {**FIELDS["data"], "test_per_class": 3}}, False),
        ({"data": {**FIELDS["data"], "order": "pycil"}}, False),
        ({"rows": [{"title": "NCM", "method": "fedncm", "options": {"metric": "cosine"}}]}, True),
        (
            {"rows": [{"title": "NCM", "method": "fedncm", "options": {"metric": "euclidean"}}]},
            False,
        ),
    ],
)
def test_a_key_changes_with_whatever_the_result_depends_on(
    change: dict[str, object], same: bool
) -> None:
    assert (keys()["NCM/beta=1/1"] == keys(**change)["NCM/beta=1/1"]) is same


def test_a_server_gets_the_partition_tasks_and_what_papers_do_not_do_is_off() -> None:
    cell = plan.make(experiment())[0]
    config = plan.server_config(cell, [["a", "b"], ["c", "d"]], weights="", central_test="t")
    assert config.tasks.classes == [["a", "b"], ["c", "d"]]
    assert (config.run.seed, config.run.evaluate, config.run.central_test) == (1, False, "t")
    assert (config.round.min_clients, config.round.rounds_per_task) == (3, 2)
    assert (config.trust.max_weight_share, config.trust.outlier_factor) == (1.0, 0.0)
    joint = plan.make(experiment())[3]
    assert plan.server_config(joint, [["a"]], weights="", central_test="").round.min_clients == 1
    assert joint.split.arguments()[:6] == ["--partition", "iid", "--clients", "1", "--tasks", "1"]
