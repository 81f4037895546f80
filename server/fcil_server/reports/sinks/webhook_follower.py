"""The process of one webhook.

Its command is ``python -m fcil_server.reports.sinks.webhook_follower --dir DIR --name NAME``;
input comes as to a sink's process (`reports.sinks.follower`). Its position in the news is saved
after each request that was taken, so after a kill one may be sent twice, with the same
``webhook-id``, and none is lost. News that could not be sent for a day are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fcil_protocol.errors import CorruptFile, FcilError, UsageError
from fcil_protocol.process.child import limit, parent_pipe, read_line
from fcil_protocol.storage.atomic_files import storage_errors, write_atomic
from fcil_server.federation.directory import WEBHOOKS
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger
from fcil_server.reports.results.news import NewsItem, NewsPosition, newest_position, news_after
from fcil_server.reports.sinks.follower import FILES, Calls
from fcil_server.reports.sinks.webhooks import (
    SignedRequest,
    Webhook,
    WebhookOptions,
    choose_webhook,
    read_secret,
    send,
    sign,
)

KEPT_S = 86_400.0  # for which a request is tried
LOOK_S = 2.0  # between two looks, without a call: refusals are news of their own
PAGE = 100

Send = Callable[[WebhookOptions, SignedRequest], None]


class WebhookFollower:
    """Sends one webhook the news of the ledger.

    Args:
        directory: of the federation.
        webhook: the webhook.
        federation: its name, for the requests.
        post: sends a request.
        clock: unix seconds.

    Raises:
        CorruptFile, StorageError: its position cannot be read; no news may be passed over silently.
    """

    def __init__(
        self,
        directory: Path,
        webhook: Webhook,
        federation: str,
        *,
        post: Send = send,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = directory / LEDGER_NAME
        self._path = directory / WEBHOOKS / f"{webhook.name}.json"
        self._options = webhook.options
        self._secret = read_secret(webhook.name, webhook.options)
        self._federation = federation
        self._post = post
        self._clock = clock
        self._position = self._read()

    def catch_up(self) -> None:
        """Send all news that is missing.

        Raises:
            LinkError: the receiver did not take one; the next try begins with it.
        """
        while self._page():
            pass

    def _page(self) -> bool:
        """Send a page of news; False: there are no more."""
        with Ledger(self._ledger, read_only=True) as ledger:
            found = news_after(ledger, self._position, PAGE)
        for item in found:
            if item.kind.value in self._options.events and self._is_fresh(item):
                now = self._clock()
                request = sign(self._federation, item, _time_of(item), now, self._secret)
                self._post(self._options, request)
                self._save(item.position)
        if found:
            self._save(found[-1].position)
        return len(found) >= PAGE

    def _is_fresh(self, item: NewsItem) -> bool:
        return self._clock() - _time_of(item) < KEPT_S

    def _save(self, position: NewsPosition) -> None:
        if position == self._position:
            return
        with storage_errors("create", self._path.parent):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._path, json.dumps({"position": position.text()}).encode())
        self._position = position

    def _read(self) -> NewsPosition:
        """Return the saved position; without one, a webhook begins with the news from now on."""
        with storage_errors("read", self._path):
            try:
                return _position(self._path.read_bytes(), self._path)
            except FileNotFoundError:
                pass
        with Ledger(self._ledger, read_only=True) as ledger:
            position = newest_position(ledger)
        self._position = NewsPosition()
        self._save(position)
        return position


def _position(content: bytes, path: Path) -> NewsPosition:
    try:
        return NewsPosition.parse(str(json.loads(content)["position"]))
    except (LookupError, RecursionError, TypeError, ValueError, UsageError) as error:
        raise CorruptFile(
            f"{path} is damaged: it says which news the webhook has sent.",
            action="Remove it: the webhook then begins with the news from now on.",
        ) from error


def _time_of(item: NewsItem) -> float:
    found = item.data.get("at", item.data.get("closed_at"))
    return float(found) if found is not None else 0.0


def serve(directory: Path, name: str, pipe: int) -> None:
    """Follow the news until the pipe closes, and send the last ones then."""
    given = json.loads(read_line(pipe))
    calls = Calls(pipe)
    webhook = choose_webhook(name, given["options"])
    follower = WebhookFollower(directory, webhook, str(given["federation"]))
    follower.catch_up()
    while calls.wait(LOOK_S):
        follower.catch_up()
    follower.catch_up()


def main() -> int:
    """Run the process."""
    parser = argparse.ArgumentParser(prog="fcil_server.reports.sinks.webhook_follower")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    limit(FILES)
    os.umask(0o077)
    try:
        serve(args.dir, args.name, parent_pipe())
    except FcilError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the server reads it
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
