"""Leave a federation: tell the server, then remove keys, caches and state from this device.

Images stay where they are, and so do the journal of sent data, the spent privacy budget, and what
masked rounds must remember.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from fcil_client.link.visit import answer, visit
from fcil_client.membership.rotate_keys import rotate
from fcil_client.state import mask_secrets, peers, privacy_budget, sent_journal
from fcil_client.state.home import FORMER, Enrolment, Home
from fcil_client.state.mask_secrets import MaskFile
from fcil_protocol.errors import (
    CorruptFile,
    MembershipExpired,
    Revoked,
    UnknownClient,
    Unreachable,
)
from fcil_protocol.link.dial import Dial, dial
from fcil_protocol.link.zmq_link import LinkNews
from fcil_protocol.messages.messages import LEFT, Bye
from fcil_protocol.storage.atomic_files import storage_errors
from fcil_protocol.trust.keys import PrivateKeys

_TRIES = 3


async def notify_server(home: Home, enrolment: Enrolment, make: Dial = dial) -> None:
    """Tell the server that this client leaves; its key is refused from then on.

    The server takes the key off its list and cuts the connection. So does a fault of the network:
    only the refusal of another visit shows that the client has left.

    Raises:
        Unreachable: no address answers in time, or connections end before the server reads.
        TrustError: the peer is not the server.
    """
    try:
        for _ in range(_TRIES):
            async with visit(enrolment, PrivateKeys.load_or_new(home.keys_path), make) as (line, _):
                line.send(Bye(code=LEFT, reason="the client leaves the federation"))
                while not isinstance(news := await answer(line), LinkNews) or news.state != "down":
                    pass
        raise Unreachable("each connection ended before the server noted that the client leaves.")
    except (Revoked, MembershipExpired):
        return  # it is no longer a member
    except UnknownClient:
        if not home.next_keys_path.exists():
            return
        # A change of keys was interrupted, and the server knows the new ones.
        await rotate(home, enrolment, make)
        await notify_server(home, enrolment, make)


def clear(home: Home) -> list[Path]:
    """Remove the files of a client but those about what it has sent; return the journal's files.

    The same images may enrol again with another ticket: the spent epsilon stays spent, images in a
    masked sum of a run go into no second one, and pinned peers stay pinned.
    """
    kept = sent_journal.files(home.directory)
    with contextlib.suppress(CorruptFile):  # it stays as it is, and stops masked rounds
        MaskFile(home.directory).erase()
    stay = {privacy_budget.NAME, mask_secrets.NAME, peers.NAME, "lock", FORMER}
    home.note_leaving()
    with storage_errors("remove the client's files from", home.directory):
        # First the files that make it a client: a kill in between leaves caches, never a partial
        # client.
        for name in ("client.json", "keys.json"):
            (home.directory / name).unlink(missing_ok=True)
        for path in home.directory.iterdir():
            if path in kept or path.name in stay:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return kept
