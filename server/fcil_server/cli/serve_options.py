"""Options of ``fcil-server serve``: its partition, and its HTTP listeners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fcil_protocol.errors import ConfigError
from fcil_server.federation.addresses import DEFAULT_API, DEFAULT_METRICS, DEFAULT_PAGE

_DOORS = "Dashboard, API and metrics"
# What they mean without a value.
_BARE = {"--metrics": DEFAULT_METRICS, "--page": DEFAULT_PAGE, "--api": DEFAULT_API}

PartitionOption = Annotated[
    Path | None,
    typer.Option(
        "--partition", help="Learn the tasks of this partition, a file of `fcil-client split`."
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[HOST:PORT]",
        help=f"Expose Prometheus metrics; {DEFAULT_METRICS} by default.",
        rich_help_panel=_DOORS,
    ),
]
PageOption = Annotated[
    str | None,
    typer.Option(
        "--page",
        metavar="[HOST:PORT]",
        help=f"Serve the live dashboard to browsers; {DEFAULT_PAGE} by default.",
        rich_help_panel=_DOORS,
    ),
]
ReadOnlyOption = Annotated[
    bool,
    typer.Option(
        "--page-read-only", help="Serve the dashboard without controls.", rich_help_panel=_DOORS
    ),
]
ApiOption = Annotated[
    str | None,
    typer.Option(
        "--api",
        metavar="[HOST:PORT]",
        help=f"Serve the HTTP API to programs; {DEFAULT_API} by default.",
        rich_help_panel=_DOORS,
    ),
]
CertOption = Annotated[
    Path | None,
    typer.Option(help="PEM certificate; required beyond loopback.", rich_help_panel=_DOORS),
]
KeyOption = Annotated[
    Path | None, typer.Option(help="PEM key of the certificate.", rich_help_panel=_DOORS)
]


class ServeCommand(TyperCommand):
    """A command with options that may be given without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give such an option its default value if nothing, or another option, follows it."""
        given: list[str] = []
        for place, word in enumerate(args):
            bare = word in _BARE and (not args[place + 1 :] or args[place + 1].startswith("-"))
            given.append(f"{word}={_BARE[word]}" if bare else word)
        return super().parse_args(ctx, given)


def metrics_settings(
    address: str | None, certificate: Path | None, key: Path | None
) -> tuple[str, ...]:
    """Return the configuration overrides of the metrics options.

    Raises:
        ConfigError: the address is empty.
    """
    return _settings("metrics", address, certificate, key)


def api_settings(
    address: str | None, certificate: Path | None, key: Path | None
) -> tuple[str, ...]:
    """Return the configuration overrides of the API's options.

    Raises:
        ConfigError: the address is empty.
    """
    return _settings("api", address, certificate, key)


def page_settings(
    address: str | None, certificate: Path | None, key: Path | None, *, read_only: bool
) -> tuple[str, ...]:
    """Return the configuration overrides of the dashboard's options.

    Raises:
        ConfigError: the address is empty.
    """
    more = ("federation.page_read_only=true",) if read_only else ()
    return (*_settings("page", address, certificate, key), *more)


def kept_settings(settings: tuple[str, ...], **doors: tuple[str, ...]) -> tuple[str, ...]:
    """Return the settings that a new federation keeps in its file.

    Those of ``-c`` and of variables, and the options of the page, the API or the metrics where
    those set something of them: it would mean nothing at the next start, or be refused.
    """
    given = [setting.strip() for setting in settings]
    for name, options in doors.items():
        if any(setting.startswith(f"federation.{name}") for setting in given):
            settings = (*settings, *options)
    return settings


def _settings(
    name: str, address: str | None, certificate: Path | None, key: Path | None
) -> tuple[str, ...]:
    if address is not None and not address.strip():
        raise ConfigError(
            f"the address after --{name} is empty.",
            action=f"Give HOST:PORT, or --{name} alone for {_BARE[f'--{name}']}.",
        )
    given = {name: address, f"{name}_cert": certificate, f"{name}_key": key}
    return tuple(
        f"federation.{key}={json.dumps(str(value))}"
        for key, value in given.items()
        if value is not None
    )
