"""Budgets: which economies are taken, what is kept, what is refused, and what a round is said to cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from adapters.kit import Federation, make_tasks, toy_backbone, toy_images
from fcil_adapters.backbones.known import backbone_by_name
from fcil_adapters.contract.registry import load_method, make_hparams, method_names
from fcil_adapters.contract.traffic import Cadence, Economy
from fcil_protocol.errors import ConfigError, UsageError
from fcil_protocol.ids import ClientId, RunId
from fcil_protocol.payloads.payload import pack
from fcil_server.cli.main import app
from fcil_server.cli.options import read_budget, with_budget
from fcil_server.federation.config import load, parse, to_toml
from fcil_server.ledger.enums import Cause, CountSource, Direction
from fcil_server.ledger.rows import ByteCount
from fcil_server.reports.traffic.broadcast_parts import TrafficSetting
from fcil_server.reports.traffic.budget import (
    JOINING_BYTES,
    applied,
    choose,
    envelope_wire,
    fitted,
    known_settings,
    over_budget,
)
from fcil_server.reports.traffic.prediction import task_rounds
from fcil_server.reports.traffic.sizes import Size

VIT = backbone_by_name("vit_base_patch16_224")
BASIS = "as it is"


def settled(name, limit, *, classes=10, past=0, clients=10, overrides=()):
    config = load(None, (f"method.name={name}", *overrides))
    setting = TrafficSetting(VIT, classes=classes, past=past, clients=clients)
    return choose(load_method(name), config, [setting], BASIS, limit)


def cost_of(name, overrides=()):
    return settled(name, 10**12, overrides=overrides).cost.bytes


class TestChoice:
    def test_a_run_that_fits_gives_up_nothing(self):
        choice = settled("hgp", 10_000_000)
        assert (choice.taken, choice.options) == ((), {})
        assert "nothing is given up" in choice.text()

    def test_the_first_that_fit_are_taken_and_no_more(self):
        """HGP on ViT-B: 1.98 MB as it is; lower ranks of covariances save some, diagonals more."""
        whole = settled("hgp", 10**9).cost.bytes
        first = settled("hgp", whole - 1)
        assert first.options == {"cov_rank": 4}
        assert first.fits
        assert settled("hgp", first.cost.bytes) == replace(first, limit=first.cost.bytes)
        assert settled("hgp", first.cost.bytes - 1).options["cov"] == "diag"

    @pytest.mark.parametrize("name", method_names())
    def test_every_method_offers_economies_that_make_rounds_cheaper(self, name):
        """Each one that is ever taken has its part in it, and the options are those of the method."""
        method = load_method(name)
        if name == "fedncm":  # one mean a class: there is nothing to leave out
            assert not method.economies
            return
        assert method.economies
        least = settled(name, 1)
        assert least.taken
        costs = [cost_of(name)]
        for count in range(1, len(least.taken) + 1):
            config = load(None, (f"method.name={name}",))
            options = {k: v for e in least.taken[:count] for k, v in e.options.items()}
            tried = applied(config, options)
            costs.append(choose(method, tried, [TrafficSetting(VIT)], BASIS, 10**12).cost.bytes)
        assert costs == sorted(costs, reverse=True)
        assert len(set(costs)) == len(costs)
        assert costs[-1] == least.cost.bytes
        for economy in method.economies:
            make_hparams(method, dict(economy.options))

    def test_what_the_operator_set_is_kept_and_said(self):
        overrides = ("method.cov=full", 'wire.half=["head"]')
        choice = settled("hgp", 1, overrides=overrides)
        assert "cov" not in choice.options
        assert choice.kept == ("wire.half", "cov")
        assert "kept as set: wire.half, cov" in choice.text()
        assert "one pool of prompts (gives up prompts of each block's own)" in choice.text()

    def test_a_preset_is_not_an_option_that_was_set(self):
        assert settled("hgp", 1, overrides=("method.preset=paper",)).options["cov"] == "diag"

    def test_an_economy_that_the_configuration_does_not_allow_is_passed_over(self):
        method = load_method("running_mean")
        wrong = Economy("something else", "sense", {"side": 1000})
        method = replace(method, economies=(wrong, *method.economies))
        config = load(None, ("method.name=running_mean",))
        choice = choose(method, config, [TrafficSetting(VIT)], BASIS, 1)
        assert choice.options == {"side": 4}

    def test_nothing_that_fits_is_refused_with_the_smallest_figure(self):
        config = load(None, ("method.name=hepco", "wire.budget_mb=0.1", "method.pool_size=50"))
        with pytest.raises(ConfigError) as caught:
            fitted(load_method("hepco"), config, VIT)
        least = settled("hepco", 1, past=90, overrides=("method.pool_size=50",)).cost.bytes
        text = str(caught.value)
        assert "budget of 100 kB a round is too small for hepco" in text
        assert f"{least / 1e6:.2f} MB" in text
        assert "assuming 10 tasks of 10 classes and 2 clients (round.min_clients)" in text
        assert "without your own settings (pool_size)" in caught.value.action

    def test_the_largest_round_of_all_listed_tasks_counts(self):
        """The second task is the largest, the last one the last."""
        tasks = [["a"], ["b", "c", "d", "e"], ["f", "g"]]
        config = load(
            None, ("tasks.schedule=listed", f"tasks.classes={json.dumps(tasks)}", "round.take=3")
        )
        settings, basis = known_settings(config, VIT)
        assert [(s.classes, s.past, s.clients) for s in settings] == [
            (1, 0, 3),
            (4, 1, 3),
            (2, 5, 3),
        ]
        assert [len(t.classes) for t in settings[-1].tasks] == [1, 4, 2]
        assert basis == "with 3 listed tasks and 3 clients in a round"
        choice = choose(load_method("running_mean"), config, settings, basis, 10**9)
        assert (choice.cost.task, choice.cost.kind, choice.cost.round) == (1, "train", 0)

    def test_a_choice_goes_into_the_runs_configuration_and_through_toml(self):
        config = load(None, ("method.name=hgp", "method.epochs=3"))
        chosen = applied(config, {"cov": "diag"})
        read = parse(to_toml(chosen))
        assert read.method.options == {"epochs": 3, "cov": "diag"}
        assert applied(config, {}) == config


class TestRounds:
    """What `task_rounds` says, against a client that keeps every part in a real federation."""

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("running_mean", {}),
            ("pilora", {"rank": 2, "epochs": 1}),
            ("plora", {"rank": 2, "epochs": 1, "blocks": [0, 1]}),
            ("fed_talora", {"rank": 2, "epochs": 1, "blocks": [0]}),
            ("hgp", {"epochs": 1, "blocks": [0, 1], "server_epochs": 1, "samples_per_class": 4}),
        ],
    )
    @pytest.mark.parametrize("evaluate", [True, False])
    def test_each_round_fetches_and_sends_what_is_said(self, name, options, evaluate):
        counts = dict.fromkeys(range(6), 12)
        fed = Federation.of(
            name, [toy_images(counts, s) for s in range(2)], toy_backbone(), **options
        )
        held: dict[str, bytes] = {}
        may_be_less = Cadence.LOG in fed.method.cadence.values()  # ranks, by what was learned
        for task in make_tasks([1, 0], [4, 2], [5, 3]):
            fed.open(task)
            setting = TrafficSetting(
                fed.backbone.info, 2, 2 * task.index, clients=2, rounds=2, evaluate=evaluate
            )
            for said in task_rounds(fed.method, fed.hparams, setting):
                parts = {n: pack(p) for n, p in fed.parts().items()}
                new = [n for n, data in parts.items() if held.get(n) != data]
                held |= parts
                fetched = sum(fed.parts()[n].tensor_bytes for n in new)
                expected = sum(size.bytes for size in said.down)
                assert fetched <= expected if may_be_less else fetched == expected, (said, new)
                if said.kind != "evaluate":
                    sent = fed.upload(said.kind, 0)
                    assert sent.tensor_bytes <= said.up.bytes
                    assert abs(len(pack(sent)) - sent.tensor_bytes - said.up.frame) < 40
                    frame = len(pack(sent, compact=True)) - sent.tensor_bytes
                    assert abs(frame - said.up.compact_frame) < 40
                    fed.round(said.kind, said.round, 2)

    def test_a_base_counts_once_it_can_come(self):
        """16 rounds of factors are as large as the dense sum of residuals (ViT-B, ten clients)."""
        method, hparams = load_method("fed_talora"), load_method("fed_talora").hparams()
        few, many = (
            max(sum(s.bytes for s in r.down) for r in task_rounds(
                method, hparams, TrafficSetting(VIT, rounds=rounds)))
            for rounds in (15, 16)
        )  # fmt: skip
        assert few < 8_000_000 < 94_000_000 < many


def test_an_envelope_is_said_to_take_what_was_measured():
    """docs/benchmarks/wire-bytes.md, "What the wire adds to tensors": within half a percent."""
    for size, share in (
        (100_000, 0.0251),
        (300_000, 0.0098),
        (1_000_000, 0.0048),
        (10_000_000, 0.0028),
    ):
        one = Size({"lora": size}, frame=120, compact_frame=40)
        assert envelope_wire(one, compact=True) < envelope_wire(one, compact=False)
        assert envelope_wire(one, compact=True) == pytest.approx(size * (1 + share), rel=0.005)


def count(client, wire, cause=Cause.UPDATE, source=CountSource.PREDICTED):
    return ByteCount(
        RunId("r"), 0, "train", 0, ClientId(client), Direction.UP, cause, source, 0, 0, 0, wire
    )


def test_a_round_over_its_budget_names_who_it_cost_the_most():
    """Both ways and control count; catching up, joining and the kernel's figure do not."""
    a = [count("a", 50), count("a", 60, Cause.BROADCAST), count("a", 10, Cause.CONTROL)]
    b = [count("b", 100), count("b", 1000, Cause.CATCH_UP), count("b", 1000, Cause.HANDSHAKE)]
    kernel = [count("b", 5000, Cause.CONNECTION, CountSource.KERNEL)]
    assert over_budget([*a, *b, *kernel], 119 - JOINING_BYTES) == ("a", 120)
    assert over_budget([*a, *b, *kernel], 120 - JOINING_BYTES) is None
    assert over_budget([], 1) is None


