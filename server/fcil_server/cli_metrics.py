"""The options of ``fcil-server serve`` that serve figures to Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fcil_protocol.errors import ConfigError
from fcil_server.addresses import DEFAULT_METRICS

_NAME = "--metrics"

MetricsOption = Annotated[
    str | None,
    typer.Option(
        _NAME,
        metavar="[HOST:PORT]",
        help=f"Serve figures to Prometheus; {DEFAULT_METRICS} if no address follows.",
    ),
]
MetricsCertOption = Annotated[
    Path | None,
    typer.Option(help="PEM file of a certificate; needed beyond loopback."),
]
MetricsKeyOption = Annotated[Path | None, typer.Option(help="PEM file of its key.")]


class ServeCommand(TyperCommand):
    """A command whose ``--metrics`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give the option its default value where nothing, or another option, follows it."""
        given: list[str] = []
        for word, following in zip(args, [*args[1:], "-"], strict=True):
            bare = word == _NAME and following.startswith("-")
            given.append(f"{_NAME}={DEFAULT_METRICS}" if bare else word)
        return super().parse_args(ctx, given)


def metrics_settings(
    address: str | None, certificate: Path | None, key: Path | None
) -> tuple[str, ...]:
    """Return the overrides of the configuration that these options stand for.

    Raises:
        ConfigError: the address is empty.
    """
    if address is not None and not address.strip():
        raise ConfigError(
            f"the address after {_NAME} is empty.",
            action=f"Give HOST:PORT, or {_NAME} alone for {DEFAULT_METRICS}.",
        )
    given = {"metrics": address, "metrics_cert": certificate, "metrics_key": key}
    return tuple(
        f"federation.{name}={json.dumps(str(value))}"
        for name, value in given.items()
        if value is not None
    )
