"""What floods share: sending as fast as a link takes it, within bounds, until one is cut."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from fcil_protocol.errors import FcilError
from fcil_protocol.link.interface import LinkNews
from fcil_protocol.messages.frames import parse

FULL_S = 0.001  # before the next attempt where a socket's queue is full
STUCK = 2000  # attempts, and then whoever reads nothing reads after all
LAST_S = 5.0  # for answers that are still on their way when everything was sent


@dataclass
class Poured:
    """What a flood was, and what came of it.

    Attributes:
        messages, sent_bytes: that the link took, all frames.
        answers: how many messages of each type came back, refusals by their code.
        cut: whether the other side ended the connection.
        seconds: that it took.
    """

    messages: int = 0
    sent_bytes: int = 0
    answers: Counter = field(default_factory=Counter)
    cut: bool = False
    seconds: float = 0.0


class Hose:
    """Pours messages into a link, and reads what comes back (or does not).

    Args:
        link: a connected client's link.
        most_bytes, most_s: where it ends.
        reads: whether answers are read; without, whoever answers must hold them.
    """

    def __init__(self, link, *, most_bytes, most_s, reads=True):
        self.poured = Poured()
        self._link = link
        self._most_bytes = most_bytes
        self._began = time.monotonic()
        self._ends = self._began + most_s
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read()) if reads else None

    @property
    def goes_on(self):
        """Whether there is something left of time and bytes, and a connection."""
        poured = self.poured
        self.poured.seconds = time.monotonic() - self._began
        within = poured.sent_bytes < self._most_bytes and time.monotonic() < self._ends
        return within and not poured.cut

    async def _read(self):
        while True:
            self.take(await self._link.recv())

    def take(self, news):
        """Count an answer, or the end of the connection."""
        if isinstance(news, LinkNews):
            self.poured.cut |= news.state == "down"
        else:
            try:
                message = parse(news).message
                self.poured.answers[getattr(message, "code", "") or message.type] += 1
            except FcilError:
                self.poured.answers["lane"] += 1
        self._news.set()

    async def send(self, frames):
        """Send one message, when there is room; False: it is over."""
        stuck = 0
        while self.goes_on:
            if self._link.send(frames):
                self.poured.messages += 1
                self.poured.sent_bytes += sum(map(len, frames))
                if self.poured.messages % 16 == 0:
                    await asyncio.sleep(0)
                return True
            stuck += 1
            if stuck > STUCK and self._task is None:  # who does not read does not hear of its end
                self._task = asyncio.create_task(self._read())
            await asyncio.sleep(FULL_S)
        return False

    async def answered(self, count, *kinds):
        """Wait until so many answers of these kinds have come, or it is over."""
        while self.goes_on and sum(self.poured.answers[kind] for kind in kinds) < count:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 1.0)
            except TimeoutError:
                continue

    async def close(self):
        """Take the last answers and end the link; returns what came of it all."""
        if self._task is None:  # what was not read until now
            self._task = asyncio.create_task(self._read())
        while not self.poured.cut:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), LAST_S)
            except TimeoutError:
                break
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._link.close()
        self.poured.seconds = time.monotonic() - self._began
        return self.poured
