"""Decision if this device may work: its owner's rules applied to the sensors' readings.

Pure: facts in, a judgement out; no clock, no sensor. `Policy` keeps only the state that prevents a
change of mind at every reading. A fact that the system does not report never forbids work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import time

from fcil_protocol.errors import UsageError

CHARGE_AGAIN = 5  # percent above the least before work on battery resumes
BUSY = 0.20  # share of the cores used by other programs while the device is in use
QUIET = 0.10  # largest such share while it is not
QUIET_S = 60.0  # time below that before the device counts as idle
INPUT_S = 300.0  # since the last key in a terminal
NEAR_C = 5.0  # this close to a mark the work slows down
COOL_C = 10.0  # this far below it the work speeds up again
SHARES = (0.0, 0.25, 0.5, 1.0)  # of the time in which the worker works

_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", re.ASCII)
_DAY = 24 * 60


@dataclass(frozen=True)
class PolicyRules:
    """Rules set by the owner of the device.

    Attributes:
        only_on_mains: never from a battery.
        min_battery: nor from one with less charge, in percent.
        only_when_idle: not while a person or another program uses the device.
        hours: minutes of the day between which it may work; None: always.
        max_temperature: limit of every sensor, °C; None: the sensors' own marks.
        patience_s: seconds that begun work may be suspended before the round is declined.
    """

    only_on_mains: bool = False
    min_battery: int = 0
    only_when_idle: bool = False
    hours: tuple[int, int] | None = None
    max_temperature: float | None = None
    patience_s: float = 120.0

    @property
    def description(self) -> list[str]:
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


ALWAYS = PolicyRules()


@dataclass(frozen=True)
class Heat:
    """One temperature.

    Attributes:
        name: of the sensor.
        now: °C.
        mark: °C at which the system calls it hot; None: it names none.
    """

    name: str
    now: float
    mark: float | None = None


@dataclass(frozen=True)
class Facts:
    """The current readings of the sensors.

    Attributes:
        minute: minute of the local day.
        on_mains: None: there is no battery, or the system does not report it.
        charge: of the battery, in percent; None as above.
        others: share of all cores used by other programs since the last reading, without those of
            low priority like this one; None: unknown yet.
        input_s: seconds since the last key press in a terminal; None: no terminal, or not reported.
        heat: every reported temperature.
    """

    minute: int = 0
    on_mains: bool | None = None
    charge: float | None = None
    others: float | None = None
    input_s: float | None = None
    heat: tuple[Heat, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """The permitted share of work, and its reason.

    Attributes:
        share: of the time in which to work: 0 not at all, 1 without a break.
        why: reasons against work, as text; empty: none.
    """

    share: float = 1.0
    why: str = ""


class Policy:
    """Judges from reading to reading."""

    def __init__(self, rules: PolicyRules) -> None:
        """Judge by these rules."""
        self._rules = rules
        self._flat = False  # the battery was below the least, and is not yet well above
        self._in_use = True
        self._quiet_since: float | None = None
        self._step = len(SHARES) - 1

    def permitted_share(self, facts: Facts, now: float) -> Judgement:
        """Return the permitted share of work.

        Args:
            facts: readings of this moment.
            now: seconds of a monotonic clock.
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
        """Reduce the share of work while it is hot, and raise it step by step when it is not."""
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
        """Return the distance of each temperature above its mark, if it has one."""
        most = self._rules.max_temperature
        marks = [(h, h.mark if most is None else min(most, h.mark or most)) for h in heat]
        return [(h.now - mark, h) for h, mark in marks if mark is not None]


def within(hours: tuple[int, int], minute: int) -> bool:
    """Return True if a minute of the day is between two others, perhaps over midnight."""
    begin, end = hours
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def read_hours(text: str) -> tuple[int, int]:
    """Read hours such as ``22-6`` or ``12:30-14:00``: minutes of the day.

    Raises:
        UsageError: the text has another form.
    """
    found = _HOURS.fullmatch(text.strip())
    if found is not None:
        begin, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
        minutes = (int(found[2] or 0), int(found[4] or 0))
        if begin <= _DAY and end <= _DAY and max(minutes) < 60 and begin % _DAY != end % _DAY:
            return begin % _DAY, end % _DAY
    raise UsageError(
        f"expected hours such as 22-6 or 12:30-14:00, got {text[:40]!r}.",
        action="Give the first and the last hour of work; omit the option to work at any time.",
    )


def show_hours(hours: tuple[int, int]) -> str:
    """Return hours in the notation of `read_hours`."""
    begin, end = (str(time(m // 60, m % 60))[:5] for m in hours)
    return f"{begin}-{end}"
