"""Large broadcast parts in an object store, from which clients fetch them instead of the server.

A part is sealed once and named by its digest, so every client fetches the same bytes, and any store
or cache between can serve them. Only the sealed body is there: a part's header and the key wrapped
for a client stay on the link. What the store does not give, the link does: a store that is slow,
full or gone costs time and no round.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from fcil_protocol.envelopes.stored_envelope import Body
from fcil_protocol.errors import ConfigError, UsageError
from fcil_protocol.ids import Digest, FederationId
from fcil_protocol.messages.messages import MAX_ADDRESS
from fcil_server.federation.sections import PartsSection

PUT_S = 120.0  # for all parts of a state, before its round goes on without them
TIDY_S = 60.0  # to remove parts; the next state's wait for that
PAUSE_S = 300.0  # after a failure, before the store is tried again: rounds do not wait for it
_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=30)}


class ObjectStore:
    """The parts of one federation in a store; their names begin with the federation's id.

    Args:
        section: where it is. Its credentials come from the environment, as the store's own tools
            read them.
        federation: the federation's id.
        notify: writes a note for the operator: level, code, text.

    Attributes:
        base: what the address of every part begins with, for clients to tell their owners.

    Raises:
        UsageError: obstore is not installed.
        ConfigError: the store's address is not usable, or gives clients no addresses.
    """

    def __init__(
        self, section: PartsSection, federation: FederationId, notify: Callable[..., None]
    ) -> None:
        if importlib.util.find_spec("obstore") is None:
            raise UsageError(
                "[parts] store needs obstore, which is not installed.",
                action="Install it with: pip install 'fcil[store]'",
            )
        self._obstore: Any = importlib.import_module("obstore")
        self._folder = str(federation)
        self._notify = notify
        self._public = section.url.rstrip("/")
        # Nothing ends the address of a folder that everybody may read.
        self._valid_s = float("inf") if self._public else section.url_hours * 3600
        self._signed_s = section.url_hours * 3600
        self._stored: set[str] = set()  # that may be in the store: put or listed, and not removed
        self._addresses: dict[str, tuple[str, float]] = {}  # of those that are there; since when
        self._turn = asyncio.Lock()  # what one call puts, another must not remove
        self._failing = False
        self._paused_until = 0.0
        self._listed = False  # what an earlier start or run has left is known
        try:
            self._store: Any = _opened(section.store)
            self.base = f"{self._address('').partition('?')[0].rstrip('/')}/"
        except Exception as error:  # the library has an error of its own for each store
            raise ConfigError(
                f"[parts] store {section.store!r} is not usable: {_sentence(error)}",
                action="Check its address and the credentials in the environment; a store that "
                "signs no addresses, such as a folder, needs [parts] url as well "
                "(docs/object-store.md).",
            ) from error

    def _name(self, digest: str) -> str:
        return f"{self._folder}/{digest}"

    def _address(self, digest: str) -> str:
        if self._public:
            return f"{self._public}/{self._name(digest)}"
        valid = timedelta(seconds=self._signed_s)
        return str(self._obstore.sign(self._store, "GET", self._name(digest), valid))

    def url(self, digest: str) -> str:
        """Return the address of a part that is there; empty if it is not, or not any more."""
        address, since = self._addresses.get(digest, ("", 0.0))
        if time.monotonic() - since >= self._valid_s - 60:
            return ""
        return address

    async def hold(self, parts: Mapping[Digest, Callable[[], Body]]) -> None:
        """Put those of the parts that are missing; fresh addresses for those that age.

        It never raises: parts that cannot be put are fetched over the link, and after `PAUSE_S` a
        later call tries again.

        Args:
            parts: digest -> a function that returns the sealed body.
        """
        if time.monotonic() < self._paused_until:
            return
        try:
            async with asyncio.timeout(PUT_S), self._turn:
                for digest, body in parts.items():
                    await self._hold(digest, body)
        except Exception as error:
            if not self._failing:
                text = f"the object store takes no parts ({_sentence(error)}); clients fetch them "
                self._notify("warning", "object_store", f"{text}from the server")
            self._failing = True
            self._paused_until = time.monotonic() + PAUSE_S
        else:
            if self._failing:
                self._notify("info", "object_store", "the object store takes parts again")
            self._failing = False

    async def _hold(self, digest: Digest, body: Callable[[], Body]) -> None:
        known = self._addresses.get(digest)
        if known is not None and time.monotonic() - known[1] < self._valid_s / 2:
            return
        if known is None and not await self._has(digest, body):
            self._stored.add(digest)  # before: a put that is given up may have come through
            await self._obstore.put_async(self._store, self._name(digest), body())
        self._stored.add(digest)
        address = await asyncio.to_thread(self._address, digest)
        if len(address) > MAX_ADDRESS:
            raise ConfigError(f"its addresses have {len(address)} characters.")
        self._addresses[digest] = (address, time.monotonic())

    async def _has(self, digest: Digest, body: Callable[[], Body]) -> bool:
        try:
            found = await self._obstore.head_async(self._store, self._name(digest))
        except FileNotFoundError:
            return False
        return int(found["size"]) == len(body())

    async def keep_only(self, kept: Callable[[], set[str]]) -> None:
        """Remove the federation's other parts; those that cannot be removed are tried again later.

        Args:
            kept: returns the digests to keep, when it is their turn.
        """
        try:
            async with asyncio.timeout(TIDY_S), self._turn:
                if not self._listed:
                    folder = f"{self._folder}/"
                    found = await self._obstore.list(self._store, folder).collect_async()
                    self._stored.update(str(one["path"]).rpartition("/")[2] for one in found)
                    self._listed = True
                wanted = kept()
                for digest in sorted(self._stored - wanted):
                    self._addresses.pop(digest, None)
                    await self._remove(digest)
        except Exception as error:
            text = f"parts of earlier states stay in the object store ({_sentence(error)})"
            self._notify("warning", "object_store", text)

    async def _remove(self, digest: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # gone already
            await self._obstore.delete_async(self._store, self._name(digest))
        self._stored.discard(digest)


def _opened(address: str) -> Any:
    from_url: Any = importlib.import_module("obstore.store").from_url
    if address.startswith("file://"):
        return from_url(address, mkdir=True)
    return from_url(address, retry_config=_RETRIES)


def _sentence(error: BaseException) -> str:
    """Return what an error says, on one line, without the library's own details."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")
