"""The forms in which feature products travel, and the checks of an upload (torch-free).

The triangle of G, or a factor F (r, D) with F^T F = G, whichever is smaller: the products of n
images have a factor of n rows. The rows are turned by the eigenvectors of their own products, so
that none of them is an image's feature. A truncated factor comes with the diagonal of the
remainder: without it, the omitted directions would count as empty, and the ridge would amplify the
class sums there.
"""

from __future__ import annotations

import numpy as np

from fcil_adapters.contract import Kind, Payload, TaskInfo, TensorSpec
from fcil_adapters.contract.averaging import Additive, NoisedSum, Sums
from fcil_adapters.numerics.class_reports import count_faults
from fcil_adapters.numerics.symmetric import pack_triangle
from fcil_adapters.numerics.weighted_sums import COUNT, IMAGES, count_sum, sum_spec
from fcil_adapters.toolkit.closed_form.options import AnalyticHparams
from fcil_adapters.toolkit.closed_form.sums import (
    F64,
    LOW,
    ProductSums,
    joined,
    split,
)

TRIANGLE, FACTOR, REST = "triangle", "factor", "rest"
GROUPS = "groups"  # number of groups of images, the rows of G; only with `group`


def largest_height(h: AnalyticHparams, width: int) -> int:
    """Return the largest height of a factor: as truncated, or no larger than the triangle."""
    return min(h.truncate, width) if h.truncate else (width + 1) // 2


def read_upload(h: AnalyticHparams, payload: Payload) -> ProductSums:
    """Return a client's upload as sums, independent of its form."""
    tensors = payload.tensors
    if TRIANGLE in tensors:
        triangle = joined(tensors, TRIANGLE)
    else:
        factor = joined(tensors, FACTOR)
        rest = joined(tensors, REST) if REST in tensors else np.zeros(factor.shape[1])
        triangle = pack_triangle(factor.T @ factor + np.diag(rest))
    order = np.argsort(payload.i64("classes"))
    counts = payload.i64("count")[order]
    return ProductSums(
        triangle,
        payload.i64("classes")[order],
        joined(tensors, "sum")[order],
        counts.astype(np.float64),
        float(payload.i64(GROUPS)[0] if h.group else counts.sum()),
    )


def additive_sums(h: AnalyticHparams) -> Additive | None:
    """Return the sums of uploads in any form; None where the options make them no sums."""
    if h.truncate or h.counts_unlabelled or h.weights == "capped":
        return None  # a truncated factor is cut by each client
    specs = [
        sum_spec(TensorSpec(TRIANGLE, Kind.GRAM, ("triangle_size",))),
        sum_spec(TensorSpec("sum", Kind.GRAM, ("c", "D"))),
        count_sum(COUNT, "c"),
        count_sum(IMAGES),
        *([count_sum(GROUPS)] if h.group else ()),
    ]

    def read(payload: Payload) -> dict[str, F64]:
        sums = read_upload(h, payload)
        images = payload.i64("n").astype(np.float64)
        order = np.argsort(np.argsort(payload.i64("classes")))  # back to the task's
        return {
            TRIANGLE: sums.triangle,
            "sum": sums.sums[order],
            COUNT: sums.counts[order],
            IMAGES: images,
            **({GROUPS: np.array([sums.observations])} if h.group else {}),
        }

    def write(sums: Sums, classes: tuple[int, ...]) -> Payload:
        tensors = split({TRIANGLE: sums[TRIANGLE], "sum": sums["sum"]})
        return Payload(
            {
                **tensors,
                "classes": np.asarray(classes, np.int64),
                COUNT: np.rint(sums[COUNT]).astype(np.int64),
                "n": np.rint(sums[IMAGES]).astype(np.int64),
                **({GROUPS: np.rint(sums[GROUPS]).astype(np.int64)} if h.group else {}),
            }
        )

    noised = (
        NoisedSum("sum", 1, ("sum", "sum" + LOW)),
        NoisedSum(TRIANGLE, 2, tuple(n + low for n in (TRIANGLE, FACTOR) for low in ("", LOW))),
    )
    return Additive(tuple(specs), read, write, noised)


def upload_faults(h: AnalyticHparams, payload: Payload, task: TaskInfo) -> list[str]:
    """Return one sentence for every way in which an upload contradicts itself or the task."""
    faults = count_faults(payload, task)
    forms = [name for name in (TRIANGLE, FACTOR) if name in payload.tensors]
    if len(forms) != 1:
        got = " and ".join(repr(name) for name in forms) or "none of them"
        faults.append(f"expected either 'triangle' or 'factor', got {got}")
    for name in forms if h.precision == "double" else ():
        low = payload.tensors.get(name + LOW)
        if low is None or low.shape != payload.tensors[name].shape:
            faults.append(f"'{name + LOW}' is not of the shape of {name!r}")
    counts = payload.i64("count")
    absent = counts == 0
    if ((counts > 0) & (counts < h.group)).any():
        faults.append(f"'count' has a class with fewer images than a group of {h.group}")
    if h.group:
        groups, most = int(payload.i64(GROUPS)[0]), int((counts // h.group).sum())
        least = int((counts > 0).sum())  # a sum of many clients' has fewer than its counts allow
        if not least <= groups <= most:
            faults.append(f"'groups' is {groups}, expected {least} to {most}")
    if joined(payload.tensors, "sum")[absent].any():
        faults.append("'sum' holds more than zero for a class without images")
    if REST in payload.tensors and (joined(payload.tensors, REST) < 0).any():
        faults.append("'rest' holds a negative square")
    return faults
