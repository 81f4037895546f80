"""A running client's status: for ``status``, for its supervisor, and in its notes."""

from __future__ import annotations

from typing import Any

from fcil_client.link.handshake import Terms
from fcil_client.session.machine import ClientSession
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.privacy_budget import PrivacyLimits
from fcil_protocol.process.terminal import count_of

# Reasons why a round can end without this client's update; the next round asks it again.
WITHOUT_US = {
    "late": "closed at its deadline, or by the operator, before this client's update came",
    "lost": "closed while this client was away for too long",
    "surplus": "closed while this client was at work, and needs its update no more",
}

_TERMS = (
    "run", "method", "backbone", "backbone_digest", "image_size", "privacy", "exemplars"
)  # fmt: skip


def line(session: ClientSession, counted: int) -> str:
    """Return the client's status in one line."""
    doing = f"{session.work.value} {session.key}" if session.key else session.work.value
    return f"link {session.link.value}; {doing}; {count_of(counted, 'update')} counted"


def membership(home: Home, enrolment: Enrolment) -> dict[str, Any]:
    """Return the client's identity, its federation, and the number of updates to send."""
    return {
        "client": enrolment.client_id,
        "name": enrolment.name,
        "federation": enrolment.federation,
        "server": list(enrolment.addresses),
        "data": enrolment.data,
        "directory": str(home.directory),
        "outbox": len(home.outbox()),
    }


def doing(session: ClientSession, progress: tuple[str, int, int] | None) -> dict[str, Any]:
    """Return the state of link and work."""
    return {
        "link": session.link.value,
        "work": session.work.value,
        "round": str(session.key) if session.key else None,
        "progress": list(progress) if progress else None,
    }


def terms_of(terms: Terms | None, limits: PrivacyLimits) -> dict[str, Any]:
    """Return the server's run, and its privacy terms next to the client's own limits."""
    if terms is None:
        return dict.fromkeys(_TERMS)
    used = terms.method.needs_backbone
    return {
        "run": terms.run,
        "method": terms.method.name,
        "backbone": terms.backbone.name,
        "backbone_digest": terms.backbone.digest if used else None,
        "image_size": terms.backbone.preprocessing.size if used else None,
        "privacy": {**terms.privacy.model_dump(), "own": vars(limits)},
        "exemplars": terms.method.exemplars(terms.hparams),
    }
