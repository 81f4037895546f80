"""Notes about a round for the operator, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fcil_adapters.contract import TaskInfo
from fcil_adapters.masks.exchanges import MASKING, UNMASK
from fcil_protocol.formats import duration
from fcil_protocol.ids import ClientId
from fcil_protocol.process.terminal import count_of
from fcil_server.ledger.enums import Answer
from fcil_server.rounds import events as machine
from fcil_server.rounds.asking import describe_hidden, describe_images
from fcil_server.rounds.position import RunContext, RunProgress
from fcil_server.rounds.schedule import Step

NAMED = 12  # clients that a note lists
WORTH_TELLING_S = 10.0  # a shorter wait needs no announcement


def describe_opened(progress: RunProgress, asked: tuple[ClientId, ...]) -> str:
    """Return the note that a round asks this many clients."""
    return f"{_name(progress)} asks {len(asked)} client{'s' if len(asked) > 1 else ''}"


def describe_widened(progress: RunProgress, asked: tuple[ClientId, ...]) -> str:
    """Return the note that others are asked because all have declined so far."""
    return f"{_name(progress)}: all have declined; it asks others too, {len(asked)} by now"


def describe_reopened(context: RunContext, progress: RunProgress, what: machine.Reopened) -> str:
    """Return the note that a round continues past its deadline, with the missing clients."""
    names = _names(context, what.missing)
    if what.declined:
        return f"{_name(progress)} asks again: {names}"
    return f"{_name(progress)}: the deadline passed without a quorum; still missing: {names}"


def describe_unable(context: RunContext, progress: RunProgress, until_s: float | None) -> str:
    """Return the note that too many asked clients declined, with reasons and what follows when."""
    assert progress.round is not None
    rules, reasons = progress.round.rules, progress.round.reasons
    without = sorted(c for c, a in progress.round.answers.items() if a is not Answer.UPDATED)
    came = len(progress.round.answers) - len(without)
    few = f", {came} of {count_of(rules.min_updates, 'update')}" if came else ""
    why = ", ".join(sorted({r for r in reasons.values() if r})) or "no reason given"
    again = rules.on_short == "reopen" and progress.round.reopens < rules.max_reopens
    end = "they are asked again" if again and progress.round.able else "the round is skipped"
    names = _names(context, without)
    if until_s is None:
        end = "it waits until one may work again; fcil-server close-round continues without them"
        return f"{_name(progress)}{few}: no update from {names} ({why}); {end}"
    who = "the others" if came else "all"
    return f"{_name(progress)}{few}: {who} have declined ({why}): {names}; in {until_s:.0f} s {end}"


def describe_pace(task: int, step: Step, took_s: float) -> str:
    """Return the note of how long the rounds after the first of a kind take; "" for soon.

    Args:
        task: index of the task.
        step: the round that has closed.
        took_s: from asking its first client to its end.
    """
    left = step.rounds - 1
    rest_s = took_s * left
    if step.round > 0 or rest_s < WORTH_TELLING_S:
        return ""
    others = "the other one" if left == 1 else f"the other {left} together"
    return (
        f"task {task} {step.kind} round 0 took {duration(took_s)}; {others} "
        f"{'takes' if left == 1 else 'take'} about {duration(rest_s)}, or less, since the first "
        "one includes what clients do once"
    )


def describe_task_end(context: RunContext, task: TaskInfo) -> tuple[str, str]:
    """Return the level and the text of the note that a task is over, with its test if there is one.

    The accuracy is that of the clients' test images, or else of the server's own.
    """
    ledger, run = context.ledger, context.run
    # Of a masked sum, only the round that opens it changes the model.
    closed = context.masked_kinds | ({*MASKING} - {UNMASK})
    if not ledger.rounds.was_learned(run, task.index, without=closed):
        text = f"task {task.index} is over and nothing was learned in it: no round of it"
        if ledger.rounds.was_learned(run, task.index, late=True):
            text = f"task {task.index} is over: late images, and no round of its own,"
        return "warning", f"{text} changed the model"
    said = f"task {task.index} is learned"
    right, total = ledger.evaluations.totals(run, task.index)
    if not total:
        right, total = ledger.evaluations.totals(run, task.index, central=True)
    if total:
        images, classes = count_of(total, "test image"), count_of(len(task.seen), "class")
        said += f": {right / total:.1%} of {images} of the {classes} so far are right"
    if not context.classes.listed_tasks():  # a run without an end has no note that it is complete
        said += "; for more: fcil-server report"
    return "info", said


def describe_void(progress: RunProgress, why: str) -> str:
    """Return the note that a round changes nothing, because its updates cannot be combined."""
    return (
        f"{_name(progress)} is void: its updates cannot be combined, and none in particular is to "
        f"blame; the model stays as it is. {why}"
    )


def describe_too_few(progress: RunProgress, usable: int, least: int) -> str:
    """Return the note that a round changes nothing, because it has too few updates."""
    updates = f"{usable} update{'' if usable == 1 else 's'}"
    return (
        f"{_name(progress)} is skipped: {updates} that can be used, and {least} are needed "
        "(round.min_updates); the model stays as it is"
    )


def describe_masked_in_vain(progress: RunProgress, usable: int) -> str:
    """Return the note that a masked round has too few usable updates."""
    assert progress.round is not None
    answers = f"{usable} update{'' if usable == 1 else 's'} that can be used"
    then = "begins again with new keys, up to round.max_reopens times"
    if progress.round.rules.endless:
        then = "is given up, since a second sum beside the first could show a client's part"
    return f"{_name(progress)}: {answers}, too few; the masked round {then}"


def describe_late_counted(context: RunContext, images: Mapping[ClientId, int]) -> str:
    """Return the note that images of learned classes are counted: how many, of which clients."""
    each = sorted((context.name_of(c), n) for c, n in images.items())
    listed = ", ".join(f"{name} ({count_of(n, 'image')})" for name, n in each[:NAMED])
    more = f" and {len(each) - NAMED} more" if len(each) > NAMED else ""
    return f"late images of learned classes are counted: {listed}{more}"


def describe_given_up(progress: RunProgress, rounds: int) -> str:
    """Return the note that no client is asked for the rest of an exchange's rounds."""
    assert progress.task is not None
    assert progress.step is not None
    first = "round brought" if rounds == 1 else f"{rounds} rounds brought"
    return (
        f"task {progress.task.index}: the first {first} no update of kind {progress.step.kind}, so "
        "the others of that kind are skipped and the model stays as it is"
    )


