"""What is checked before a federation is made: a start that is refused leaves nothing behind."""

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
from fcil_server.federation.config import Config, merged, validate
from fcil_server.federation.sections import MethodSection

# What refuses a start for what was asked for; a full disk is no reason to throw keys away.
_REFUSALS = (ConfigError, DataError, UsageError, LinkError, WireError)


def load_first(path: Path | None, overrides: Sequence[str]) -> Config:
    """Read the configuration of a federation that is still to be made, its method as well.

    Raises:
        ConfigError: one message that names every fault.
    """
    fields = merged(path, overrides)
    faults: list[ConfigError] = []
    config: Config | None = None
    try:
        config = validate(fields)
    except ConfigError as error:
        faults.append(error)
    try:
        _check_method(fields.get("method"))
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


def _check_method(section: Any) -> None:
    if section is not None and not isinstance(section, dict):
        return  # told by the configuration's own check
    given = dict(section or {})
    name = given.pop("name", MethodSection.model_fields["name"].default)
    if isinstance(name, str):
        registry.make_hparams(registry.load_method(name), given)


def is_new(directory: Path) -> bool:
    """Say whether there is nothing in a directory, or no directory."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


@dataclass
class Start:
    """How far a start has come.

    Attributes:
        opened: the directory is made, by this process, which held its lock.
        listens: clients can come from now on.
    """

    opened: bool = False
    listens: bool = False


@contextlib.contextmanager
def removed_if_refused(directory: Path) -> Iterator[Start]:
    """Remove what a first start has made if it is refused before clients could come.

    Yields:
        What the server notes its steps in.
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
