"""The location of a ledger in Postgres, and the file in a federation's directory with it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, parse_qs, urlsplit

from fcil_protocol.errors import CorruptFile, UsageError
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic

LOCATION_NAME = "ledger.postgres"  # where `ledger.sqlite` would be
_SCHEMES = ("postgresql", "postgres")
_SCHEMA = re.compile(r"fcil_[0-9a-z]+")


@dataclass(frozen=True)
class Location:
    """A database's URL without a password, and a schema (namespace) in it.

    Raises:
        ValueError: they are not such.
    """

    url: str
    schema: str

    def __post_init__(self) -> None:
        self.url.encode()  # libpq's; an error is a ValueError
        parts = urlsplit(self.url)
        _ = parts.port  # raises if that is no number: a password with "/" looks like one
        if parts.scheme not in _SCHEMES or not parts.path.strip("/"):
            raise ValueError("expected the URL of a Postgres database.")
        if not _SCHEMA.fullmatch(self.schema):
            raise ValueError("expected the schema of a federation.")

    @classmethod
    def of(cls, url: str, federation: str) -> Self:
        """Return the location for a federation's ledger.

        Raises:
            UsageError: it is no URL of a Postgres database, or one with a password.
        """
        try:
            location = cls(url, f"fcil_{federation.lower()}")
            parts = urlsplit(url)
            told = {"password", "sslpassword"} & {k.lower() for k in parse_qs(parts.query)}
            secret = parts.password is not None or bool(told)
        except ValueError as error:
            raise UsageError(
                "expected the URL of a Postgres database.",
                action="Give it like: postgresql://user@host:5432/database",
            ) from error
        if secret:
            raise UsageError(
                "the URL has a password, which would stand in a file and in your shell's history.",
                action="Put it into ~/.pgpass (mode 0600) of the server's user on each host, and "
                "leave it out of the URL.",
            )
        return location

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file that names the location.

        Raises:
            CorruptFile: it is damaged. StorageError: it cannot be read.
        """
        with storage_errors("read", path):
            text = path.read_bytes()
        try:
            fields = json.loads(text)
            return cls(str(fields["url"]), str(fields["schema"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptFile(
                f"{path} does not say where in Postgres the ledger is.",
                action="Write it again: "
                '{"url": "postgresql://user@host/database", "schema": "fcil_..."}',
            ) from error

    def write(self, path: Path) -> None:
        """Write the file that names the location."""
        write_atomic(path, json.dumps(asdict(self)).encode())

    def __str__(self) -> str:
        parts: SplitResult = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2] or "localhost"
        return f"postgresql://{host}{parts.path}, schema {self.schema}"
