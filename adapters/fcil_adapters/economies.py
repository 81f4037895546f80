"""What a method can do to send less, and what each step gives up (torch-free).

A manifest lists its economies from the least to the most costly in accuracy. A server with a
budget takes them in this order until a round fits (`fcil_server.budget`). Half precision is none
of them: it is the default ([wire] half).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Economy:
    """One step towards fewer bytes.

    Attributes:
        what: it, in a few words, such as "diagonal covariances".
        gives_up: what is lost by it, in a few words.
        options: option of the method -> value; it replaces what earlier steps set.
    """

    what: str
    gives_up: str
    options: Mapping[str, Any]
