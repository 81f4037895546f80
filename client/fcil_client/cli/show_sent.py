"""Text output of a dry run (`dry_run`) and of the journal (`sent_journal`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console

from fcil_adapters.contract import exemplars
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.builtin import EVALUATE, INVENTORY, LATE
from fcil_protocol.process.tables import Column, console, show_table
from fcil_protocol.process.terminal import count_of, printable


def _number(count: int, *, at_most: bool = False) -> str:
    return f"{'<= ' if at_most else ''}{count:,}"


# --- what would leave -----------------------------------------------------------------------


def show_dry_run(row: dict[str, Any]) -> None:
    """Print what would leave."""
    out = console()
    on = f" on {row['backbone']}" if row["backbone"] else ""
    out.print("No class was announced and no update sent.", style="bold")
    out.print(f"{row['method']} {row['version']}{on}, {row['told']}.")
    out.print(f"Privacy: {PrivacyTerms.model_validate(row['privacy']).describe()}.")
    if row["relay"]:
        out.print(f"Relay {printable(row['relay'])} opens the updates that are sums.")
    if row["least"] > row["privacy"]["min_count"]:
        out.print(f"Classes with fewer than {row['least']} images stay out (--min-count).")
    if row["declined"]:
        out.print(
            f"This client declines all rounds but evaluations: {printable(row['declined'])}",
            style="bold yellow",
        )
    if store := row["object_store"]:
        out.print(f"Large parts of broadcasts come from {printable(store)} (--link-only: not).")
    if again := exemplars.exemplar_notice(row["exemplars"]):
        out.print(f"{row['method']} {again}.")
    if row["unlabelled"]:
        out.print(_unlabelled_notice(row["method"], row["unlabelled"]))
    for text in row["faults"]:
        out.print(printable(text), style="yellow")
    _show_announcement(out, row["announcement"])
    for task in row["tasks"]:
        _show_task(out, task, at_most=not row["enrolled"])
    if not row["tasks"]:
        out.print("\nNo known task concerns this folder.")
    out.print("\nSealed: including names, metadata and encryption tags. <= means at most.")
    out.print(
        "Also sent: versions of fcil and its methods, the device's name, the backbone's digest "
        "and\n"
        "its features of four shipped pictures, progress, and codes of rounds that are declined."
    )


def _unlabelled_notice(method: str, row: dict[str, Any]) -> str:
    """Return what would be done with the unlabelled images, and what can go wrong with it."""
    if row["folder"] is None:
        return f"{method} also uses unlabelled images; none are offered (--unlabelled FOLDER)."
    return (
        f"{method} looks at up to {row['most']:,} of the {row['images']:,} unlabelled images in "
        f"{printable(row['folder'])} after a task,\nand counts those that resemble one class "
        "clearly, once, as images of it. Images of a class that the\nfederation does not know "
        "are counted under a wrong one."
    )


def _show_announcement(out: Console, said: dict[str, Any]) -> None:
    about = "" if said["exact"] else " (the images kept for tests are drawn when it joins)"
    out.print(f"\nThe classes, announced when it connects and when the folder changes{about}:")
    show_table(out, said["classes"], _CLASSES)
    out.print(f"{len(said['classes'])} names, {_sizes(said)}")
    for fault in said["refused"]:
        out.print(f"refused by this client: {fault}", style="bold red")


def _show_task(out: Console, task: dict[str, Any], *, at_most: bool) -> None:
    classes = f"{count_of(task['classes'], 'class')}, {task['past']} before"
    if not task["known"]:
        classes += ", unless other clients bring more"
    images = _number(task["images"], at_most=at_most)
    held = f"this folder has {len(task['held'])} of them, {images} images to learn from"
    out.print(f"\nTask {task['task']} ({classes}): {held}")
    if not task["exchanges"]:
        out.print("nothing leaves")
        return
    tensors = [
        {**tensor, "exchange": "" if i else exchange["kind"]}
        for exchange in task["exchanges"]
        for i, tensor in enumerate(exchange["tensors"])
    ]
    show_table(out, tensors, _TENSORS)
    for exchange in task["exchanges"]:
        rounds = exchange["rounds"]
        times = "as many rounds as the server is set to, each"
        if exchange["kind"] == LATE:
            times = "a round whenever more images of learned classes have come, each"
        if rounds is not None:
            times = f"{rounds} round{'' if rounds == 1 else 's, each'}"
        fields = "".join(f", {f['name']} ({f['type']})" for f in exchange["fields"])
        out.print(f"{exchange['kind']}, {times}: {_sizes(exchange)}{fields}")


_CLASSES = (
    Column("class", "name", wraps=True),
    Column("train", lambda one: f"{one['train']:,}", right=True),
    Column("test", lambda one: f"{one['test']:,}", right=True),
)
_TENSORS = (
    Column("exchange"),
    Column("tensor", lambda one: f"{one['name']}{' (optional)' if one['optional'] else ''}"),
    Column("kind"),
    Column("shape", lambda one: " x ".join(str(size) for size in one["shape"])),
    Column("dtype"),
    Column("bytes", lambda one: _number(one["bytes"], at_most=one["at_most"]), right=True),
)


def _sizes(row: dict[str, Any]) -> str:
    most = bool(row.get("at_most"))
    tensors = _number(row["tensor_bytes"], at_most=most)
    return f"{tensors} bytes, sealed {_number(row['sealed_bytes'], at_most=most)}"


# --- what did leave -------------------------------------------------------------------------


def show_journal(journals: list[dict[str, Any]]) -> None:
    """Print the journals of some clients."""
    out = console()
    if not journals:
        out.print("No folder of this user is enrolled: nothing has left.")
    for journal in journals:
        out.print(f"{printable(journal['name'])}  ({printable(journal['data'])})", style="bold")
        if journal["left"]:
            out.print("this client has left its federation, or was never enrolled", style="dim")
        if journal["damaged"]:
            out.print(printable(journal["damaged"]), style="yellow")
        if journal["damaged_lines"]:
            out.print(f"{journal['damaged_lines']} lines are damaged", style="yellow")
        rows = journal["envelopes"]
        if not rows:
            out.print("nothing has left")
            continue
        show_table(out, rows, _ENVELOPES)
        sent = [row for row in rows if row["sent_at"]]
        total = sum(row["sealed_bytes"] or 0 for row in sent)
        out.print(f"{len(sent)} of {len(rows)} left, {total:,} bytes sealed")
        out.print(f"kept in {', '.join(journal['files'])}", style="dim")


def _what(row: dict[str, Any]) -> str:
    if row["kind"] is None:
        return f"{row['digest'][:12]} (its line is missing)"
    if row["kind"] == INVENTORY:
        return "classes"
    if row["kind"] == EVALUATE:
        return f"task {row['task']} evaluate"
    return f"task {row['task']} {row['kind']} {row['round']}"


def _holds(row: dict[str, Any]) -> str:
    kinds: Counter[str] = Counter()
    for tensor in row["tensors"]:
        kinds[tensor["kind"]] += tensor["bytes"]
    parts = [f"{kind} {count:,}" for kind, count in kinds.items()]
    parts += [f"{f['values']} {f['name']}" for f in row["fields"]]
    parts += [f"relay {printable(row['relay'])} can open it"] if row["relay"] else []
    return ", ".join(parts)


def _then(row: dict[str, Any]) -> str:
    if not row["sent_at"]:
        return "not sent"
    times = f" {len(row['sent_at'])} times" if len(row["sent_at"]) > 1 else ""
    answer = f", {row['answer']}" if row["answer"] else ""
    code = f" ({printable(row['code'])})" if row["code"] else ""
    return f"sent{times}{answer}{code}"


def _count(size: int | None) -> str:
    return "" if size is None else f"{size:,}"


_ENVELOPES = (
    Column("sealed (UTC)", lambda row: (row["sealed_at"] or "")[5:19].replace("T", " ")),
    Column("what", _what),
    Column("holds", _holds, wraps=True),
    Column("bytes", lambda row: _count(row["tensor_bytes"]), right=True),
    Column("sealed", lambda row: _count(row["sealed_bytes"]), right=True),
    Column("then", _then),
)