def describe_unsure(progress: RunProgress, right: int, total: int, needed: str) -> str:
    """Return the note that unlabelled images are not used after a task."""
    assert progress.task is not None
    return (
        f"task {progress.task.index}: unlabelled images are not used, since the model classified "
        f"{right} of {total} test images rightly; needed are {needed}"
    )


def describe_unheld(context: RunContext, progress: RunProgress, until_s: float | None) -> str:
    """Return the note that too few connected clients, or none, have images, and what follows."""
    assert progress.task is not None
    assert progress.step is not None
    assert progress.round is not None
    end = "it waits; fcil-server close-round --rest-of-task continues without them"
    if until_s is not None:
        end = f"in {until_s:.0f} s its rounds are skipped"
    hidden = describe_hidden(context, progress.task, progress.step)
    if hidden:
        show = f"fcil-server classes show {hidden}"
        return f"task {progress.task.index}: all its classes are hidden, undone by {show}; {end}"
    wanted = describe_images(context, progress.task, progress.step)
    holders = progress.round.holders
    if holders:
        who = (
            f"of the connected clients, {holders} hold{'s' if holders == 1 else ''} {wanted}, "
            "and a round"
        )
        least = count_of(progress.round.rules.min_updates, "update")
        return f"task {progress.task.index}: {who} needs {least} (round.min_updates); {end}"
    return f"task {progress.task.index}: no connected client holds {wanted}; {end}"


def _name(progress: RunProgress) -> str:
    assert progress.task is not None
    assert progress.step is not None
    return f"task {progress.task.index} {progress.step.kind} round {progress.step.round}"


def _names(context: RunContext, clients: Iterable[ClientId]) -> str:
    listed = list(clients)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(context.name_of(c) for c in listed[:NAMED]) + more
