"""Arrays whose memory nobody has filled, for rows that are read right into it.

MLX fills what it makes, on one thread; on a processor that takes longer than reading the rows. What
it loads it leaves to the reader: so this loads from a file that has a header and hands out nothing.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvq.cache.device import is_discrete
from kvq.cache.dtypes import safetensors_name

#: Up to here filling is faster than asking for what is not filled.
_FEWEST_BYTES = 32 << 20


def blank(shapes: Sequence[tuple[int, ...]], dtype: mx.Dtype) -> list[mx.array]:
    """Evaluated arrays of `shapes`; what is in them is anything.

    They are zeros where those take no time: few, or on a graphics card with memory of its own.
    """
    nbytes = sum(map(math.prod, shapes)) * dtype.size
    if is_discrete() or nbytes < _FEWEST_BYTES:
        zeros = [mx.zeros(shape, dtype) for shape in shapes]
        mx.eval(zeros)
        return zeros
    wanted = {str(n): shape for n, shape in enumerate(shapes) if math.prod(shape)}
    arrays: dict[str, mx.array] = {}
    if wanted:
        file = _Unread(wanted, dtype)
        arrays = mx.load(file, format="safetensors", stream=mx.cpu)  # type: ignore[arg-type, assignment]
    return [arrays.get(str(n), mx.zeros(shape, dtype)) for n, shape in enumerate(shapes)]


class _Unread(io.RawIOBase):
    """A safetensors file whose tensors' bytes are never written to where they are read to."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: mx.Dtype) -> None:
        entries: dict[str, Any] = {}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * dtype.size
            about = {"dtype": safetensors_name(dtype), "shape": shape, "data_offsets": (start, end)}
            entries[name] = about
        header = json.dumps(entries).encode()
        self._head = len(header).to_bytes(8, "little") + header
        self._size = len(self._head) + end
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        head = self._head[self._at : self._at + len(view)]
        view[: len(head)] = head
        self._at += len(view)
        return len(view)