class TestCommand:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("2 MB", 2_000_000), ("500kB", 500_000), (" 1.5 MiB ", 1_572_864), ("64 b", 64)],
    )
    def test_a_size_is_read(self, text, size):
        assert read_budget(text) == size
        config = load(None, with_budget(["round.take=3"], text))
        assert round(config.wire.budget_mb * 1e6) == size

    @pytest.mark.parametrize(
        "text", ["", "2", "MB", "-1 MB", "0 MB", "1e3 MB", "٢ MB", "9" * 400 + "GB"]
    )
    def test_what_is_no_size_gets_a_sentence(self, text):
        with pytest.raises(UsageError, match="such as '2 MB'"):
            read_budget(text)

    def test_methods_shows_what_a_budget_would_choose(self):
        arguments = ["methods", "hgp", "--budget", "600 kB", "--json"]
        result = CliRunner().invoke(app, [*arguments, "--backbone", "vit_base_patch16_224"])
        (row,) = json.loads(result.stdout)["data"]["methods"]
        assert row["budget"]["options"] == {
            "cov_rank": 4, "cov": "diag", "pool_sharing": "shared"
        }  # fmt: skip
        assert row["budget"]["fits"]
        assert row["options"]["cov"]["value"] == "diag"
        assert row["traffic"]["round"]["up"]["bytes"] < row["budget"]["up"]

    def test_methods_says_what_does_not_fit(self):
        result = CliRunner().invoke(app, ["methods", "--budget", "9 kB"], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        assert "hepco: does not fit: budget 9.00 kB a round" in result.stdout
