"""The rows of a linear head that grows with each task: tensors, schemas, reading (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fcil_adapters.contract import Context
from fcil_adapters.numerics.class_reports import count_spec
from fcil_protocol.payloads.payload import Array
from fcil_protocol.payloads.schema import Kind, TensorSpec

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

HEAD = ("head.weight", "head.bias")
HEAD_TENSORS = (*HEAD, "classes", "seen")


def head_specs(rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of `HEAD`; the symbols are ``rows`` and the width ``d``."""
    return (
        TensorSpec("head.weight", Kind.HEAD, (rows, "d")),
        TensorSpec("head.bias", Kind.HEAD, (rows,)),
    )


def row_specs(rows: str) -> tuple[TensorSpec, ...]:
    """Return the specs of `HEAD_TENSORS`."""
    return (*head_specs(rows), count_spec("classes", rows), count_spec("seen", rows))


@dataclass(frozen=True)
class HeadRows:
    """The linear head's rows of one task, or of several.

    Attributes:
        weight: (c, d), in the order of ``classes``.
        bias: (c,).
        classes: (c,) global ids.
        seen: (c,), True if any client ever had an image of the class.
    """

    weight: F32
    bias: F32
    classes: I64
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, tensors: Mapping[str, Array]) -> HeadRows:
        """Read the `HEAD_TENSORS`."""
        return cls(
            np.asarray(tensors["head.weight"], dtype=np.float32),
            np.asarray(tensors["head.bias"], dtype=np.float32),
            np.asarray(tensors["classes"], dtype=np.int64),
            np.asarray(tensors["seen"], dtype=np.int64).astype(bool),
        )

    def named(self) -> dict[str, Array]:
        """Return the `HEAD_TENSORS`, as they are kept and broadcast."""
        values = (self.weight, self.bias, self.classes, self.seen.astype(np.int64))
        return dict(zip(HEAD_TENSORS, values, strict=True))

    def chosen(self, rows: NDArray[np.bool_]) -> HeadRows:
        """Return some of the rows."""
        return HeadRows(self.weight[rows], self.bias[rows], self.classes[rows], self.seen[rows])

    def committed(self, ctx: Context) -> HeadRows:
        """Return the rows as clients will decode them."""
        return replace(
            self,
            weight=ctx.forms.commit(Kind.HEAD, self.weight),
            bias=ctx.forms.commit(Kind.HEAD, self.bias),
        )

    @classmethod
    def joined(cls, many: Sequence[HeadRows]) -> HeadRows:
        """Return the rows of several tasks below each other."""
        return cls(
            np.concatenate([one.weight for one in many]),
            np.concatenate([one.bias for one in many]),
            np.concatenate([one.classes for one in many]),
            np.concatenate([one.seen for one in many]),
        )
