"""A run is not begun with a method whose clients would refuse it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract import Exchange, registry
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_adapters.methods.running_mean import METHOD
from fcil_adapters.numerics.class_reports import count_spec
from fcil_protocol import MetaSpec, PayloadSchema
from fcil_protocol.errors import (
    ConfigError,
    DataError,
    EgressRefused,
    OutOfMemory,
    RunFailed,
    StorageError,
    WorkerDied,
)
from fcil_server.federation.config import load, to_toml
from fcil_server.federation.sections import TasksSection
from fcil_server.ledger.ledger import Ledger
from fcil_server.runs import active_run, run_record
from fcil_server.runs.active_run import (
    check_relay_sums,
    check_task_sizes,
    check_unlabelled,
    tell_ignored,
)
from fcil_server.runs.frozen_config import config_of
from fcil_server.runs.resources import RunSetup
from fcil_server.runs.run_queue import RunQueue
from fcil_server.sessions.peers import Peers
from fcil_server.sessions.run_ports import RunPorts

LISTED = ["tasks.schedule=listed"]
MASKED = ["privacy.secure=masks", "round.min_clients=5"]


def silent(_level: str, _code: str, _text: str) -> None:
    """Stand for an operator who is told nothing."""


def begin_run(ledger: Ledger, settings: list[str], notify: Callable[..., None] = silent) -> None:
    """Open a new run with these settings, in the ledger's directory."""
    federation: Any = SimpleNamespace(ledger=ledger, directory=ledger.path.parent, overrides=())
    ports = RunPorts(notify=notify, peers=Peers())
    asyncio.run(active_run.open_run(federation, load(None, settings), ports, new=True))


def test_a_method_that_declares_free_text_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PayloadSchema((count_spec("n", 1),), (MetaSpec("note", "text"),))
    bad = replace(METHOD, exchanges=lambda _h, _b: (Exchange("train", text),))
    monkeypatch.setattr(active_run.registry, "load_method", lambda _name: bad)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(EgressRefused, match="train: field 'note' is of type 'text'"):
            begin_run(ledger, ["method.name=running_mean"])
        assert ledger.runs.all() == []


def test_a_manifest_that_is_wrong_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(METHOD, learner="fcil_adapters.methods.running_mean:Lerner")
    monkeypatch.setattr(active_run.registry, "load_method", lambda _name: bad)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(ConfigError, match="learner: .* has no 'Lerner'"):
            begin_run(ledger, ["method.name=running_mean"])
        assert ledger.runs.all() == []


def own_dims(*given: Any) -> dict[str, int]:
    """Stand for an author's function: its module is one that the method brings."""
    return METHOD.dims(*given)


def fails(*_: object) -> Any:
    """Stand for an author's function with a mistake."""
    return {}["gamma"]


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("averagings", []),
        ("exchanges", ["wire.budget_mb=2"]),
        ("statistics", ["privacy.noise_multiplier=1", "privacy.clip=1"]),
        ("statistics", [*MASKED, "privacy.noise_multiplier=1", "privacy.clip=1"]),
    ],
)
def test_an_exception_in_a_manifest_is_its_authors_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, settings: list[str]
) -> None:
    bad = replace(METHOD, dims=own_dims, **{part: fails})
    monkeypatch.setattr(active_run.registry, "load_method", lambda _name: bad)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(ConfigError, match="'running_mean' fails with KeyError") as at:
            begin_run(ledger, ["method.name=running_mean", *settings])
        assert f"{Path(__file__).name}:" in at.value.action
        assert ledger.runs.all() == []


def test_a_kind_that_the_method_cannot_halve_is_refused_before_the_run_begins(
    tmp_path: Path,
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with pytest.raises(ConfigError, match="names lora, but the method running_mean can .*none"):
            begin_run(ledger, ["method.name=running_mean", 'wire.half=["lora"]'])
        assert ledger.runs.all() == []


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("analytic", ["trust.max_weight_share=0.3"], True),
        ("analytic", ["trust.max_weight_share=0.3", "method.weights=capped"], False),
        ("analytic", ["trust.max_weight_share=1"], False),
        ("analytic", ["trust.max_weight_share=0.5"], False),  # as every federation's file has it
        ("fedncm", ["trust.max_weight_share=0.3"], False),
    ],
)
def test_a_cap_on_weights_that_a_method_does_not_obey_is_told(
    name: str, given: list[str], told: bool
) -> None:
    config = load(None, [f"method.name={name}", *given])
    method = registry.load_method(name)
    noted: list[tuple[str, str, str]] = []
    tell_ignored(
        lambda *line: noted.append(line),
        method,
        registry.make_hparams(method, config.method.options),
        config,
    )
    warning = (
        "[trust] max_weight_share = 0.3 has no effect: analytic counts every image once "
        '(method.weights = "images"); with "capped" it respects the cap, and its result is no longer exact'
    )
    assert noted == ([("warning", "ignored", warning)] if told else [])


