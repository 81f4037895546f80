"""The register of checks, and the one runner that turns collected facts into findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from fcil_client.doctor.checks.facts import ClientFacts, DoctorFacts, Skip
from fcil_client.doctor.checks.findings import Finding, of_error, skipped

S = TypeVar("S")
# Of the ids, in the order of the report.
SECTIONS = (
    "machine", "engine", "backbone", "images", "membership", "network", "disk", "daemon",
)  # fmt: skip
Look = Callable[[S], Finding | list[Finding]]


@dataclass(frozen=True)
class Check:
    """One check: its id, what it is about, and how it is run."""

    id: str
    about: str
    run: Callable[[DoctorFacts], Iterable[Finding]]


CHECKS: dict[str, Check] = {}


def of_facts(subject: Callable[[DoctorFacts], S | Skip | None]) -> Register[S]:
    """Return a `check` for what there is one of."""
    return Register(lambda facts: [("", partial(subject, facts))])


def of_clients(subject: Callable[[ClientFacts], S | Skip | None]) -> Register[S]:
    """Return a `check` for what every client has, or one who is none yet would have."""
    return Register(lambda facts: [(c.name, partial(subject, c)) for c in facts.clients])


class Register(Generic[S]):
    """Decorates functions that look at one subject, and registers them as checks.

    Such a function returns what it finds about the subject, and does nothing else. It is not run
    where probes have left no facts (None). It is skipped where the subject is, or it raises, a
    `Skip`.

    Args:
        subjects: client and how to get the subject, of all that there are.
    """

    def __init__(
        self, subjects: Callable[[DoctorFacts], Iterable[tuple[str, Callable[[], S | Skip | None]]]]
    ) -> None:
        self._subjects = subjects

    def __call__(self, name: str, about: str) -> Callable[[Look[S]], Look[S]]:
        """Register a function as the check of this id; ``about`` is its line in docs/doctor.md."""

        def register(look: Look[S]) -> Look[S]:
            def run(facts: DoctorFacts) -> Iterable[Finding]:
                for client, subject in self._subjects(facts):
                    for finding in _found(look, subject):
                        yield replace(finding, id=name, client=client)

            assert name not in CHECKS, name
            assert name.partition(".")[0] in SECTIONS, name
            CHECKS[name] = Check(name, about, run)
            return look

        return register


def _found(look: Look[S], subject: Callable[[], S | Skip | None]) -> list[Finding]:
    try:
        facts = subject()
        if facts is None:
            return []
        found = skipped(facts) if isinstance(facts, Skip) else look(facts)
    except Skip as why:
        found = skipped(why)
    except Exception as error:
        found = of_error(error)
    return [found] if isinstance(found, Finding) else found


def examine(facts: DoctorFacts, broken: Iterable[Finding] = ()) -> list[Finding]:
    """Run all checks, and sort what they find as people read it.

    That is by section, in it by client, the machine's own first.

    Args:
        facts: that probes collected.
        broken: what probes could not find out, with the id of the first check that misses it.
    """
    found = [*broken, *(finding for check in CHECKS.values() for finding in check.run(facts))]
    ids, clients = list(CHECKS), ["", *dict.fromkeys(f.client for f in found if f.client)]

    def place(finding: Finding) -> tuple[int, int, int]:
        section = SECTIONS.index(finding.section)
        return section, clients.index(finding.client), ids.index(finding.id)

    return sorted(found, key=place)
