"""MLX dtypes by name and by safetensors name, and arrays from plain memory."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_SAFETENSORS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "uint16": "U16",
    "int16": "I16",
    "uint8": "U8",
    "int8": "I8",
    "int64": "I64",
    "uint64": "U64",
    "bool": "BOOL",
}
_NAMES = {short: name for name, short in _SAFETENSORS.items()}


def dtype_name(dtype: mx.Dtype) -> str:
    """Such as `bfloat16`."""
    return str(dtype).rsplit(".", 1)[-1]


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype called `name`, such as `bfloat16`."""
    dtype: mx.Dtype = {"bool": mx.bool_}.get(name) or getattr(mx, name)
    return dtype


def safetensors_name(dtype: mx.Dtype) -> str:
    """Such as `BF16`. Raises KeyError for complex numbers, which no cache holds."""
    return _SAFETENSORS[dtype_name(dtype)]


def from_safetensors(short: str) -> mx.Dtype:
    """The MLX dtype of a safetensors dtype name."""
    return dtype_of(_NAMES[short])


def to_array(data: npt.NDArray[np.uint8], dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    """A new array of `dtype` and `shape` from raw bytes (uint8, 1-D), which are copied."""
    size = dtype.size
    words = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    return mx.array(data.view(words).reshape(shape)).view(dtype)
