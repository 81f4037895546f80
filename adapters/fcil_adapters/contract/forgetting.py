"""Whether a run of a method can be made one in which a client never took part (torch-free).

What every client sends must follow from its own images alone. Then aggregating again what the
others have sent gives the state that they would have without it, to the last bit. Where clients
learn from what the server broadcast, each later update has something of everybody in it.

Uploads of a method that can forget say in ``count`` (c,) how many images of each class they are
of: in the order of ``classes`` (c,), or of the task's classes where they have no such tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fcil_protocol.payloads.payload import Payload


def entangled(_hparams: Any) -> str:
    """Return why a method cannot forget a client that does not say that it can."""
    return "its clients train on what the server broadcast, so later updates of all hold traces"


def separable(_hparams: Any) -> str:
    """Return that uploads follow from each client's own images alone."""
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
