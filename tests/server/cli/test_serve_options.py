"""How figures and the page are asked for on the command line."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fcil_protocol.errors import ConfigError
from fcil_server.cli.main import app
from fcil_server.cli.serve_options import (
    api_settings,
    kept_settings,
    metrics_settings,
    page_settings,
)
from fcil_server.federation.addresses import DEFAULT_API, DEFAULT_METRICS, DEFAULT_PAGE, TlsFiles
from fcil_server.federation.config import load
from fcil_server.federation.sections import FederationSection


def given(*arguments: str) -> dict[str, object]:
    serve = typer.main.get_command(app).commands["serve"]
    return serve.make_context("serve", list(arguments)).params


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ((), None),
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


# --- the page -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        (("--page",), (None, DEFAULT_PAGE)),
        (("--page", "--metrics"), (DEFAULT_METRICS, DEFAULT_PAGE)),
        (("--metrics", "--page", "127.0.0.1:1"), (DEFAULT_METRICS, "127.0.0.1:1")),
    ],
)
def test_the_pages_address_may_be_left_out_too(
    arguments: tuple[str, ...], addresses: tuple[str | None, str]
) -> None:
    params = given(*arguments)
    assert (params["metrics"], params["page"]) == addresses


def page_config(*arguments: str) -> FederationSection:
    params = given(*arguments)
    names = ("page", "page_cert", "page_key")
    settings = page_settings(*(params[n] for n in names), read_only=params["page_read_only"])
    return load(None, settings).federation


def test_the_pages_options_become_settings_of_the_federation() -> None:
    files = ("--page-cert", "c.pem", "--page-key", "k.pem")
    section = page_config("--page", "0.0.0.0:1", *files, "--page-read-only")
    assert (section.page, section.page_read_only) == ("0.0.0.0:1", True)
    assert section.page_certificate == TlsFiles("c.pem", "k.pem")
    assert page_config("--page").page_read_only is False


def test_what_a_new_federation_keeps_is_valid_by_itself() -> None:
    given = ("federation.page_metrics=true",)
    page = page_settings("127.0.0.1:1", None, None, read_only=True)
    kept = load(None, kept_settings(given, page=page)).federation
    assert (kept.page, kept.page_metrics, kept.page_read_only) == ("127.0.0.1:1", True, True)
    assert kept_settings(("round.min_clients=3",), page=page) == ("round.min_clients=3",)
    given = ("federation.metrics=0.0.0.0:1",)
    metrics = metrics_settings(None, Path("cert.pem"), Path("key.pem"))
    kept = load(None, kept_settings(given, page=page, metrics=metrics)).federation
    assert (kept.metrics, kept.metrics_cert, kept.page) == ("0.0.0.0:1", "cert.pem", "")


def test_a_page_for_reading_only_that_is_not_served_is_a_fault() -> None:
    with pytest.raises(ConfigError, match="page_read_only does nothing while federation.page is"):
        page_config("--page-read-only")


def test_a_page_that_others_could_reach_in_the_clear_is_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"federation.page: 0\.0\.0\.0:1 can be reached"):
        page_config("--page", "0.0.0.0:1")


# --- the API --------------------------------------------------------------------------------


def test_the_apis_options_become_settings_of_the_federation() -> None:
    params = given("--api", "--metrics", "127.0.0.1:1")
    assert (params["api"], params["metrics"]) == (DEFAULT_API, "127.0.0.1:1")
    made = api_settings("0.0.0.0:1", Path("c.pem"), Path("k.pem"))
    section = load(None, made).federation
    assert (section.api, section.api_certificate) == ("0.0.0.0:1", TlsFiles("c.pem", "k.pem"))
    with pytest.raises(ConfigError, match=r"federation.api: 0\.0\.0\.0:1 can be reached"):
        load(None, api_settings("0.0.0.0:1", None, None))
    with pytest.raises(ConfigError, match="the address after --api is empty"):
        api_settings(" ", None, None)


# --- the partition --------------------------------------------------------------------------


def test_a_partition_that_cannot_be_read_leaves_no_federation_behind(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["serve", "--dir", str(tmp_path / "f"), "--partition", str(tmp_path / "p.json")]
    )
    assert done.exit_code == 4
    assert "there is no partition" in done.stderr
    assert not (tmp_path / "f").exists()
