"""The machine of a round by its rules, new or from the ledger, and rounds that are omitted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from fcil_adapters.contract import Exchange
from fcil_adapters.masks.exchanges import (
    AFTER_KEYS,
    KEYS,
    MOST_MEMBERS,
    SHARES,
    UNMASK,
    VOTE,
    is_summed_once,
)
from fcil_adapters.masks.graph import votes_needed
from fcil_adapters.masks.record import MaskRecord, members_of
from fcil_protocol.errors import MethodMismatch, NotNow
from fcil_protocol.ids import ClientId, RoundKey
from fcil_protocol.payloads.builtin import EVALUATE
from fcil_server.federation.config import Config
from fcil_server.ledger.enums import Answer, Outcome, Role, UpdateStatus
from fcil_server.ledger.ledger import Ledger
from fcil_server.ledger.rows import RoundRow
from fcil_server.rounds import notes
from fcil_server.rounds.asking import clients_unable
from fcil_server.rounds.events import Answers, Phase, RoundRules, Why
from fcil_server.rounds.machine import Round
from fcil_server.rounds.position import Mode, RunContext, RunProgress

_NONE = Answer.NONE
_NOT_OF_ONE_ROUND = {
    "mode", "max_staleness", "rounds_per_task", "on_no_holder", "no_holder_s", "late_every_s",
}  # fmt: skip
SURE_IMAGES = 200  # of fewer test images, the share that is right says too little


def machine_of(
    context: RunContext, progress: RunProgress, key: RoundKey, row: RoundRow | None, now: float
) -> Round:
    """Make a round's machine.

    Args:
        context: the fixed parts of the run.
        progress: the run's progress.
        key: the round.
        row: the round in the ledger, if it was open when the server stopped.
        now: seconds of the server's uptime.
    """
    ledger, config = context.ledger, context.config
    rules, exchange = rules_of(config, key.kind), context.exchange(key.kind)
    if exchange is not None:
        rules = replace(rules, patient=exchange.gives_up > 0)
        if exchange.unlabelled or exchange.late:
            # Who has such images, only the clients know for certain: all that may have are asked.
            rules = replace(
                rules,
                clients_per_round=0,
                take=0,
                quorum=1,
                retry_s=0.0,
                no_holder_s=0.0,
                on_short="close",
                optional=True,
            )
        if exchange.late:  # one client that slept is enough, and without any it closes
            rules = replace(rules, min_clients=0, settle_s=0.0)
    if key.kind in {*AFTER_KEYS, *context.masked_kinds}:
        rules = _masked_rules(context, progress, key.kind, rules)
    elif key.kind == KEYS:
        rules = replace(rules, clients_per_round=rules.clients_per_round or MOST_MEMBERS)
        if unable := clients_unable(context, progress):
            # If too few are able, waiting cannot help; else those that are away may come back.
            few = len(_enrolled(context) - unable) < rules.min_updates
            rules = replace(rules, no_holder_s=rules.retry_s if few else rules.deadline_s)
    if context.is_asynchronous(key.kind):
        rules = replace(rules, asynchronous=True)
    elif config.round.mode == "async":
        rules = replace(rules, take=0)  # a buffer's size; these rounds need all clients
    seed = (config.run.seed, key.task, key.round)
    if row is not None:
        return restore(ledger, row, rules, seed, now)
    # Discovered classes settled before their task opened.
    listed = config.tasks.schedule == "listed" and key.kind != EVALUATE
    return Round(
        rules=rules,
        seed=seed,
        held=progress.mode is not Mode.RUNNING,
        unheld_since=progress.unheld_since,
        first=listed and not ledger.rounds.count_closed(context.run, key.task),
    )


def _enrolled(context: RunContext) -> frozenset[ClientId]:
    """Return the federation's clients that are neither revoked nor expired."""
    now, rows = context.ledger.now, context.ledger.clients.all()
    return frozenset(r.client_id for r in rows if r.role is Role.CLIENT and r.may_join(now))


def _masked_rules(
    context: RunContext, progress: RunProgress, kind: str, rules: RoundRules
) -> RoundRules:
    """Return the rules of a masked round after its list: its clients are fixed, and many needed.

    If too few of them answer, it begins again with new keys. Sums of a statistic, and an unmasking,
    wait without limit instead, since they would be lost.
    """
    record = MaskRecord.read(progress.state)
    assert record is not None, "the list comes first"
    assert progress.task is not None
    terms = context.config.privacy.terms
    digest = record.members.digest(context.run, progress.task.index)
    delivered = int(record.delivered.sum())
    votes, fewest = votes_needed(delivered), terms.fewest(delivered)
    suffices: Callable[[Collection[ClientId]], bool] = partial(record.sum_suffices, digest, fewest)
    if kind == SHARES:
        listed = terms.fewest(len(record.members.clients))
        suffices = partial(record.holders_suffice, digest, listed)
    elif kind == VOTE:
        suffices = partial(record.votes_suffice, digest, votes)
    elif kind == UNMASK:
        suffices = partial(record.can_be_opened, digest)
    # Whose sums the votes are about.
    exchange = context.exchange(record.of.partition("/")[0] if kind == VOTE else kind)
    once = exchange is not None and is_summed_once(context.method, exchange)
    sent = kind == VOTE or kind in context.masked_kinds
    endless = kind == UNMASK or (sent and once)
    return replace(
        rules,
        clients_per_round=0,
        min_clients=0,
        min_updates=1,
        no_holder_s=None if endless else rules.deadline_s,
        max_reopens=0,  # a new attempt is as good
        joinable=True,
        suffices=suffices,
        members=members_of(progress.state, kind) & _enrolled(context),
        eager=kind in (VOTE, UNMASK),
        endless=endless,
    )


