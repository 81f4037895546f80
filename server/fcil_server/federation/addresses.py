"""Addresses of the server's listeners, as text, and their requirements."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from fcil_protocol.errors import ConfigError

MOST_INTAKE = 16  # processes that accept clients: the number of a connection names its process
DEFAULT_METRICS = "127.0.0.1:9464"  # the same port as OpenTelemetry's exporters
DEFAULT_PAGE = "127.0.0.1:7780"
DEFAULT_API = "127.0.0.1:7790"


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT``; port 0 asks for a free one.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if host == "*":
        raise ConfigError("address '*' cannot be given to clients: use 0.0.0.0 or [::].")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else -1
    if not colon or not 0 <= number <= 65535 or not host.strip("[]"):
        raise ConfigError(
            f"address {address!r} is not of the form HOST:PORT with a port of 0 to 65535."
        )
    return host.strip("[]"), number


@dataclass(frozen=True)
class TlsFiles:
    """PEM files by which an HTTP listener proves its name; empty on the loopback address."""

    chain: str = ""
    key: str = ""


def check_listen_address(address: str, certificate: TlsFiles) -> None:
    """Refuse an address that others could reach without a certificate.

    Raises:
        ConfigError: with what to do.
    """
    host, _ = split_address(address)
    if bool(certificate.chain) != bool(certificate.key):
        raise ConfigError("a certificate and its key belong together: give both, or none.")
    if not certificate.chain and not is_loopback(host):
        raise ConfigError(
            f"{address} can be reached from other machines, and would be served unencrypted: "
            "use 127.0.0.1, or give a certificate and its key."
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a host; names other than localhost may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
