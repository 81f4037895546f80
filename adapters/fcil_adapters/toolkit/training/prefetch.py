"""Images on their way to the device, one batch ahead of the computation (torch)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fcil_adapters.contract import ImageSet
from fcil_adapters.numerics.torch_numpy import to_torch

I64 = NDArray[np.int64]
T = TypeVar("T")

_END: Any = object()


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the same items in the same order; the next one is made while the caller uses one.

    A single thread makes all items one after the other, so their draws from a random generator do
    not depend on time. An error reaches the caller at its item.
    """
    with ThreadPoolExecutor(1, "ahead") as thread:
        try:
            coming = thread.submit(next, items, _END)
            while (item := coming.result()) is not _END:
                coming = thread.submit(next, items, _END)
                yield item
        finally:
            thread.shutdown(cancel_futures=True)


def on_device(array: NDArray[Any], device: str) -> Tensor:
    """Copy an array to a device; to a GPU from pinned memory, without waiting for the copy."""
    tensor = to_torch(array)
    if not device.startswith("cuda"):
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def plain_batches(data: ImageSet, size: int, device: str) -> Iterator[tuple[I64, Tensor]]:
    """Yield all images in their order, at most ``size`` at once: indices, uint8 (b, S, S, 3)."""

    def batches() -> Iterator[tuple[I64, Tensor]]:
        for start in range(0, len(data), size):
            index = np.arange(start, min(start + size, len(data)), dtype=np.int64)
            yield index, on_device(data.take(index), device)

    return ahead(batches())
