"""Conditions under which a method can forget a client exactly (torch-free).

A run then becomes one in which the client never took part. Every upload must follow from the
client's own images alone: then aggregating the other clients' uploads again gives the state that
they would have without it, to the last bit. Where clients learn from the server's broadcasts, each
later update holds traces of all clients.

Uploads of a method that can forget give in ``count`` (c,) the number of images of each class: in
the order of ``classes`` (c,), or of the task's classes where they have no such tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fcil_protocol.payloads.payload import Payload


def cannot_forget_reason(_hparams: Any) -> str:
    """Return why a method, unless it declares otherwise, cannot forget a client."""
    return "its clients train on what the server broadcast, so all later updates carry traces of it"


def separable(_hparams: Any) -> str:
    """Return an empty text: uploads follow from each client's own images alone."""
    return ""


def classes_with_images(upload: Payload, task: Sequence[int]) -> set[int]:
    """Return the ids of the classes of which an upload has images.

    Args:
        upload: of a method that can forget.
        task: the class ids of the upload's task, in order.
    """
    ids = upload.i64("classes").tolist() if "classes" in upload.tensors else list(task)
    counts = upload.i64("count").tolist() if "count" in upload.tensors else [0] * len(ids)
    return {c for c, n in zip(ids, counts, strict=True) if n > 0}
