"""The third region of a session: a model that the server offers outside of rounds.

It is fetched while no round is under way, and given up with the link: the server offers it again
when the client has announced its classes.

    none --ModelOffered--> waiting --free--> fetching --ModelFetched--> keeping --ModelKept--> none
                              ^--------a round begins----|                 |
                              ^--------------------ModelFailed-------------+

`ClientSession` says when the client is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fcil_client.session.events import (
    FetchModel,
    Instruction,
    KeepModel,
    ModelFailed,
    ModelFetched,
    ModelKept,
)
from fcil_protocol.messages.messages import UseModel

TRIES = 3  # of one offer: a disk that damages files keeps doing so


class ModelStage(StrEnum):
    """Region three: progress of the offered model."""

    NONE = "none"
    WAITING = "waiting"
    FETCHING = "fetching"
    KEEPING = "keeping"


@dataclass
class ModelOffer:
    """The offered model and its progress.

    Attributes:
        model: set unless the state is `NONE`.
        failures: how often it could not be fetched or kept.
        following: a newer offer, which waits until this one is kept: the last one stays.
    """

    state: ModelStage = ModelStage.NONE
    model: UseModel | None = None
    failures: int = 0
    following: UseModel | None = None

    def begin(self, model: UseModel) -> None:
        """Take an offer; it replaces an earlier one."""
        if self.state is ModelStage.KEEPING:
            self.following = model
            return
        self.state, self.model, self.failures = ModelStage.WAITING, model, 0

    def end(self) -> None:
        """Forget the offer."""
        self.state, self.model, self.following = ModelStage.NONE, None, None

    def proceed(self, *, free: bool) -> list[Instruction]:
        """Fetch a waiting model if the client is free; a round that began took its place."""
        if not free:
            if self.state is ModelStage.FETCHING:
                self.state = ModelStage.WAITING
            return []
        if self.state is not ModelStage.WAITING or self.model is None:
            return []
        self.state = ModelStage.FETCHING
        return [FetchModel(self.model)]

    def on_fetched(self, event: ModelFetched) -> list[Instruction]:
        """Keep a model whose parts are on disk."""
        if self.state is not ModelStage.FETCHING or event.model is not self.model:
            return []
        self.state = ModelStage.KEEPING
        return [KeepModel(event.model)]

    def on_kept(self, event: ModelKept) -> None:
        """Be done with a model that was kept."""
        if event.model is self.model:
            following = self.following
            self.end()
            if following is not None:
                self.begin(following)

    def on_failed(self, event: ModelFailed) -> None:
        """Try again, a few times."""
        if event.model is not self.model:
            return
        self.failures += 1
        following = self.following
        if following is not None:
            self.end()
            self.begin(following)
        elif self.failures < TRIES:
            self.state = ModelStage.WAITING
        else:
            self.end()
