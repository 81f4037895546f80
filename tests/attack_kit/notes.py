"""A member that has the server write: class names, declines, messages that are refused.

Each function takes a client that is enrolled (`system.raw_client.RawClient`; `RawClient.of` makes
one of keys, id, certificate and address), connects, pours until it is cut or its bytes or
seconds are used up, and returns a `Poured`.
"""

import os

import numpy as np

from attack_kit.pouring import Hose
from fcil_protocol.messages.messages import Chunk, Decline, Progress, Update, Want
from fcil_protocol.payloads.builtin import INVENTORY
from fcil_protocol.payloads.payload import Payload

BYTES, SECONDS = 50_000_000, 60.0


async def _begin(client, most_bytes, most_s):
    await client.connect()
    answer = await client.greet()
    assert answer.type == "welcome", answer
    return Hose(client.link, most_bytes=most_bytes, most_s=most_s)


async def inventory_flood(client, *, names=999, most_bytes=BYTES, most_s=SECONDS):
    """Announce lists of class names that the run does not list, each with other names.

    The next one leaves when the last one was taken, so that none is passed over.
    """
    hose = await _begin(client, most_bytes, most_s)
    number = 0
    while hose.goes_on:
        number += 1
        listed = [f"{number:06d}-{k:04d}-{'x' * 88}" for k in range(names)]
        counts = np.ones(names, np.int64)
        payload = Payload({"train": counts, "test": counts}, {"names": listed})
        sealed, wrap = client.sealed(payload, client.core(INVENTORY))
        digest, header = sealed.parsed.update_id, sealed.parsed
        update = Update(digest=digest, unasked=len(header.hashes))
        await hose.send(client.frames(update, sealed.header, sealed.signature, wrap))
        for index in range(len(header.hashes)):
            start = index * header.chunk_bytes
            chunk = sealed.body[start : start + header.chunk_bytes]
            await hose.send(client.frames(Chunk(digest=digest, index=index), chunk))
        await hose.answered(number, "ack", "cut_off", "schema_mismatch", "malformed", "too_large")
    return await hose.close()


async def decline_flood(client, *, size=1900, most_bytes=BYTES, most_s=SECONDS, patient=False):
    """Decline rounds that were never asked of it, with long reasons.

    Patient: after every twentieth it asks for a part that there is not, and waits for that answer,
    so that little is unread.
    """
    hose = await _begin(client, most_bytes, most_s)
    number = 0
    while hose.goes_on:
        number += 1
        reason = f"{number} ".ljust(size, "x")
        decline = Decline(run=client.welcome.run, task=0, kind="train", round=0, reason=reason)
        await hose.send(client.frames(decline))
        if patient and number % 20 == 0:
            await hose.send(client.frames(Want(digest="0" * 64, chunks=[0])))
            await hose.answered(number // 20, "malformed", "cut_off")
    return await hose.close()


async def bad_signatures(client, *, most_bytes=BYTES, most_s=SECONDS, patient=False):
    """Say what is well formed and signed by nobody; patient: as for `junk`."""
    hose = await _begin(client, most_bytes, most_s)
    number = 0
    while hose.goes_on:
        number += 1
        said = Progress(
            run=client.welcome.run, task=0, kind="train", round=0, phase="working", done=0, total=1
        )
        body, _, *blobs = client.frames(said)
        await hose.send([body, os.urandom(64), *blobs])
        if patient:
            await hose.answered(number, "bad_signature", "cut_off")
    return await hose.close()


async def junk(client, *, most_bytes=BYTES, most_s=SECONDS, patient=False):
    """Say what is no message at all; patient: one after the other has been answered."""
    hose = await _begin(client, most_bytes, most_s)
    number = 0
    while hose.goes_on:
        number += 1
        await hose.send([os.urandom(60)] * (1 + number % 6))
        if patient:
            await hose.answered(number, "malformed", "cut_off")
    return await hose.close()
