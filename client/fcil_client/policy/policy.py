"""When this device may work for the federation: its owner's rules and what the sensors say.

Pure: facts in, a judgement out; no clock, no sensor. `Manners` remembers only what keeps it from
changing its mind at every reading. What a system does not tell never forbids anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import time

from fcil_protocol.errors import UsageError

CHARGE_AGAIN = 5  # percent more than the least before a battery is worked from again
BUSY = 0.20  # share of the cores that other programs use while somebody works here
QUIET = 0.10  # and at most that much when nobody does
QUIET_S = 60.0  # for so long, before the device counts as idle
INPUT_S = 300.0  # since the last key in a terminal
NEAR_C = 5.0  # so near to a mark the work slows down
COOL_C = 10.0  # so far below it speeds up again
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the time, in which the worker works

_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", re.ASCII)
_DAY = 24 * 60


@dataclass(frozen=True)
class Rules:
    """What the owner of the device allows.

    Attributes:
        only_on_mains: never from a battery.
        min_battery: nor from one that is charged less, in percent.
        only_when_idle: not while somebody or something else works here.
        hours: minutes of the day from which and to which it may work; None: always.
        max_temperature: °C that no sensor is to exceed; None: what the sensors name themselves.
        patience_s: how long work that has begun stands still before the round is declined.
    """

    only_on_mains: bool = False
    min_battery: int = 0
    only_when_idle: bool = False
    hours: tuple[int, int] | None = None
    max_temperature: float | None = None
    patience_s: float = 120.0

    @property
    def words(self) -> list[str]:
        """The rules that are set, for people."""
        said = []
        if self.only_on_mains:
            said.append("only on mains")
        if self.min_battery:
            said.append(f"battery at least {self.min_battery} %")
        if self.only_when_idle:
            said.append("only when idle")
        if self.hours is not None:
            said.append(f"only {show_hours(self.hours)}")
        if self.max_temperature is not None:
            said.append(f"at most {self.max_temperature:.0f} °C")
        return said


ALWAYS = Rules()


@dataclass(frozen=True)
class Heat:
    """One temperature.

    Attributes:
        name: of the sensor.
        now: °C.
        mark: °C at which the system calls it hot; None: it names no such mark.
    """

    name: str
    now: float
    mark: float | None = None


@dataclass(frozen=True)
class Facts:
    """What the sensors say now.

    Attributes:
        minute: of the local day.
        on_mains: None: there is no battery, or the system does not say.
        charge: of the battery, in percent; None as before.
        others: share of all cores that other programs used since the last reading, without those
            that give way as this one does; None: not known yet.
        input_s: seconds since a key was pressed in a terminal; None: in none, or not told.
        heat: every temperature that is told.
    """

    minute: int = 0
    on_mains: bool | None = None
    charge: float | None = None
    others: float | None = None
    input_s: float | None = None
    heat: tuple[Heat, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """Whether to work.

    Attributes:
        share: of the time in which to work: 0 not at all, 1 without a break.
        why: what speaks against it, in words; empty: nothing.
    """

    share: float = 1.0
    why: str = ""


class Manners:
    """Judges from reading to reading."""

    def __init__(self, rules: Rules) -> None:
        """Judge by these rules."""
        self._rules = rules
        self._flat = False  # the battery was below the least, and is not yet well above
        self._in_use = True
        self._quiet_since: float | None = None
        self._step = len(SHARES) - 1

    def judge(self, facts: Facts, now: float) -> Judgement:
        """Say whether to work.

        Args:
            facts: of this moment.
            now: seconds of a clock that is never set.
        """
        against = [self._power(facts), self._use(facts, now), self._time(facts)]
        share, hot = self._heat(facts)
        words = [words for words in (*against, hot) if words]
        return Judgement(0.0 if any(against) else share, "; ".join(words))

    def _power(self, facts: Facts) -> str:
        if facts.on_mains is not False:
            self._flat = False
            return ""
        if self._rules.only_on_mains:
            return "on battery"
        if facts.charge is not None and self._rules.min_battery:
            least = self._rules.min_battery
            self._flat = facts.charge < least + (CHARGE_AGAIN if self._flat else 0)
            if self._flat:
                return f"on battery, at {facts.charge:.0f} % of at least {least} %"
        return ""

    def _use(self, facts: Facts, now: float) -> str:
        if not self._rules.only_when_idle:
            return ""
        touched = facts.input_s is not None and facts.input_s < INPUT_S
        if touched or (facts.others or 0.0) > (QUIET if self._in_use else BUSY):
            self._quiet_since, self._in_use = None, True
        else:
            self._quiet_since = now if self._quiet_since is None else self._quiet_since
            self._in_use = self._in_use and now - self._quiet_since < QUIET_S
        return "in use" if self._in_use else ""

    def _time(self, facts: Facts) -> str:
        if self._rules.hours is None or within(self._rules.hours, facts.minute):
            return ""
        return f"outside {show_hours(self._rules.hours)}"

    def _heat(self, facts: Facts) -> tuple[float, str]:
        """Work less and less as long as it is hot, and more and more when it is not."""
        worst = max(self._marked(facts.heat), key=lambda h: h[0], default=None)
        if worst is None:
            self._step = len(SHARES) - 1
            return 1.0, ""
        over, heat = worst
        if over >= 0:
            self._step = 0
        elif over > -NEAR_C:
            self._step = max(0, self._step - 1)
        elif over <= -COOL_C:
            self._step = min(len(SHARES) - 1, self._step + 1)
        share = SHARES[self._step]
        if share == 1.0:
            return share, ""
        words = f"hot: {heat.name} {heat.now:.0f} °C of {heat.now - over:.0f} °C"
        return share, words if share == 0 else f"{words}, works {100 * share:.0f} % of the time"

    def _marked(self, heat: Iterable[Heat]) -> list[tuple[float, Heat]]:
        """Return how far above its mark each temperature is, of those that have one."""
        most = self._rules.max_temperature
        marks = [(h, h.mark if most is None else min(most, h.mark or most)) for h in heat]
        return [(h.now - mark, h) for h, mark in marks if mark is not None]


def within(hours: tuple[int, int], minute: int) -> bool:
    """Say whether a minute of the day lies between two others, perhaps over midnight."""
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def read_hours(text: str) -> tuple[int, int]:
    """Read hours such as ``22-6`` or ``12:30-14:00``: minutes of the day.

    Raises:
        UsageError: they are none.
    """
    found = _HOURS.fullmatch(text.strip())
    if found is not None:
        begin, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
        minutes = (int(found[2] or 0), int(found[4] or 0))
        if begin <= _DAY and end <= _DAY and max(minutes) < 60 and begin % _DAY != end % _DAY:
            return begin % _DAY, end % _DAY
    raise UsageError(
        f"hours are such as 22-6 or 12:30-14:00, got {text[:40]!r}.",
        action="Give the hour from which and the hour to which to work; leave it out for always.",
    )


def show_hours(hours: tuple[int, int]) -> str:
    """Return hours as `read_hours` reads them."""
    begin, end = (str(time(m // 60, m % 60))[:5] for m in hours)
    return f"{begin}-{end}"
