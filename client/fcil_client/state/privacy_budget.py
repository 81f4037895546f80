"""A client's privacy budget: the ledger of its images' epsilon, the accountant, its own limits.

``privacy.jsonl`` in the client's directory (0600) has one line for each round whose statistics are
noised, written to disk before the worker draws any noise. A round that is computed again is drawn
and charged again; an update that is only sent again is the same bytes and costs nothing.

Epsilon is that of the class that was described most often: an image is in one folder, so only the
rounds of its class can reveal it (parallel composition over disjoint classes).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fcil_protocol.errors import ConfigError, CorruptFile, PrivacyRefused
from fcil_protocol.ids import RoundKey
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.storage.append_log import AppendLog
from fcil_protocol.storage.atomic_files import storage_errors

NAME = "privacy.jsonl"
# The server chooses its terms' delta; at one near 1, epsilon is 0 for any noise. A client's own
# limit of epsilon therefore holds at this delta, or at a smaller one of the terms.
LIMIT_DELTA = 1e-5


@dataclass(frozen=True)
class PrivacyLimits:
    """A client's own demands beyond the server's terms.

    Attributes:
        min_noise: rounds with a smaller noise multiplier are declined.
        max_epsilon: largest epsilon over all runs of this client, at `limit_delta`; 0: no limit of
            its own. Runs without noise have no epsilon: ``min_noise`` declines them.
        min_count: classes with fewer images take no part.
        min_masked: rounds are declined unless masks hide each update in a sum of at least this
            number of clients; 0: no demand.
        partial: accept rounds in which noise protects the statistics only.
    """

    min_noise: float = 0.0
    max_epsilon: float = 0.0
    min_count: int = 1
    partial: bool = False
    min_masked: int = 0


NO_LIMITS = PrivacyLimits()


@dataclass(frozen=True)
class Charge:
    """One line of the ledger.

    Attributes:
        classes: keys of the class names whose images the round may have described.
        statistics: names of those released; each is a Gaussian mechanism of the noise multiplier.
        sampling_rate: 1, all images take part: no amplification by sampling.
        epsilon: of the run after this round, at delta.
    """

    time: str
    run: str
    task: int
    kind: str
    round: int
    classes: tuple[str, ...]
    statistics: tuple[str, ...]
    noise_multiplier: float
    clip: float
    delta: float
    sampling_rate: float = 1.0
    epsilon: float = 0.0


def gaussian_epsilon(multipliers: Iterable[float], delta: float) -> float:
    """Return epsilon at delta of a sequence of Gaussian mechanisms (Renyi accounting).

    Raises:
        ConfigError: the accountant's library is not installed.
    """
    accounting = _library()
    accountant = accounting.rdp.RdpAccountant(
        neighboring_relation=accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    for multiplier, times in Counter(multipliers).items():
        accountant.compose(accounting.GaussianDpEvent(multiplier), times)
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise _missing() from error
    return dp_accounting


def _missing() -> ConfigError:
    return ConfigError(
        "the server's terms ask for noise, but the privacy accountant is not installed.",
        action="Install it on this client: pip install 'fcil[privacy]'",
    )


def check_installed(terms: PrivacyTerms) -> None:
    """Check that the accountant is installed if the terms require noise.

    Raises:
        ConfigError: it is not.
    """
    if terms.noise_multiplier > 0 and find_spec("dp_accounting") is None:
        raise _missing()  # found without loading the library, which takes seconds


def epsilon_spent(charges: Iterable[Charge], delta: float) -> float:
    """Return epsilon at delta of all charges: the largest of any class."""
    by_class: dict[str, list[float]] = defaultdict(list)
    for charge in charges:
        for name in charge.classes:
            by_class[name] += [charge.noise_multiplier] * len(charge.statistics)
    if not by_class:
        return 0.0
    # The Renyi divergence of Gaussians is proportional to this sum, at every order.
    worst = max(by_class.values(), key=lambda all_: sum(z**-2 for z in all_))
    return gaussian_epsilon(worst, delta)


def limit_delta(charges: Iterable[Charge]) -> float:
    """Return the delta at which a client's own limit of epsilon holds."""
    return min((LIMIT_DELTA, *(charge.delta for charge in charges)))


def _sound(charge: Charge) -> Charge:
    """Return a charge if its values are valid.

    Raises:
        ValueError, TypeError: they are not.
    """
    if not all(isinstance(name, str) for name in (*charge.classes, *charge.statistics)):
        raise TypeError("names")
    if not (0 < charge.noise_multiplier < math.inf and 0 < charge.delta < 1):
        raise ValueError("noise or delta")
    return charge


