"""How figures are asked for on the command line."""

import pytest
import typer

from fcil_protocol.errors import ConfigError
from fcil_server.addresses import DEFAULT_METRICS
from fcil_server.cli import app
from fcil_server.cli_metrics import metrics_settings
from fcil_server.config import load


def given(*arguments: str) -> dict[str, object]:
    serve = typer.main.get_command(app).commands["serve"]
    return serve.make_context("serve", list(arguments)).params


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        (("--new-run",), None),
        (("--metrics",), DEFAULT_METRICS),
        (("--metrics", "--new-run"), DEFAULT_METRICS),
        (("--metrics", "127.0.0.1:1"), "127.0.0.1:1"),
        (("--metrics=127.0.0.1:2", "--port", "0"), "127.0.0.1:2"),
    ],
)
def test_the_address_may_be_left_out(arguments: tuple[str, ...], address: str | None) -> None:
    assert given(*arguments)["metrics"] == address


def test_another_option_after_it_is_not_taken_for_the_address() -> None:
    assert given("--metrics", "--new-run")["new_run"] is True


def test_options_become_settings_of_the_federation() -> None:
    params = given("--metrics", "0.0.0.0:1", "--metrics-cert", "c.pem", "--metrics-key", "k.pem")
    names = ("metrics", "metrics_cert", "metrics_key")
    config = load(None, metrics_settings(*(params[n] for n in names)))
    assert [getattr(config.federation, n) for n in names] == ["0.0.0.0:1", "c.pem", "k.pem"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:9464", "federation.metrics: 0.0.0.0:9464 can be reached from other machines"),
        ("9464", "federation.metrics: address '9464' is not of the form HOST:PORT"),
        ("127.0.0.1:\N{ARABIC-INDIC DIGIT THREE}", "is not of the form HOST:PORT"),
        ("", "the address after --metrics is empty"),
    ],
)
def test_a_door_that_would_be_open_to_others_is_a_fault(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, metrics_settings(address, None, None))


def test_a_certificate_without_its_key_is_a_fault() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        load(None, ("federation.metrics='127.0.0.1:1'", "federation.metrics_cert='c.pem'"))
