"""One file of a store: a safetensors file whose header and tensor bytes are both digested.

The metadata has three strings: `kvq` (JSON: what the file is), `data` (xxh3-128 of the tensor
bytes) and `head` (xxh3-128 of the JSON header with this value's digits all 0). Any safetensors
reader opens it; `shared/FORMAT.md` is the specification.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.disk import publish
from kvq.store.keys import TokenIds, child_key, pack, unpack

#: Version of a block file's header. A reader refuses a greater one.
FORMAT = 1
#: A header longer than this is not one of ours.
MAX_HEADER = 1 << 24

_FIRST_READ = 8192
_BLANK = b"0" * 32
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
_ITEM_BYTES |= {"F64": 8, "I64": 8, "U64": 8, "U16": 2, "I16": 2}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor to write: safetensors dtype name, shape, and its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor is: byte range [start, end) within the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class BlockMeta:
    """What a block file says of itself."""

    record: str
    space: str
    parent: bytes
    token_ids: TokenIds
    #: Position (tokens) of the block's first token in the prompt.
    start: int
    #: First token within the block whose rows the file holds (only `window` can be above 0).
    low: int = 0
    #: What the tensors are; see the record kinds in FORMAT.md.
    groups: tuple[Mapping[str, Any], ...] = ()

    @property
    def end(self) -> int:
        """Position (tokens) right after the block."""
        return self.start + len(self.token_ids)

    @property
    def key(self) -> bytes:
        return child_key(self.parent, self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Header:
    """A parsed and verified header. `data_start` and `data_bytes` are offsets in the file."""

    path: Path
    meta: BlockMeta
    tensors: Mapping[str, TensorInfo]
    data_start: int
    data_bytes: int
    digest: str = field(repr=False)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes


def write_block(
    path: Path, meta: BlockMeta, tensors: Sequence[Tensor], *, durable: bool = True
) -> int:
    """Publish a block file; returns its size in bytes. Raises OSError."""
    entries: dict[str, Any] = {}
    digest = xxhash.xxh3_128()
    offset = 0
    for tensor in tensors:
        size = memoryview(tensor.data).nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        digest.update(tensor.data)
        offset += size
    described = {
        "format": FORMAT,
        "record": meta.record,
        "space": meta.space,
        "parent": meta.parent.hex(),
        "start": meta.start,
        "low": meta.low,
        "tokens": b64encode(pack(meta.token_ids)).decode(),
        "groups": list(meta.groups),
    }
    metadata = {
        "kvq": json.dumps(described, separators=(",", ":")),
        "data": digest.hexdigest(),
        "head": _BLANK.decode(),
    }
    head = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    sealed = head.replace(_head_field(_BLANK), _head_field(_seal(head)), 1)
    return publish(
        path,
        [len(sealed).to_bytes(8, "little"), sealed, *(tensor.data for tensor in tensors)],
        durable=durable,
    )


def read_header(path: Path) -> Header:
    """Parse and verify the header of the block file `path`; reads no tensor.

    Raises FileNotFoundError, OSError, DamagedFile, and UnsupportedFormat for a newer format.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        first = os.pread(fd, _FIRST_READ, 0)
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > MAX_HEADER:
            raise DamagedFile(str(path), "the file is cut off or is not a block file")
        if len(first) < 8 + length:
            first += os.pread(fd, 8 + length - len(first), len(first))
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    raw = first[8 : 8 + length]
    if len(raw) < length:
        raise DamagedFile(str(path), "the header is cut off")
    return _parse(path, raw, size)


def read_data(header: Header, into: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
    """The data section of a block file, its digest checked.

    `into` is scratch memory (uint8, 1-D) that is used when it is long enough; the result is then
    a view of it. Raises OSError, and DamagedFile when the bytes are not those that were written.
    """
    size = header.data_bytes
    buffer = into[:size] if into is not None and len(into) >= size else np.empty(size, np.uint8)
    fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < size:
            got = os.preadv(fd, [buffer[done:].data], header.data_start + done)
            if got == 0:
                raise DamagedFile(str(header.path), "the tensor data is cut off")
            done += got
    finally:
        os.close(fd)
    if xxhash.xxh3_128_hexdigest(buffer.data) != header.digest:
        raise DamagedFile(str(header.path), "the digest of the tensor data does not hold")
    return buffer


def _head_field(digits: bytes) -> bytes:
    return b'"head":"' + digits + b'"'


def _seal(blank_head: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(blank_head).encode()


def _parse(path: Path, raw: bytes, file_bytes: int) -> Header:
    try:
        entries = json.loads(raw)
        metadata = entries.pop("__metadata__")
        digits = metadata["head"].encode()
        blank = raw.replace(_head_field(digits), _head_field(_BLANK), 1)
        if _seal(blank) != digits:
            raise DamagedFile(str(path), "the digest of the header does not hold")
        described = json.loads(metadata["kvq"])
        if described["format"] > FORMAT:
            raise UnsupportedFormat(
                f"{path}: block format {described['format']} is newer than this kvq reads "
                f"({FORMAT}); upgrade kvq on this machine"
            )
        meta = BlockMeta(
            record=described["record"],
            space=described["space"],
            parent=bytes.fromhex(described["parent"]),
            token_ids=unpack(b64decode(described["tokens"], validate=True)),
            start=described["start"],
            low=described["low"],
            groups=tuple(described["groups"]),
        )
        tensors = {name: _tensor_info(entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(str(path), f"the header cannot be read ({error})") from error
    data_bytes = max((info.end for info in tensors.values()), default=0)
    if file_bytes != 8 + len(raw) + data_bytes:
        raise DamagedFile(str(path), "the file's size is not what its header says")
    return Header(
        path=path,
        meta=meta,
        tensors=tensors,
        data_start=8 + len(raw),
        data_bytes=data_bytes,
        digest=metadata["data"],
    )


def _tensor_info(entry: Mapping[str, Any]) -> TensorInfo:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - start != _ITEM_BYTES[entry["dtype"]] * int(np.prod(shape, dtype=np.int64)):
        raise ValueError("a tensor's bytes do not fit its shape")
    return TensorInfo(dtype=entry["dtype"], shape=shape, start=start, end=end)