class PrivacyLedger:
    """The charges of one client directory; a disk error stops the round."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        # Half a line of a kill allowed nothing, so it is removed.
        self._log = AppendLog(self._path, "write the privacy ledger in", keeps_half=False)

    def read(self) -> list[Charge]:
        """Return all charges, the oldest first; an incomplete last line was never charged.

        Raises:
            CorruptFile: a line is damaged, so the spent epsilon is unknown.
            StorageError: the file cannot be read.
        """
        with storage_errors("read", self._path):
            text = self._path.read_bytes() if self._path.exists() else b""
        return [self._charge(line) for line in text.split(b"\n")[:-1]]

    def _charge(self, line: bytes) -> Charge:
        try:
            fields = json.loads(line)
            fields["classes"] = tuple(fields["classes"])
            fields["statistics"] = tuple(fields["statistics"])
            return _sound(Charge(**fields))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptFile(
                f"{self._path} is damaged, so the privacy that was spent is not known.",
                action="Restore it from a backup. Without one, remove it only if the federation "
                "may start counting from zero.",
            ) from error

    def append(self, charge: Charge) -> None:
        """Write a charge; it is on disk when this returns.

        Raises:
            DiskFull, StorageError: it is not; nothing may be released.
        """
        self._log.append(json.dumps(asdict(charge), separators=(",", ":")).encode())

    def charge(
        self,
        privacy: PrivacyTerms,
        limits: PrivacyLimits,
        key: RoundKey,
        classes: Iterable[str],
        names: Iterable[str],
    ) -> None:
        """Charge a round before its noise is drawn, or refuse to take part in it.

        Args:
            privacy: the run's terms.
            limits: this client's own.
            key: the round.
            classes: keys of the classes that it may describe.
            names: of the statistics that it releases; without any, nothing is charged.

        Raises:
            PrivacyRefused: the terms are too weak, or the budget would be exceeded.
            ConfigError: the accountant is missing.
            CorruptFile, StorageError: the ledger cannot be read or written.
        """
        refuse_weak(privacy, limits)
        statistics = tuple(names)
        if privacy.noise_multiplier == 0 or not statistics:
            return
        new = Charge(
            time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            run=key.run,
            task=key.task,
            kind=key.kind,
            round=key.round,
            classes=tuple(sorted(classes)),
            statistics=statistics,
            noise_multiplier=privacy.noise_multiplier,
            clip=privacy.clip,
            delta=privacy.delta,
        )
        before = self.read()
        in_run = epsilon_spent([*(c for c in before if c.run == key.run), new], privacy.delta)
        _refuse_beyond(privacy.max_epsilon, in_run, f"run {key.run}")
        if limits.max_epsilon:
            every = [*before, new]
            total = epsilon_spent(every, limit_delta(every))
            _refuse_beyond(limits.max_epsilon, total, "all runs of this client")
        self.append(Charge(**{**vars(new), "epsilon": round(in_run, 6)}))


def refuse_weak(privacy: PrivacyTerms, limits: PrivacyLimits) -> None:
    """Check the server's terms against the client's own limits.

    Raises:
        PrivacyRefused: with both values.
    """
    if privacy.noise_multiplier < limits.min_noise:
        raise PrivacyRefused(
            f"the server's terms have noise multiplier {privacy.noise_multiplier:g}, this client "
            f"asks for at least {limits.min_noise:g} (--min-noise).",
            action=PrivacyRefused.default_action(),
        )
    if privacy.noise_multiplier and not privacy.clip:
        raise PrivacyRefused(
            f"the server's terms have noise multiplier {privacy.noise_multiplier:g} and no clip, "
            "without which noise protects nothing.",
            action="Ask the operator for privacy.clip.",
        )
    if limits.min_masked and (not privacy.masks or privacy.secure_min_clients < limits.min_masked):
        what = f"sums of {privacy.secure_min_clients}" if privacy.masks else "no masks"
        raise PrivacyRefused(
            f"the server's terms have {what}, this client asks for masked sums of at least "
            f"{limits.min_masked} clients (--min-masked).",
            action="Join without it if that is enough, or ask the operator for privacy.secure = "
            "'masks' and privacy.secure_min_clients.",
        )
    if privacy.partial and limits.min_noise > 0 and not limits.partial:
        raise PrivacyRefused(
            "the server's noise protects statistics only; trained tensors are sent without noise.",
            action="Join with --allow-partial if that is enough.",
        )


def _refuse_beyond(limit: float, epsilon: float, of: str) -> None:
    if limit and epsilon > limit:
        raise PrivacyRefused(
            f"the round would bring epsilon of {of} to {epsilon:.4g}, and the limit is {limit:g}.",
            action=PrivacyRefused.default_action(),
        )


def summary(ledger: PrivacyLedger, delta: float = LIMIT_DELTA) -> dict[str, Any]:
    """Return the spent epsilon, per run and in total, as plain data.

    Of a run at the delta of its terms, the largest if they changed; in total at that of the
    client's own limit in a run of terms with ``delta``.
    """
    charges = ledger.read()
    runs: dict[str, list[Charge]] = defaultdict(list)
    for charge in charges:
        runs[charge.run].append(charge)
    return {
        "runs": [
            {"run": run, **_sum(some, max(c.delta for c in some))} for run, some in runs.items()
        ],
        "all": _sum(charges, min(limit_delta(charges), delta)) if charges else None,
    }


def _sum(charges: list[Charge], delta: float) -> dict[str, Any]:
    return {
        "rounds": len(charges),
        "releases": sum(len(c.statistics) for c in charges),
        "epsilon": round(epsilon_spent(charges, delta), 6),
        "delta": delta,
        "noise_multiplier": charges[-1].noise_multiplier,
        "clip": charges[-1].clip,
    }
