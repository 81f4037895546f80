"""Text output of a dry run (`dry_run`) and of the journal (`sent_journal`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from fcil_adapters.contract import exemplars
from fcil_adapters.contract.privacy_terms import describe_terms
from fcil_protocol.messages.messages import PrivacyTerms
from fcil_protocol.payloads.builtin import EVALUATE, INVENTORY
from fcil_protocol.process.tables import console, show_table, table
from fcil_protocol.process.terminal import printable


def _number(count: int, *, at_most: bool = False) -> str:
    return f"{'<= ' if at_most else ''}{count:,}"


# --- what would leave -----------------------------------------------------------------------


def show_dry_run(row: dict[str, Any]) -> None:
    """Print what would leave."""
    out = console()
    on = f" on {row['backbone']}" if row["backbone"] else ""
    out.print("No class was announced and no update sent.", style="bold")
    out.print(f"{row['method']} {row['version']}{on}, {row['told']}.")
    out.print(f"Privacy: {describe_terms(PrivacyTerms.model_validate(row['privacy']))}.")
    if again := exemplars.told(row["exemplars"]):
        out.print(f"{row['method']} {again}.")
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


def _show_announcement(out: Console, said: dict[str, Any]) -> None:
    about = "" if said["exact"] else " (the images kept for tests are drawn when it joins)"
    out.print(f"\nThe classes, announced when it connects and when the folder changes{about}:")
    shown = table("class", "train", "test", right=("train", "test"), wraps=("class",))
    for one in said["classes"]:
        shown.add_row(printable(one["name"]), f"{one['train']:,}", f"{one['test']:,}")
    show_table(out, shown)
    out.print(f"{len(said['classes'])} names, {_sizes(said)}")
    for fault in said["refused"]:
        out.print(f"refused by this client: {fault}", style="bold red")


def _show_task(out: Console, task: dict[str, Any], *, at_most: bool) -> None:
    classes = f"{task['classes']} classes, {task['past']} before"
    if not task["known"]:
        classes += ", unless other clients bring more"
    images = _number(task["images"], at_most=at_most)
    held = f"this folder has {len(task['held'])} of them, {images} images to learn from"
    out.print(f"\nTask {task['task']} ({classes}): {held}")
    if not task["exchanges"]:
        out.print("nothing leaves")
        return
    shown = table("exchange", "tensor", "kind", "shape", "dtype", "bytes", right=("bytes",))
    for exchange in task["exchanges"]:
        _add_exchange(shown, exchange)
    show_table(out, shown)
    for exchange in task["exchanges"]:
        rounds = exchange["rounds"]
        times = "as many rounds as the server is set to, each"
        if rounds is not None:
            times = f"{rounds} round{'' if rounds == 1 else 's, each'}"
        fields = "".join(f", {f['name']} ({f['type']})" for f in exchange["fields"])
        out.print(f"{exchange['kind']}, {times}: {_sizes(exchange)}{fields}")


def _add_exchange(shown: Table, exchange: dict[str, Any]) -> None:
    name = exchange["kind"]
    for tensor in exchange["tensors"]:
        shown.add_row(
            name,
            f"{tensor['name']}{' (optional)' if tensor['optional'] else ''}",
            tensor["kind"],
            " x ".join(str(size) for size in tensor["shape"]),
            tensor["dtype"],
            _number(tensor["bytes"], at_most=tensor["at_most"]),
        )
        name = ""


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
        columns = ("sealed (UTC)", "what", "holds", "bytes", "sealed", "then")
        shown = table(*columns, right=("bytes", "sealed"), wraps=("holds",))
        for row in rows:
            shown.add_row(*_cells(row))
        show_table(out, shown)
        sent = [row for row in rows if row["sent_at"]]
        total = sum(row["sealed_bytes"] or 0 for row in sent)
        out.print(f"{len(sent)} of {len(rows)} left, {total:,} bytes sealed")
        out.print(f"kept in {', '.join(journal['files'])}", style="dim")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    at = (row["sealed_at"] or "")[5:19].replace("T", " ")
    sizes = (row["tensor_bytes"], row["sealed_bytes"])
    return at, _what(row), _holds(row), *("" if n is None else f"{n:,}" for n in sizes), _then(row)


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
    return ", ".join(parts)


def _then(row: dict[str, Any]) -> str:
    if not row["sent_at"]:
        return "not sent"
    times = f" {len(row['sent_at'])} times" if len(row["sent_at"]) > 1 else ""
    answer = f", {row['answer']}" if row["answer"] else ""
    code = f" ({printable(row['code'])})" if row["code"] else ""
    return f"sent{times}{answer}{code}"
