"""What a client may send in a round, and what it sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fcil_adapters.contract import TaskInfo
from fcil_protocol.envelope import Core
from fcil_protocol.ids import ClientId
from fcil_protocol.payload import Payload
from fcil_protocol.schema import PayloadSchema


@dataclass(frozen=True)
class Expectation:
    """What a payload of the open round must be."""

    task: TaskInfo
    schema: PayloadSchema
    dims: dict[str, int]
    check: Callable[[Payload, TaskInfo], list[str]]


@dataclass(frozen=True)
class Accepted:
    """A validated upload: an update to be made durable, or an inventory."""

    client: ClientId
    digest: str
    core: Core
    tensor_bytes: int
    sealed_bytes: int
    samples: int
