"""One member of a swarm."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fcil_client.daemon.client import Client
from fcil_client.state.home import Home
from fcil_client.swarm.seats import Seat
from fcil_protocol.errors import FcilError


@dataclass
class SwarmMember:
    """One seat of a swarm, with its client and its error.

    Attributes:
        home: set by its enrolment.
        client: set by its start.
        error: the reason why it takes no further part.
    """

    seat: Seat
    home: Home | None = None
    client: Client | None = None
    error: FcilError | None = None
    task: asyncio.Task[None] | None = None
