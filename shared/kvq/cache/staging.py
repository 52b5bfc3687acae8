"""The way between files and a graphics card with memory of its own (CUDA).

The threads that read and write files work on page-locked buffers, which the card reads and writes
itself, at the speed of its bus and beside its other work. MLX's own way there, managed memory,
moves page by page at a fraction of that. Where memory is unified (a Mac) there is no such detour,
and none is made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvq.cache.card import copy_to_host, is_reachable, lock, map_memory
from kvq.cache.device import is_discrete
from kvq.cache.dtypes import from_safetensors
from kvq.store.blockfile import TensorInfo

#: Bytes of free buffers that are kept for the next time: locking memory takes as long as using it.
KEPT_BYTES = 1 << 30

#: Bytes that one group of threads of the card copies.
_TILE = 16 << 10
_THREADS = 256
#: Tensors begin at multiples of this in a buffer, so that they are copied in whole words.
_ALIGNMENT = 256

_LOAD = """
  const size_t at = (size_t)blockIdx.x * 1024 + threadIdx.x;
  auto from = reinterpret_cast<const uint4*>(place[0]) + at;
  auto to = reinterpret_cast<uint4*>(out) + at;
  uint4 a = from[0], b = from[256], c = from[512], d = from[768];
  to[0] = a; to[256] = b; to[512] = c; to[768] = d;
"""
#: MLX does not say where on the card an array is; a kernel that it is given to knows.
_ADDRESS = "address[0] = reinterpret_cast<unsigned long long>(data);"


class Slot:
    """One buffer of `size` bytes: `view` is its memory, for threads that read and write files.

    `load` belongs to the thread that runs MLX.
    """

    def __init__(self, size: int) -> None:
        self.view: npt.NDArray[np.uint8] = map_memory(size)
        self.size = self.view.nbytes
        # Locked when the card first needs it: by then the reading threads have touched its pages.
        self._locked: bool | None = None

    def load(self, nbytes: int) -> mx.array:
        """The first `nbytes` as an array on the card (uint8, 1-D). Lazy: evaluate it before the
        buffer changes."""
        if not self._lock():
            return mx.array(self.view[:nbytes])
        tiles = -(-nbytes // _TILE)
        (data,) = _load_kernel()(
            inputs=[mx.array([self.view.ctypes.data], dtype=mx.uint64)],
            grid=(tiles * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(tiles * _TILE // 4,)],
            output_dtypes=[mx.uint32],
        )
        staged: mx.array = data.view(mx.uint8)
        return staged

    def store(
        self, arrays: Mapping[str, mx.array], addresses: Sequence[int]
    ) -> dict[str, memoryview]:
        """The bytes of evaluated, contiguous arrays here, by name; returns once they are here.

        `addresses` are where they are on the card, whose copy engine fetches them while it computes
        something else. Touches MLX only where the buffer cannot be locked.
        """
        places, at = {}, 0
        for name, array in arrays.items():
            places[name] = self.view[at : at + array.nbytes]
            at += _aligned(array.nbytes)
        if self._lock():
            copy_to_host(
                [
                    (place.ctypes.data, address, place.nbytes)
                    for place, address in zip(places.values(), addresses, strict=True)
                ]
            )
        else:
            for name, place in places.items():
                place[:] = np.array(arrays[name], copy=False).reshape(-1).view(np.uint8)
        return {name: place.data for name, place in places.items()}

    def _lock(self) -> bool:
        if self._locked is None:
            self._locked = lock(self.view)
        return self._locked


class Staging:
    """Buffers to take and to give back, from any thread; some of the free ones are kept."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._free: list[Slot] = []
        self._mutex = threading.Lock()

    def take(self, nbytes: int) -> Slot:
        """The smallest free buffer of at least `nbytes`, or a new one."""
        with self._mutex:
            fitting = [slot for slot in self._free if nbytes <= slot.size]
            if fitting:
                best = min(fitting, key=lambda slot: slot.size)
                self._free.remove(best)
                return best
        return Slot(nbytes)

    def give_back(self, slot: Slot) -> None:
        """Once neither the card nor a thread needs what is in it."""
        with self._mutex:
            self._free.append(slot)
            while sum(one.size for one in self._free) > self._kept_bytes:
                self._free.pop(0)


#: The buffers of this process.
STAGING = Staging()


class Outgoing:
    """A file's arrays, by name, on their way to the thread that writes it.

    Built lazily: evaluate `arrays()`, then `send`.
    """

    def __init__(self, arrays: Mapping[str, mx.array]) -> None:
        self._arrays = arrays
        apart = is_discrete() and is_reachable()
        self._addresses = [_address(one) for one in arrays.values()] if apart else []

    def arrays(self) -> list[mx.array]:
        return [*self._arrays.values(), *self._addresses]

    def send(self) -> Sent:
        """Call it on the thread that runs MLX; what it gives is for the one that writes."""
        return Sent(self._arrays, [np.array(one).item() for one in self._addresses])


class Sent:
    """The bytes of a file's arrays for the thread that writes it, which calls `data`, then `done`.

    Without a card to copy from (no `addresses`) they are the arrays' own memory.
    """

    def __init__(self, arrays: Mapping[str, mx.array], addresses: Sequence[int]) -> None:
        self._arrays = arrays
        self._addresses = addresses
        self._slot: Slot | None = None
        self._data: Mapping[str, Any] = {} if addresses else arrays

    def data(self, name: str) -> Any:
        """The bytes of one array, as anything that a memoryview can be made of."""
        if not self._data:
            self._slot = STAGING.take(sum(_aligned(one.nbytes) for one in self._arrays.values()))
            self._data = self._slot.store(self._arrays, self._addresses)
        return self._data[name]

    def done(self) -> None:
        """What `data` gave is read no more."""
        self._arrays, self._data = {}, {}
        if self._slot is not None:
            STAGING.give_back(self._slot)
            self._slot = None


def tensor_in(data: mx.array, info: TensorInfo) -> mx.array:
    """One tensor of a block file from its data section."""
    return data[info.start : info.end].view(from_safetensors(info.dtype)).reshape(info.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def _load_kernel() -> Any:
    return mx.fast.cuda_kernel("kvq_load", ["place"], ["out"], _LOAD)


@functools.cache
def _address_kernel() -> Any:
    return mx.fast.cuda_kernel(
        "kvq_address", ["data"], ["address"], _ADDRESS, ensure_row_contiguous=False
    )


def _address(array: mx.array) -> mx.array:
    """Where on the card `array` is, once evaluated, for as long as it exists ([1], uint64)."""
    (address,) = _address_kernel()(
        inputs=[array],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint64],
    )
    found: mx.array = address
    return found