def restore(
    ledger: Ledger, row: RoundRow, rules: RoundRules, seed: tuple[int, ...], now: float
) -> Round:
    """Return the round's machine; clients that declined or rest still do.

    A kill may have forgotten that one of them had joined (`Coordinator`): its answer says so.
    """
    answers = dict.fromkeys(row.asked, _NONE)
    excluded, resting = [], []
    for update in ledger.updates.of_round(row.key):
        gone = update.status is UpdateStatus.EXCLUDED
        answers[update.client] = Answer.DECLINED if gone else Answer.UPDATED
        excluded += [update.client] if gone else []
    for kept in ledger.answers.of_round(row.key):
        # A client that declined may have been asked again, and have sent an update since.
        if kept.answer is Answer.DECLINED and answers.get(kept.client, _NONE) is _NONE:
            answers[kept.client] = Answer.DECLINED
            final = rules.optional or kept.reason == MethodMismatch.code
            excluded += [kept.client] if final else []
            resting += [kept.client] if kept.reason == NotNow.code and not final else []
    return restored_round(
        rules,
        seed,
        asked=answers,
        remaining_s=row.remaining_s or 0.0,
        now=now,
        reopens=row.reopened,
        excluded=excluded,
        resting=resting,
    )


def restored_round(
    rules: RoundRules,
    seed: tuple[int, ...],
    *,
    asked: Mapping[ClientId, Answer],
    remaining_s: float,
    now: float,
    reopens: int = 0,
    excluded: Iterable[ClientId] = (),
    resting: Iterable[ClientId] = (),
) -> Round:
    """Return the machine of a round that was open when the server stopped.

    No client is connected yet: clients that have not answered get at least the grace period to come
    back.
    """
    waiting = [c for c, a in asked.items() if a is Answer.NONE]
    return Round(
        rules=rules,
        seed=seed,
        phase=Phase.OPEN,
        answers=Answers(asked),
        away_since=dict.fromkeys(waiting, now),
        deadline=now + max(remaining_s, rules.grace_s),
        reopens=reopens,
        excluded=set(excluded),
        resting=set(resting),
    )


def rules_of(config: Config, kind: str) -> RoundRules:
    """Return the rules of a round of some kind from the ``[round]`` section."""
    section = config.round
    fields = section.model_dump(exclude=_NOT_OF_ONE_ROUND)
    limit = section.no_holder_s if section.on_no_holder == "skip" else None
    # In a run with its own [privacy], the file's [round] may ask for less than is needed.
    least = config.least_updates
    for key in ("take", "clients_per_round"):
        fields[key] = max(fields[key], least) if fields[key] else 0
    rules = RoundRules(**fields | {"min_updates": least}, no_holder_s=limit)
    if kind != EVALUATE:
        return rules
    # All clients with test images are asked; without such clients the round is skipped. The results
    # are counted client by client and make no state.
    return replace(rules, clients_per_round=0, take=0, retry_s=0.0, no_holder_s=0.0, min_updates=1)


def omission(context: RunContext, progress: RunProgress, key: RoundKey) -> Why | None:
    """Return why no client is asked for a round; None: they are asked.

    A reason that the operator may not expect is reported.
    """
    if key.kind == EVALUATE:
        first = not context.ledger.evaluations.totals(key.run, key.task)[1]
        return None if not key.round or first or _counts_unlabelled(context, key) else Why.UNCHANGED
    exchange = context.exchange(key.kind)
    if exchange is not None and exchange.unlabelled and _is_unsure(context, progress, exchange):
        return Why.UNSURE
    return Why.GIVEN_UP if _is_given_up(context, progress, key, exchange) else None


def _counts_unlabelled(context: RunContext, key: RoundKey) -> bool:
    """Return True if a round of unlabelled images changed the model in the task of ``key``."""
    rows = [
        context.ledger.rounds.get(key._replace(kind=e.kind, round=number))
        for e in context.exchanges
        if e.unlabelled
        for number in range(e.rounds or context.config.round.rounds_per_task)
    ]
    return any(row is not None and row.outcome in (Outcome.DONE, Outcome.SHORT) for row in rows)


def _is_unsure(context: RunContext, progress: RunProgress, exchange: Exchange) -> bool:
    """Return True if the task's evaluation does not allow the use of unlabelled images."""
    assert progress.task is not None
    right, total = context.ledger.evaluations.totals(context.run, progress.task.index)
    if total >= SURE_IMAGES and right >= exchange.least_accuracy * total:
        return False
    needed = f"at least {exchange.least_accuracy:.0%} of at least {SURE_IMAGES}"
    context.notify("info", "unsure", notes.describe_unsure(progress, right, total, needed))
    return True


def _is_given_up(
    context: RunContext, progress: RunProgress, key: RoundKey, exchange: Exchange | None
) -> bool:
    """Return True if the first rounds of a round's kind failed."""
    most = 0 if exchange is None else exchange.gives_up
    if not most or key.round < most:
        return False
    first = [key._replace(round=r) for r in range(most)]
    if not all(_was_in_vain(context.ledger, one) for one in first):
        return False
    if key.round == most:
        context.notify("warning", "given_up", notes.describe_given_up(progress, most))
    return True


def _was_in_vain(ledger: Ledger, key: RoundKey) -> bool:
    """Return True if a round's clients answered, or had time to, and none sent an update."""
    row = ledger.rounds.get(key)
    answered = row is not None and row.why in (Why.ANSWERED, Why.DEADLINE)
    return answered and not ledger.updates.of_round(key)
