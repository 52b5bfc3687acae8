"""What MLX has no call for on a CUDA card: host memory that the card reaches itself, and copies
that leave its processors alone. A few functions of the driver's C interface, reached by ctypes.

Call these on a thread that has used MLX: the driver works in that thread's context.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Sequence

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
    driver = _driver()
    if driver is None:
        return False
    address = ctypes.c_void_p(memory.ctypes.data)
    size = ctypes.c_size_t(memory.nbytes)
    if driver.cuMemHostRegister_v2(address, size, ctypes.c_uint(_PORTABLE | _MAPPED)) != 0:
        return False
    # The mapping goes right after its array, so the driver has to let go of it before.
    weakref.finalize(memory, driver.cuMemHostUnregister, address).atexit = False
    return True


def copy_to_host(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy (host address, card address, bytes) each, with the card's copy engine, and wait.

    The host memory is locked; what is at the card's addresses is computed. Raises RuntimeError.
    """
    driver, stream = _driver(), _copy_stream()
    assert driver is not None
    for host, card, nbytes in copies:
        _check(
            driver.cuMemcpyDtoHAsync_v2(
                ctypes.c_void_p(host), ctypes.c_uint64(card), ctypes.c_size_t(nbytes), stream
            )
        )
    _check(driver.cuStreamSynchronize(stream))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def _copy_stream() -> ctypes.c_void_p:
    driver = _driver()
    assert driver is not None
    stream = ctypes.c_void_p()
    _check(driver.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING)))
    return stream


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"the CUDA driver failed to copy from the card (CUresult {result})")
