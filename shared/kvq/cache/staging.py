"""Memory that both the processor and a graphics card with memory of its own can reach, reused.

On such a card (CUDA) the memory of a new array is slow to come by and slow to fill from one
thread. A few buffers that stay are filled by the reading threads while the card copies from
others. Where memory is unified (a Mac) there is no such detour, and none is made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvq.cache.dtypes import from_safetensors
from kvq.store.blockfile import TensorInfo

#: Bytes that the buffers take together, where that makes at least `_FEWEST` of them.
STAGING_BYTES = 256 << 20
_FEWEST = 4


@dataclass(frozen=True)
class Slot:
    """One buffer: the array that the card reads and the same bytes for the reading threads."""

    array: mx.array
    view: npt.NDArray[np.uint8]

    def copied(self, nbytes: int) -> mx.array:
        """The first `nbytes` as an array in the card's own memory (uint8, 1-D). Lazy.

        One large kernel draws the pages over much faster than many small ones would.
        """
        words = self.array[: -(-nbytes // 4) * 4].view(mx.uint32) | 0
        return words.view(mx.uint8)


def tensor_in(data: mx.array, info: TensorInfo) -> mx.array:
    """One tensor of a block file from its data section."""
    return data[info.start : info.end].view(from_safetensors(info.dtype)).reshape(info.shape)


class Staging:
    """Buffers of `size` bytes each. Slots are taken and given back on the thread that runs MLX."""

    def __init__(self, size: int) -> None:
        self.size = size
        count = max(_FEWEST, STAGING_BYTES // max(size, 1))
        self._free: deque[Slot] = deque()
        for _ in range(min(count, 64)):
            array = mx.array(np.zeros(size, np.uint8))
            self._free.append(Slot(array, np.array(array, copy=False)))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot:
        return self._free.popleft()

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)


_kept: Staging | None = None


def staging_for(size: int) -> Staging:
    """Buffers of at least `size` bytes: those of the last call where they are large enough."""
    global _kept
    if _kept is None or _kept.size < size:
        _kept = None  # free the old ones before the new ones are made
        _kept = Staging(-(-size // (1 << 20)) << 20)
    return _kept


def is_discrete() -> bool:
    """Whether arrays live on a graphics card with memory of its own."""
    on_gpu: bool = mx.default_device() == mx.Device(mx.gpu)
    return on_gpu and not mx.metal.is_available()
