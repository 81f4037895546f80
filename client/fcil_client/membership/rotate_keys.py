"""Replacement of a client's keys while it stays the same member.

The new keys are on disk before the server receives them, so a kill at any moment leaves keys that
the server knows: the old ones, or those in ``keys.next.json``, which are then used.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from fcil_client.link.visit import answer, visit
from fcil_client.state.current_model import rewrap
from fcil_client.state.home import Enrolment, Home
from fcil_client.state.mask_secrets import MaskFile
from fcil_protocol.errors import LinkError, Locked, TrustError, UnknownClient, Unreachable
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.messages.messages import Ack, Rotate
from fcil_protocol.storage.atomic_files import DirectoryLock
from fcil_protocol.trust.keys import PrivateKeys, PublicKeys
from fcil_protocol.trust.ticket import PROOF, keys_digest, proof_text


async def finish(data: Path, seat: str = "") -> tuple[Path, ...]:
    """Complete key changes of a folder that a kill interrupted, as far as servers answer.

    Returns:
        Directories of the clients whose server did not answer: it may know only their new keys.
    """
    away = []
    for home in Home.known(data, seat):
        enrolment = home.enrolment()
        if enrolment is None or not list(home.directory.glob("keys.*.json")):
            continue
        # A running daemon has nothing to complete; it reports a server's refusal itself.
        with (
            suppress(TrustError, Locked),
            DirectoryLock.acquire(home.directory, "client"),
        ):
            if enrolment.ticket:
                home.take_keys(home.ticket_keys_path(enrolment.ticket))
            if home.next_keys_path.exists():
                try:
                    await rotate(home, enrolment)
                except LinkError:
                    away.append(home.directory)
    return tuple(away)


async def finish_first(
    data: Path, seat: str, enrol: Callable[[], Awaitable[tuple[Home, Enrolment]]]
) -> tuple[Home, Enrolment]:
    """Enrol a folder, or find its enrolment, once no change of its keys is unfinished.

    Raises:
        Unreachable: one is, since the server does not answer.
        FcilError: of ``enrol``.
    """
    away = await finish(data, seat)
    home, enrolment = await enrol()
    if home.directory in away:
        raise Unreachable(
            "a change of this client's keys was interrupted, and the server that may know only the "
            "new ones does not answer.",
            action="Start the server; the client finishes the change before it connects.",
        )
    return home, enrolment


async def rotate(home: Home, enrolment: Enrolment, make: Dial = dial) -> PublicKeys:
    """Replace a client's three key pairs; return the new public halves.

    Raises:
        Unreachable: no address answers in time; nothing changed, or try again.
        TrustError: the peer is not the server, or refuses this client.
    """
    old, new = map(PrivateKeys.load_or_new, (home.keys_path, home.next_keys_path))
    MaskFile(home.directory).keep_signer(old)  # the others of a masked round know no newer ones
    try:
        async with visit(enrolment, old, make) as (line, _):
            proof = new.sign(PROOF, proof_text(old.public.curve, new.public))
            public = new.public
            line.send(
                Rotate(
                    curve=public.curve,
                    signing=public.signing,
                    sealing=public.sealing,
                    proof=proof,
                )
            )
            wanted = keys_digest(new.public)
            while True:
                message = await answer(line)
                if isinstance(message, Ack) and message.digest == wanted:
                    break
    except UnknownClient:
        async with visit(enrolment, new, make):
            pass  # the server has accepted them; only its answer was lost
    rewrap(home, old, new.public)
    home.take_keys(home.next_keys_path, keep_state=True)
    return new.public