@pytest.mark.parametrize(("name", "able"), [("running_mean", True), ("pilora", False)])
def test_a_method_without_sums_is_refused_where_relays_add_up(name: str, able: bool) -> None:
    method = registry.load_method(name)
    info = backbone_by_name("embedded") if method.needs_backbone else NO_BACKBONE
    hparams = registry.make_hparams(method, {})
    if able:
        check_relay_sums(method, hparams, info)
        return
    with pytest.raises(ConfigError, match="needs each client's own update"):
        check_relay_sums(method, hparams, info)


def test_a_run_begins_with_its_listed_classes_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two would leave a run that waits for classes that nobody lists."""

    def full(*_: object) -> None:
        raise StorageError("the disk is full.")

    monkeypatch.setattr(run_record.ClassRegistry, "register_listed", full)
    config = load(None, ["method.name=running_mean", 'tasks.classes=[["a"]]', *LISTED])
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        hparams = registry.make_hparams(METHOD, {})
        setup = RunSetup(config, METHOD, hparams, NO_BACKBONE, "", None)  # type: ignore[arg-type]
        with pytest.raises(StorageError):
            run_record.begin_row(ledger, setup, {}, silent)
        assert ledger.runs.all() == []
        monkeypatch.undo()
        row = run_record.begin_row(ledger, setup, {}, silent)
        assert [c.name for c in ledger.classes.all(row.run_id)] == ["a"]


def test_a_wish_to_keep_updates_that_is_of_no_use_is_told() -> None:
    noted: list[str] = []
    for name in ("pilora", "analytic"):
        method, config = registry.load_method(name), load(None, ["run.keep_updates=true"])
        hparams = registry.make_hparams(method, {})
        tell_ignored(lambda *line: noted.append(line[2]), method, hparams, config)
    why = "its clients train on what the server broadcast, so all later updates carry traces of it"
    what = "[run] keep_updates has no effect: pilora cannot forget a client exactly, for"
    assert noted == [f"{what} {why}"]


class ToldError(Exception):
    """Ends the opening of a run where something is told."""


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_what_is_not_obeyed_is_told_as_the_run_is_opened(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(_level: str, _code: str, text: str) -> None:
        raise ToldError(text)

    method = replace(METHOD, uncapped=lambda _h: "it adds up")
    monkeypatch.setattr(active_run.registry, "load_method", lambda _name: method)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        expected = "share = 0.3 has no effect: it adds up" if share == 0.3 else "begins with"
        with pytest.raises(ToldError, match=expected):
            begin_run(ledger, ["method.name=running_mean", f"trust.max_weight_share={share}"], note)


def test_a_resumed_run_goes_on_without_its_test_images_and_says_so(tmp_path: Path) -> None:
    """They may be on a network folder that is not there yet."""
    noted: list[tuple[str, str, str]] = []

    def warn(folder: Path) -> None:
        config = load(None, [f"run.central_test={folder}"])
        asyncio.run(active_run._warn_of_no_test(config, lambda *line: noted.append(line)))

    warn(tmp_path / "gone")
    ((level, code, text),) = noted
    assert (level, code) == ("warning", "config_invalid")
    assert text.startswith("run.central_test: there is no folder or file")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_bytes(b"")
    warn(tmp_path / "images")
    assert len(noted) == 1


def kept(own: list[str], given: list[str], chosen: dict[str, object] | None = None):
    """Return what a run with these settings goes on with under others, and what is said of it."""
    environment = {"budget": {"options": chosen}} if chosen else {}
    row = SimpleNamespace(run_id="r1", config=to_toml(load(None, own)), environment=environment)
    noted: list[str] = []
    config = config_of(row, load(None, given), lambda _level, _code, text: noted.append(text))  # type: ignore[arg-type]
    return config, noted


def test_a_run_keeps_its_forms_and_says_so() -> None:
    config, noted = kept(
        ["wire.half=none", "wire.window_mb=1"], ["wire.half=weights", "wire.window_mb=2"]
    )
    assert (config.wire.half, config.wire.window_mb) == ("none", 2)
    assert len(noted) == 1
    assert noted[0].startswith("[wire] half: run r1 was started with other values")
    config, noted = kept(["wire.compact=false"], ["wire.compact=true"])
    assert config.wire.compact is False
    assert noted[0].startswith("[wire] compact: run r1 was started with other values")


def test_patience_and_plots_of_a_run_may_change_while_it_goes_on() -> None:
    given = ["run.work_timeout_s=7200", "run.plots=false"]
    config, noted = kept(["run.work_timeout_s=60"], given)
    assert (config.run.work_timeout_s, config.run.plots) == (7200, False)
    assert noted == []


def test_a_default_that_has_changed_is_nobody_s_wish() -> None:
    config, noted = kept(["wire.half=none"], [])
    assert config.wire.half == "none"
    assert noted == []


def test_what_a_budget_chose_is_kept_and_told_only_where_something_else_is_set() -> None:
    own = ["method.name=running_mean", "method.side=4"]
    assert kept(own, ["method.name=running_mean"], {"side": 4})[1] == []
    config, noted = kept(own, ["method.name=running_mean", "method.side=8"], {"side": 4})
    assert config.method.options == {"side": 4}
    assert noted[0].startswith("[method] side: run r1 was started with other values")


def test_masked_training_needs_two_classes_in_each_task() -> None:
    pairs, single = [["a", "b"], ["c", "d"]], [["a", "b"], ["c"]]
    check_task_sizes(TasksSection(schedule="listed", classes=single), 1)
    check_task_sizes(TasksSection(schedule="listed", classes=pairs), 2)
    check_task_sizes(TasksSection(min_new_classes=2), 2)
    with pytest.raises(ConfigError, match=r"tasks.classes lists one class in task 1"):
        check_task_sizes(TasksSection(schedule="listed", classes=single), 2)
    with pytest.raises(ConfigError, match=r"tasks.min_new_classes is 1") as refused:
        check_task_sizes(TasksSection(), 2)
    assert "Set tasks.min_new_classes to 2 or more" in refused.value.action


def test_unlabelled_images_need_an_evaluation_and_a_warning() -> None:
    pseudo = Exchange("pseudo", PayloadSchema(), keeps_state=True, unlabelled=5, least_accuracy=0.4)
    notes: list[tuple[str, str, str]] = []
    check_unlabelled(
        lambda *note: notes.append(note), (Exchange("train", PayloadSchema()),), evaluate=False
    )
    assert notes == []
    with pytest.raises(ConfigError, match=r"run.evaluate is false"):
        check_unlabelled(silent, (pseudo,), evaluate=False)
    check_unlabelled(lambda *note: notes.append(note), (pseudo,), evaluate=True)
    [(level, code, text)] = notes
    assert (level, code) == ("warning", "unlabelled")
    assert "at least 40% of the test images" in text


def open_queued(ledger: Ledger, notify: Callable[..., None], settings: Sequence[str] = ()) -> None:
    """Open the next run of the queue, in the ledger's directory."""
    federation: Any = SimpleNamespace(ledger=ledger, directory=ledger.path.parent, overrides=())
    ports = RunPorts(notify=notify, peers=Peers())
    asyncio.run(active_run.open_run(federation, load(None, list(settings)), ports, new=False))


