"""What the device is that arrays live on."""

from __future__ import annotations

import functools

import mlx.core as mx

#: What a device is taken to have that does not say (the processor itself).
_UNKNOWN = 8 << 30


def is_discrete() -> bool:
    """Whether arrays live on a graphics card with memory of its own."""
    on_gpu: bool = mx.default_device() == mx.Device(mx.gpu)
    return on_gpu and not mx.metal.is_available()


@functools.cache
def memory_bytes() -> int:
    """The device's memory, in bytes."""
    facts = mx.device_info()
    return int(facts.get("memory_size") or facts.get("total_memory") or _UNKNOWN)
