"""A client's home with a model in it, made as rounds make it, but without a server.

Classes are shades of grey: class c has the brightness c / 10, and a picture of it is named right
by the method `running_mean`.
"""

import io

import numpy as np
from PIL import Image

from client.daemon_kit import HPARAMS, RUN
from client.round_kit import FED, KEYS, SERVER, TERMS
from fcil_adapters.contract import Context, TaskInfo
from fcil_adapters.contract.backbone_info import NO_BACKBONE
from fcil_client.rounds.model_keeper import ModelKeeper
from fcil_protocol.envelopes.envelope import Core, seal, wrap_key
from fcil_protocol.envelopes.stored_envelope import write_envelope
from fcil_protocol.messages.messages import PartRef, RoundOpen
from fcil_protocol.payloads.payload import Payload, pieces

NAMES = ("black", "dark", "grey", "light", "white")


def picture(shade, noise=0, size=32):
    """Return a PNG of the brightness shade / 10, as bytes."""
    rng = np.random.default_rng(noise)
    pixels = np.full((size, size, 3), shade * 25.5) + rng.normal(0, 3, (size, size, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_shades(folder, shades, count):
    """Write a folder of classes, `count` pictures of the given shade in each; return it."""
    for name, shade in shades.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i}.png").write_bytes(picture(shade, noise=i))
    return folder


def means(classes):
    """Return a part of the method: the mean thumbnails of grey classes."""
    rows = np.repeat(np.array(classes, np.float32)[:, None] / 10, HPARAMS.side**2, axis=1)
    ids = np.array(classes, np.int64)
    return Payload({"mean": rows, "count": np.full(len(classes), 5, np.int64), "classes": ids})


def put_part(home, name, payload, *, state=0, keys=KEYS):
    """Seal a part for the client, leave it where downloads do, and return its reference."""
    core = Core(
        protocol=1, federation=FED, run=RUN, direction="broadcast", sender="server",
        sender_key=SERVER.public.fingerprint, recipient="client", method="running_mean",
        schema="0" * 64, task=0, round=0, kind="train", base=state, part=name,
    )  # fmt: skip
    sealed, key = seal(pieces(payload), core, SERVER)
    digest = str(sealed.parsed.update_id)
    wrap = wrap_key(key, sealed.header, keys.public)
    write_envelope(home.part_path(digest), sealed.stored(wrap))
    return PartRef(name=name, digest=digest, sealed_bytes=sealed.parsed.sealed_bytes)


def order_of(refs, *, task=1, kind="evaluate", number=0, state=3, run=RUN, classes=(3, 4), past=(0, 1, 2)):  # fmt: skip
    return RoundOpen(
        run=run, task=task, kind=kind, round=number, rounds=3, base=state, classes=list(classes),
        past=list(past), seed=[1], remaining_s=60.0, parts=list(refs),
    )  # fmt: skip


def context_of(order):
    task = TaskInfo(order.task, tuple(order.classes), tuple(order.past))
    return Context(order.kind, task, order.round, order.rounds, HPARAMS, NO_BACKBONE)


def keep(home, order, names=("black", "dark", "white"), ids=(0, 1, 4), weights=None):
    """Keep the model of an order whose parts are there."""
    keeper = ModelKeeper(home, FED, weights)
    keeper.keep(order, TERMS, context_of(order), dict(zip(names, ids, strict=True)))


def give_model(home, **changes):
    """Give a home the model after task 1: five shades, of which the client knows three."""
    KEYS.save(home.keys_path)
    refs = [put_part(home, "task/0", means((0, 1, 2))), put_part(home, "current", means((3, 4)))]
    order = order_of(refs, **changes)
    keep(home, order)
    return order