@pytest.mark.parametrize(
    ("fault", "refused"),
    [
        (ConfigError("no such weights."), True),
        (DataError("no such weights."), True),
        (OutOfMemory("the GPU is in use."), False),
        (StorageError("the disk is full."), False),
        (WorkerDied("it was killed."), False),
        (RunFailed("no."), True),
        (OverflowError("int too big to convert"), True),  # else it would end each start
    ],
)
def test_only_its_own_fault_sets_a_submitted_run_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, refused: bool
) -> None:
    async def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(active_run, "_open", fails)
    queue, noted = RunQueue(tmp_path), []
    queue.append("night", {"method": {"name": "fedncm"}}, "uid 1")
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(type(fault)):
        open_queued(ledger, lambda *line: noted.append(line[2]))
    (entry,) = queue.entries()
    assert (entry.refused != "") is refused
    assert [("run 1 (night)" in text) for text in noted] == [True] * refused


def test_a_fault_of_the_servers_own_webhook_sets_no_submitted_run_aside(tmp_path: Path) -> None:
    queue = RunQueue(tmp_path)
    queue.append("night", {"method": {"name": "fedncm"}}, "uid 1")
    hook = 'webhooks.ops={url="https://hooks.example/", secret_file="gone"}'
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(ConfigError, match="gone"):
        open_queued(ledger, silent, [hook])
    assert [entry.refused for entry in queue.entries()] == [""]
