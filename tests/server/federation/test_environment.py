"""Settings in environment variables: as ``-c`` before the command line's, and named where wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from fcil_adapters.contract.registry import load_method, method_names
from fcil_protocol.errors import ConfigError
from fcil_server.cli import main as cli
from fcil_server.daemon.journal import Journal
from fcil_server.daemon.server import Server
from fcil_server.federation.config import Config, known_keys, load, merged
from fcil_server.federation.directory import Federation
from fcil_server.federation.environment import (
    environment_settings,
    variables_in_force,
    without_settings,
)
from fcil_server.reports.traffic.method_list import describe_methods
from fcil_server.runs import export

ADDRESS = "https://user:secret@host"
# Variables that the project's own programs and tests read, and Compose for its file.
OTHERS = (
    *("FCIL_DATA", "FCIL_METHODS", "FCIL_FEATURE_CACHE", "FCIL_TORCH_INDEX", "FCIL_IMAGES"),
    *("FCIL_BIND", "FCIL_ADDRESS", "FCIL_DINO", "FCIL_IN1K", "FCIL_IN21K", "FCIL_CHROMIUM"),
    *("FCIL_FUZZ_EXAMPLES", "FCIL_FUZZ_SECONDS", "FCIL_SOAK_MINUTES", "FCIL_PLANT", "FCIL_CLOCK"),
    *("FCIL_LEARNER", "FCIL_AGGREGATOR", "FCIL_TEST_POWER", "FCIL_TEST_REFUSALS", "FCIL_", "PATH"),
)


class TestNames:
    def test_variables_are_settings(self) -> None:
        given = environment_settings(
            {
                "FCIL_ROUND_MIN_CLIENTS": "3",
                "FCIL_METHOD_NAME": "hgp",
                "FCIL_METHOD_LR_PROMPT": "0.5",
                "FCIL_METHOD_ADAPT__ROUNDS": "2",
                "FCIL_TASKS_CLASSES": '[["cat"], ["dog"]]',
                "FCIL_SINKS_MLFLOW__TRACKING_URI": ADDRESS,
            }
        )
        assert merged(None, given) == {
            "round": {"min_clients": 3},
            "method": {"name": "hgp", "lr_prompt": 0.5, "adapt": {"rounds": 2}},
            "tasks": {"classes": [["cat"], ["dog"]]},
            "sinks": {"mlflow": {"tracking_uri": ADDRESS}},
        }

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("FCIL_FEDERATION_LISTEN", "federation.listen"),
            ("FCIL_RUN_CENTRAL_TEST", "run.central_test"),
            ("FCIL_TASKS_MIN_NEW_CLASSES", "tasks.min_new_classes"),
            ("FCIL_ROUND_RETRY_S", "round.retry_s"),
            ("FCIL_WIRE_WINDOW_MB", "wire.window_mb"),
            ("FCIL_PRIVACY_NOISE_MULTIPLIER", "privacy.noise_multiplier"),
            ("FCIL_TRUST_MAX_CLASSES_PER_CLIENT", "trust.max_classes_per_client"),
            ("FCIL_STORAGE_KEEP_STATES", "storage.keep_states"),
        ],
    )
    def test_a_key_and_its_variable(self, name: str, key: str) -> None:
        assert key in known_keys()
        assert environment_settings({name: "1"}) == (f"{key}=1",)

    def test_every_option_of_a_method_has_a_variable(self) -> None:
        for name in method_names():
            for option in (*cast("Any", load_method(name)).hparams.model_fields, "preset"):
                variable = f"FCIL_METHOD_{option.upper()}"
                assert environment_settings({variable: "1"}) == (f"method.{option}=1",)

    @pytest.mark.parametrize("name", OTHERS)
    def test_other_variables_are_ignored(self, name: str) -> None:
        assert environment_settings({name: "/images"}) == ()
        assert without_settings({name: "/images"}) == {name: "/images"}

    @pytest.mark.parametrize("value", ["", " "])
    def test_an_empty_variable_counts_as_unset(self, value: str) -> None:
        given = {"FCIL_ROUND_MIN_CLIENTS": value, "FCIL_ROUND_MIN_CLIENT": value}
        assert environment_settings(given) == ()
        assert without_settings(given) == {}

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("FCIL_ROUND_MIN_CLIENT", "FCIL_ROUND_MIN_CLIENTS"),
            ("FCIL_RUOND_MIN_CLIENTS", "FCIL_ROUND_MIN_CLIENTS"),
            ("FCIL_METHOD_NMAE", "FCIL_METHOD_NAME"),
            ("FCIL_TRUST_SOMETHING_ELSE", ""),
        ],
    )
    def test_a_name_that_resembles_a_setting_is_refused(self, name: str, near: str) -> None:
        with pytest.raises(ConfigError) as raised:
            environment_settings({name: "secret"})
        said = str(raised.value)
        assert f"environment variable {name} is no setting" in said
        assert (f"did you mean {near}?" in said) == bool(near)
        assert "secret" not in said
        assert without_settings({name: "secret"}) == {}

    def test_a_variable_is_in_force_until_an_option_replaces_it(self) -> None:
        given = environment_settings({"FCIL_ROUND_MIN_CLIENTS": "3", "FCIL_RUN_SEED": "4"})
        assert variables_in_force(given) == ("FCIL_ROUND_MIN_CLIENTS", "FCIL_RUN_SEED")
        assert variables_in_force((*given, "run.seed=5")) == ("FCIL_ROUND_MIN_CLIENTS",)


class TestErrors:
    @pytest.mark.parametrize(
        ("environ", "said"),
        [
            ({"FCIL_ROUND_MIN_CLIENTS": "-31"}, "round.min_clients: "),
            ({"FCIL_TASKS_CLASSES": '[["a"], -31]'}, "tasks.classes.1: "),
            ({"FCIL_SINKS_MLFLOW": ADDRESS}, "sinks.mlflow: "),
            ({"FCIL_METHOD_RANK": "many"}, "option 'rank' of method pilora: "),
        ],
    )
    def test_they_name_the_variable_and_show_nothing_of_a_sink(
        self, environ: dict[str, str], said: str, tmp_path: Path
    ) -> None:
        settings = environment_settings(environ)
        with pytest.raises(ConfigError) as raised:
            Federation.open(tmp_path, None, settings, settings)
        assert said in str(raised.value)
        assert "secret" not in str(raised.value)
        assert raised.value.action.endswith(f"Set in the environment: {next(iter(environ))}.")

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("FCIL_SINKS_MLFLOW__TRACKING_URI", "'mlflow' is not a section"),
            ("FCIL_SINKS_MLFLOW__", "is not of the form"),
        ],
    )
    def test_a_variable_that_fits_no_section_is_named(self, name: str, said: str) -> None:
        settings = environment_settings({"FCIL_SINKS_MLFLOW": "x", name: ADDRESS})
        with pytest.raises(ConfigError, match=said) as raised:
            load(None, settings)
        assert name in str(raised.value)
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize("new", [True, False])
    def test_a_fault_of_several_settings_names_the_variables_in_force(
        self, new: bool, tmp_path: Path
    ) -> None:
        if not new:
            Federation.open(tmp_path, None, ()).close()
        settings = environment_settings({"FCIL_TASKS_SCHEDULE": "listed"})
        with pytest.raises(ConfigError, match="tasks.classes is empty") as raised:
            Federation.open(tmp_path, None, settings, settings)
        assert raised.value.action.endswith("Set in the environment: FCIL_TASKS_SCHEDULE.")
        with pytest.raises(ConfigError) as raised:
            Federation.open(tmp_path, None, ("tasks.schedule=listed",))
        assert "environment" not in str(raised.value)


def served(
    monkeypatch: pytest.MonkeyPatch, directory: Path, environ: dict[str, str], *arguments: str
) -> tuple[Config | None, str]:
    """Run ``serve`` up to the server itself; return its configuration (None: refused) and errors."""
    found: list[Config] = []

    async def serve(federation: Federation, *_: object, **__: object) -> None:
        found.append(federation.config)

    monkeypatch.setattr(cli, "_serve", serve)
    command = ["serve", "--dir", str(directory), *arguments]
    done = CliRunner().invoke(cli.app, command, env=environ)
    assert done.exit_code == (0 if found else 4), done.output
    return (found[0] if found else None), done.output


class TestServe:
    def test_the_first_start_keeps_it_and_a_later_one_takes_it_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variable = "FCIL_ROUND_MIN_CLIENTS"

        def clients(environ: dict[str, str], *arguments: str) -> int:
            config, said = served(monkeypatch, tmp_path / "f", environ, *arguments)
            assert config is not None, said
            return config.round.min_clients

        assert clients({variable: "3"}) == 3
        text = (tmp_path / "f" / "federation.toml").read_text()
        assert tomllib.loads(text)["round"]["min_clients"] == 3
        assert clients({}) == 3
        assert clients({variable: "4"}) == 4
        assert clients({variable: "4"}, "-c", "round.min_clients=5") == 5
        assert (tmp_path / "f" / "federation.toml").read_text() == text

    def test_the_first_start_checks_variables_and_options_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        environ = {"FCIL_TASKS_CLASSES": '[["a"], ["b"]]', "FCIL_METHOD_NAME": "hgp"}
        options = ("-c", "tasks.schedule=listed", "-c", "method.lr_prompt=0.1")
        config, said = served(monkeypatch, tmp_path / "f", environ, *options)
        assert config is not None, said
        kept = load(tmp_path / "f" / "federation.toml")
        assert kept == config
        assert kept.tasks.classes == [["a"], ["b"]]
        assert (kept.method.name, kept.method.options) == ("hgp", {"lr_prompt": 0.1})

    @pytest.mark.parametrize(
        "environ",
        [
            {"FCIL_METHOD_LR_PROMPT": "0.1"},
            {"FCIL_ROUND_MIN_CLIENT": "3"},
            {"FCIL_FEDERATION_METRICS": "0.0.0.0:1"},
        ],
    )
    def test_a_refused_first_start_leaves_nothing(
        self, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config, _ = served(monkeypatch, tmp_path / "f", environ)
        assert config is None
        assert not list(tmp_path.iterdir())

    def test_an_option_may_complete_a_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        environ = {"FCIL_FEDERATION_METRICS": "0.0.0.0:1"}
        options = ("--metrics-cert", "cert.pem", "--metrics-key", "key.pem")
        config, said = served(monkeypatch, tmp_path / "f", environ, *options)
        assert config is not None, said

    def test_what_would_make_a_wrong_file_is_refused_before_anything_is_made(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match="round.min_clients"):
            Federation.open(tmp_path / "f", None, (), ("round.min_clients=0",))
        assert not list(tmp_path.iterdir())

    def test_its_notes_name_the_variables_in_force(self, tmp_path: Path) -> None:
        settings = environment_settings(
            {"FCIL_ROUND_MIN_CLIENTS": "31", "FCIL_SINKS_MLFLOW__TRACKING_URI": ADDRESS}
        )
        notes: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as taken:  # no server comes further
            listen = f"federation.listen=127.0.0.1:{taken.getsockname()[1]}"
            federation = Federation.open(tmp_path, None, (*settings, listen))
            server = Server(federation, Journal(federation.ledger, lambda n: notes.append(n.text)))
            with contextlib.closing(federation), pytest.raises(Exception, match="in use"):
                asyncio.run(server.serve())
        names = "FCIL_ROUND_MIN_CLIENTS, FCIL_SINKS_MLFLOW__TRACKING_URI"
        assert notes[0] == f"set by environment variables: {names}"


class TestOtherCommands:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        Federation.open(tmp_path, None, ()).close()
        return tmp_path

    def test_a_ticket_of_a_stopped_server_has_the_addresses_in_variables(
        self, directory: Path
    ) -> None:
        done = CliRunner().invoke(
            cli.app,
            ["enrol", "camera", "--dir", str(directory), "--json"],
            env={"FCIL_FEDERATION_ADVERTISE": '["lab.example:7710"]'},
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["data"]["addresses"] == ["lab.example:7710"]

    def test_methods_takes_the_settings_of_a_federation_and_of_no_other(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FCIL_METHOD_RANK", "secret")
        describe_methods("pilora")
        with pytest.raises(ConfigError, match="option 'rank'"):
            describe_methods("pilora", directory=directory)

    @pytest.mark.parametrize(
        ("variable", "option", "weights"),
        [
            ("", (), "begun.safetensors"),
            ("moved.safetensors", (), "moved.safetensors"),
            ("moved.safetensors", ("run.weights=given.safetensors",), "given.safetensors"),
        ],
    )
    def test_an_export_takes_the_weights_of_the_run_or_those_given(
        self,
        variable: str,
        option: tuple[str, ...],
        weights: str,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("FCIL_RUN_WEIGHTS", variable)
        monkeypatch.setenv("FCIL_ROUND_MIN_CLIENTS", "3")
        row = cast("Any", SimpleNamespace(config='[run]\nweights = "begun.safetensors"\n'))
        assert export._config(row, directory, option).run.weights == weights
