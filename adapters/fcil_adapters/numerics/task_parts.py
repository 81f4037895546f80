"""A method's tasks in states and broadcasts: names of tensors and of parts (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fcil_adapters.contract import Part, State
from fcil_protocol.errors import SchemaMismatch
from fcil_protocol.payloads.payload import Array, Payload

CURRENT = "current"  # the part that the current task still changes


def task_part(task: int) -> str:
    """Return the name of the part that remains of a finished task."""
    return f"task/{task}"


def kept(name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return a part's tensors as a state names them: ``<part>.<tensor>``."""
    return {f"{name}.{tensor}": array for tensor, array in tensors.items()}


def kept_parts(state: State, name: str) -> tuple[Part, ...]:
    """Return the part whose tensors a state keeps as `kept` does; none before there are any."""
    start = f"{name}."
    tensors = {n.removeprefix(start): a for n, a in state.tensors.items() if n.startswith(start)}
    return (Part(name, Payload(tensors)),) if tensors else ()


def find_part(broadcast: Mapping[str, Payload], name: str) -> Payload:
    """Return a part of a broadcast.

    Raises:
        SchemaMismatch: it is missing.
    """
    if name not in broadcast:
        raise SchemaMismatch(
            f"the broadcast lacks the part {name!r}.",
            action="Fetch all parts of the state that the round starts from.",
        )
    return broadcast[name]


def of_all_tasks(broadcast: Mapping[str, Payload], kind: str = "task") -> list[Payload]:
    """Return the parts ``<kind>/0`` to ``<kind>/<t>``, t being the current task.

    Raises:
        SchemaMismatch: one is missing.
    """
    last = current_task(find_part(broadcast, CURRENT))
    return [find_part(broadcast, f"{kind}/{t}") for t in range(last + 1)]


def finished_and_current(broadcast: Mapping[str, Payload]) -> list[Payload]:
    """Return what remains of each finished task, in order, and then the current part.

    Raises:
        SchemaMismatch: one is missing.
    """
    current = find_part(broadcast, CURRENT)
    finished = range(current_task(current))
    return [*(find_part(broadcast, task_part(t)) for t in finished), current]


def meta_number(payload: Payload, name: str) -> int:
    """Return a whole number of a payload's or state's metadata."""
    value = payload.meta[name]
    assert isinstance(value, int)
    return value


def current_task(payload: Payload) -> int:
    """Return the index of a state's or part's task, -1 before the first."""
    return meta_number(payload, "task")


def tagged(tensors: Mapping[str, Array], task: int) -> Payload:
    """Return a state or part of a task."""
    return Payload(tensors, {"task": task})


def of_task(state: State, task: int, names: Iterable[str]) -> dict[str, Array]:
    """Return tensors that a state keeps for a task (``task.<t>.<name>``), by name."""
    return {name: state.tensors[f"task.{task}.{name}"] for name in names}


def with_task(state: State, task: int, tensors: Mapping[str, Array]) -> State:
    """Return the state with tensors of a task replaced or added."""
    named = {f"task.{task}.{name}": array for name, array in tensors.items()}
    return State({**state.tensors, **named}, state.meta)
