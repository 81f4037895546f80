"""Periodic reading of the sensors, and its effect on the worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fcil_client.notes import Notes
from fcil_client.policy.policy import Facts, Judgement, Policy, PolicyRules
from fcil_client.policy.sensors import Sensors
from fcil_client.session import events

READ_S = 5.0  # between two readings
PERIOD_S = 2.0  # of a worker that works part of the time


class PolicyWatch:
    """Applies one client's rules to its worker.

    Args:
        rules: of the owner.
        sensors: source of the readings.
        hold: suspends the worker (True) or lets it resume (False).
        feed: receives events for the session.
        changed: called when the content of ``status`` has changed.

    Attributes:
        judgement: the last one.
        facts: the last readings; None before the first.
    """

    def __init__(
        self,
        rules: PolicyRules,
        sensors: Sensors,
        notes: Notes,
        *,
        hold: Callable[[bool], None],
        feed: Callable[[events.Event], None],
        changed: Callable[[], None],
    ) -> None:
        self.judgement = Judgement()
        self.facts: Facts | None = None
        self._rules = rules
        self._policy = Policy(rules)
        self._sensors = sensors
        self._notes = notes
        self._hold = hold
        self._feed = feed
        self._changed = changed
        self._share = asyncio.Event()  # set on a change

    async def look(self) -> None:
        """Read the sensors once and apply the judgement."""
        self.facts = await asyncio.to_thread(self._sensors.read)
        before, self.judgement = (
            self.judgement,
            self._policy.permitted_share(self.facts, time.monotonic()),
        )
        share, why = self.judgement.share, self.judgement.why
        if share != before.share:
            self._share.set()
            self._tell(share, why)
        if share == 0:
            self._hold(True)
            self._feed(events.Paused(why))
        elif before.share == 0:
            self._hold(False)
            self._feed(events.Resumed())
        if self.judgement != before:
            self._changed()

    def _tell(self, share: float, why: str) -> None:
        if share == 1:
            self._notes("info", "works again without pauses")
        elif share == 0:
            self._notes("info", f"paused: {why}")
        else:
            self._notes("info", why)

    async def run(self) -> None:
        """Read for ever; stop after one reading if no reading can matter."""
        while self.can_forbid_work:
            await asyncio.sleep(READ_S)
            await self.look()

    @property
    def can_forbid_work(self) -> bool:
        """True if a reading can forbid work here."""
        rules, heat = self._rules, self.facts.heat if self.facts else ()
        judged = any(h.mark is not None or rules.max_temperature is not None for h in heat)
        return judged or bool(self._rules.description)

    async def throttle(self) -> None:
        """Let the worker work its share of every period."""
        while True:
            share = self.judgement.share
            if share in (0.0, 1.0):
                await self._until_other()
                continue
            self._hold(False)
            await asyncio.sleep(PERIOD_S * share)
            if self.judgement.share == share:
                self._hold(True)
                await asyncio.sleep(PERIOD_S * (1 - share))
            if self.judgement.share != 0:
                self._hold(False)

    async def _until_other(self) -> None:
        self._share.clear()
        await self._share.wait()

    def status(self) -> dict[str, Any]:
        """Return the rules, the judgement and the main readings."""
        facts = self.facts or Facts()
        hottest = max(facts.heat, key=lambda h: h.now - (h.mark or 1000), default=None)
        return {
            "rules": self._rules.description,
            "share": self.judgement.share,
            "why": self.judgement.why,
            "on_mains": facts.on_mains,
            "battery": facts.charge,
            "hottest": None if hottest is None else [hottest.name, hottest.now, hottest.mark],
        }
