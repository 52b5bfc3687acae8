"""What MLX has no call for on a CUDA card: host memory that the card reaches itself, and copies
that leave its processors alone. A few functions of the driver's C interface, reached by ctypes,
from any thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: Memory is mapped in pages of this size where the system has them (Linux): far fewer to lock.
PAGE = 2 << 20

#: Flags of `cuMemHostRegister`: valid in every context of the process, and reachable by kernels.
_PORTABLE, _MAPPED = 1, 2
#: Flag of `cuStreamCreate`: does not wait for the context's default stream.
_NON_BLOCKING = 1


def is_reachable() -> bool:
    """Whether the driver is there to be asked."""
    return _driver() is not None


def map_memory(size: int) -> npt.NDArray[np.uint8]:
    """At least `size` bytes of zeros (uint8, 1-D), taken from the system when first touched."""
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def lock(memory: npt.NDArray[np.uint8]) -> bool:
    """Page-lock what `map_memory` gave until it is freed; False where that cannot be had."""
    if not is_reachable():
        return False
    address = ctypes.c_void_p(memory.ctypes.data)
    size = ctypes.c_size_t(memory.nbytes)
    flags = ctypes.c_uint(_PORTABLE | _MAPPED)
    if _entered().cuMemHostRegister_v2(address, size, flags) != 0:
        return False
    # The mapping goes right after its array, so the driver has to let go of it before.
    weakref.finalize(memory, _unlock, address).atexit = False
    return True


def _unlock(address: ctypes.c_void_p) -> None:
    _entered().cuMemHostUnregister(address)


def copy_to_host(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy (host address, card address, bytes) each, with the card's copy engine, and wait.

    The host memory is locked; what is at the card's addresses is computed. Raises RuntimeError.
    """
    _entered()
    stream = _copy_stream()
    for host, card, nbytes in copies:
        places = ctypes.c_void_p(host), ctypes.c_uint64(card)
        _call("cuMemcpyDtoHAsync_v2", *places, ctypes.c_size_t(nbytes), stream)
    _call("cuStreamSynchronize", stream)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _entered() -> ctypes.CDLL:
    """The driver, with the card's context as this thread's: the one that MLX works in too."""
    _call("cuCtxSetCurrent", _context())
    driver = _driver()
    assert driver is not None
    return driver


@functools.cache
def _context() -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@functools.cache
def _copy_stream() -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    return stream


def _call(name: str, *arguments: Any) -> None:
    """One function of the driver. Raises RuntimeError when it fails."""
    result = getattr(_driver(), name)(*arguments)
    if result != 0:
        raise RuntimeError(f"the CUDA driver failed at {name} (CUresult {result})")
