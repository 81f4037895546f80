"""Checks before a federation is created: a refused start leaves nothing behind."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil_adapters.contract import registry
from fcil_protocol.errors import (
    ConfigError,
    DataError,
    LinkError,
    StorageError,
    UsageError,
    WireError,
)
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_server.federation.config import Config, load, merged
from fcil_server.federation.sections import MethodSection

# Errors in the request; a full disk is no reason to throw keys away.
_REFUSALS = (ConfigError, DataError, UsageError, LinkError, WireError)


def load_first(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read the configuration of a federation to be created, including its method's options.

    Raises:
        ConfigError: one message that names every fault.
    """
    fields = merged(path, overrides)
    faults: list[ConfigError] = []
    config: Config | None = None
    try:
        config = load(path, overrides)
    except ConfigError as error:
        faults.append(error)
    try:
        check_method(fields.get("method"))
    except ConfigError as error:
        faults.append(error)
    if config is not None and not faults:
        return config
    if len(faults) == 1:
        raise faults[0]
    texts = [fault.message.rstrip(".") for fault in faults]
    raise ConfigError(
        f"{'; '.join(texts)}.", action=" ".join(filter(None, (f.action for f in faults)))
    )


def check_method(section: Any) -> None:
    """Check the fields of ``[method]``: its name and the method's own options.

    Raises:
        ConfigError: there is no such method, or one message with all faults of its options.
    """
    if section is not None and not isinstance(section, dict):
        return  # the configuration's own check reports it
    given = dict(section or {})
    name = given.pop("name", MethodSection.model_fields["name"].default)
    if isinstance(name, str):
        registry.make_hparams(registry.load_method(name), given)


def is_new(directory: Path) -> bool:
    """Return True if a directory is empty or missing."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


@dataclass
class Start:
    """Progress of a start.

    Attributes:
        opened: this process created the directory and held its lock.
        listens: clients can connect from now on.
    """

    opened: bool = False
    listens: bool = False


@contextlib.contextmanager
def removed_if_refused(directory: Path) -> Iterator[Start]:
    """Remove what a first start has created if it is refused before clients could connect.

    Yields:
        The progress that the server updates.
    """
    new, was_there, start = is_new(directory), directory.exists(), Start()
    try:
        yield start
    except _REFUSALS:
        if new and start.opened and not start.listens:
            # Under its lock: another process may have begun to work there meanwhile.
            with (
                contextlib.suppress(StorageError),
                DirectoryLock.acquire(directory, "federation"),
            ):
                shutil.rmtree(directory, ignore_errors=True)
            if was_there and not directory.exists():
                directory.mkdir(mode=0o700)
        raise
