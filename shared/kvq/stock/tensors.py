"""The safetensors layer: MLX arrays to a file and back."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from kvq.errors import CacheError, FileFormatError, StoreUnavailable, UsageError

_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.float64: "F64",
}

#: NumPy knows these, and bytes are bytes.
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def write_tensors(file: BinaryIO, tensors: Mapping[str, mx.array], header: dict[str, str]) -> None:
    """Write `tensors` and the strings of `header` as safetensors.

    One tensor at a time is evaluated, and cut buffers are not copied, so little memory is needed
    beside the cache itself. Raises CacheError for a dtype that safetensors does not have; OSError.
    """
    # The widest first: then every tensor starts at a multiple of its item size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.size)
    entries: dict[str, object] = {"__metadata__": header} if header else {}
    end = 0
    for name, array in ordered:
        if array.dtype not in _DTYPES:
            raise CacheError(f"arrays of {array.dtype} cannot be written to safetensors")
        start, end = end, end + array.nbytes
        entries[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, array in ordered:
        if array.size:
            for run in _runs(array):
                file.write(run)


def read_tensors(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors, lazy, and the strings of the header.

    Raises FileFormatError for a damaged file, UsageError where there is none, StoreUnavailable
    where it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path}: it is not a file")
        # MLX trusts a header. This checks sizes, offsets and dtypes against the file first.
        with safe_open(path, framework="numpy"):
            pass
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: not a whole safetensors file ({error}). It is cut short or damaged: "
            "write it again."
        ) from error
    arrays, header = loaded
    return arrays, header


def _runs(array: mx.array) -> Iterator[memoryview]:
    """The bytes of `array`, in order, in pieces that lie together in memory."""
    # Without a copy: what is cut from a padded buffer lies together for each head.
    bits: Any = array.view(_UNSIGNED[array.dtype.size])
    view = np.asarray(memoryview(bits))
    for index in np.ndindex(view.shape[:-2]):
        run: Any = np.ascontiguousarray(view[index])
        yield memoryview(run).cast("B")
