"""One file of a store: a safetensors file whose header and tensor bytes are both digested.

The metadata has three strings: `kvq` (JSON: what the file is), `data` (xxh3-128 of the tensor
bytes) and `head` (xxh3-128 of the JSON header with this value's digits all 0). Any safetensors
reader opens it; `shared/FORMAT.md` is the specification.
"""

from __future__ import annotations

import errno
import json
import math
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.disk import UNREADABLE, open_to_read, publish
from kvq.store.keys import TokenIds, child_key, pack, unpack

#: Version of a block file's header. A reader refuses a greater one.
FORMAT = 1
#: A header longer than this is not one of ours.
MAX_HEADER = 1 << 24

_FIRST_READ = 8192
#: Bytes and views of one read call (a system takes at most 1,024 views).
_READ_BYTES = 1 << 20
_READ_VIEWS = 512
_BLANK = b"0" * 32
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}
_ITEM_BYTES |= {"F64": 8, "I64": 8, "U64": 8, "U16": 2, "I16": 2}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor to write: safetensors dtype name, shape, and its bytes in C order.

    `data` is anything that a memoryview can be made of, such as an evaluated array, or a function
    that gives it: asked for only when the file is written, by the thread that writes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def view(self) -> memoryview:
        """The tensor's bytes, flat."""
        if not self.nbytes:
            return memoryview(b"")
        return memoryview(self.data() if callable(self.data) else self.data).cast("B")


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
    views = [tensor.view() for tensor in tensors]
    for tensor, view in zip(tensors, views, strict=True):
        size = view.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        digest.update(view)
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
        [len(sealed).to_bytes(8, "little"), sealed, *views],
        durable=durable,
    )


def read_header(path: Path) -> Header:
    """Parse and verify the header of the block file `path`; reads no tensor.

    Raises FileNotFoundError, OSError, DamagedFile, and UnsupportedFormat for a newer format.
    """
    with open_to_read(path) as fd:
        first = os.pread(fd, _FIRST_READ, 0)
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > MAX_HEADER:
            raise DamagedFile(str(path), "the file is cut off or is not a block file")
        if len(first) < 8 + length:
            first += os.pread(fd, 8 + length - len(first), len(first))
        size = os.fstat(fd).st_size
    raw = first[8 : 8 + length]
    if len(raw) < length:
        raise DamagedFile(str(path), "the header is cut off")
    return _parse(path, raw, size)


def read_data(header: Header) -> npt.NDArray[np.uint8]:
    """The data section of a block file, its digest checked. Raises as `read_into`."""
    buffer = np.empty(header.data_bytes, np.uint8)
    read_into(header, [buffer.data])
    return buffer


def read_into(header: Header, views: Sequence[memoryview]) -> None:
    """Read the data section into `views` (contiguous bytes, in file order), then check its digest.

    The views must add up to the whole section. What they hold is worthless when this raises:
    OSError, or DamagedFile when the bytes are not those that were written. FileNotFoundError also
    when the file is another than the one whose header was read: a writer may replace a file by a
    better one of the same name.
    """
    digest = xxhash.xxh3_128()
    offset = header.data_start
    with open_to_read(header.path) as fd:
        for batch in _batches(views):
            size = sum(view.nbytes for view in batch)
            if os.preadv(fd, batch, offset) != size and not _read_rest(fd, batch, offset):
                _raise_mismatch(header)
            # Right after the read the bytes are still in the processor's cache.
            for view in batch:
                digest.update(view)
            offset += size
    assert offset == header.data_start + header.data_bytes
    if digest.hexdigest() != header.digest:
        _raise_mismatch(header)


def check_data(header: Header) -> None:
    """Read the data section piece by piece to check its digest. Raises as `read_into`."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(min(_READ_BYTES, header.data_bytes)))
    done = 0
    with open_to_read(header.path) as fd:
        while done < header.data_bytes:
            got = os.preadv(fd, [piece[: header.data_bytes - done]], header.data_start + done)
            if got == 0:
                break
            digest.update(piece[:got])
            done += got
    if digest.hexdigest() != header.digest:
        _raise_mismatch(header)


def _raise_mismatch(header: Header) -> NoReturn:
    """What was read is not what the header promised: the file is damaged, or another by now."""
    if read_header(header.path).digest != header.digest:
        raise FileNotFoundError(
            errno.ENOENT, "replaced since its header was read", str(header.path)
        )
    raise DamagedFile(str(header.path), "the digest of the tensor data does not hold")


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The views in groups for one call each: few calls, but little memory between two digests."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        for start in range(0, view.nbytes, _READ_BYTES):
            piece = view[start : start + _READ_BYTES]
            if batch and (size + piece.nbytes > _READ_BYTES or len(batch) == _READ_VIEWS):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.nbytes
    if batch:
        yield batch


def _read_rest(fd: int, batch: Sequence[memoryview], offset: int) -> bool:
    """A read came back short (a signal, a network share): read view by view until all is there.

    False when the file ends before.
    """
    for view in batch:
        done = 0
        while done < view.nbytes:
            got = os.preadv(fd, [view[done:]], offset + done)
            if got == 0:
                return False
            done += got
        offset += view.nbytes
    return True


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
            record=str(described["record"]),
            space=str(described["space"]),
            parent=bytes.fromhex(described["parent"]),
            token_ids=unpack(b64decode(described["tokens"], validate=True)),
            start=_count(described["start"]),
            low=_count(described["low"]),
            groups=tuple(described["groups"]),
        )
        tensors = {name: _tensor_info(entry) for name, entry in entries.items()}
        data_bytes = _without_holes(tensors)
        digest = str(metadata["data"])
    except UNREADABLE as error:
        raise DamagedFile(str(path), f"the header cannot be read ({error})") from error
    if file_bytes != 8 + len(raw) + data_bytes:
        raise DamagedFile(str(path), "the file's size is not what its header says")
    return Header(
        path=path,
        meta=meta,
        tensors=tensors,
        data_start=8 + len(raw),
        data_bytes=data_bytes,
        digest=digest,
    )


def _tensor_info(entry: Mapping[str, Any]) -> TensorInfo:
    start, end = (_count(offset) for offset in entry["data_offsets"])
    shape = tuple(_count(size) for size in entry["shape"])
    if end - start != _ITEM_BYTES[entry["dtype"]] * math.prod(shape):
        raise ValueError("a tensor's bytes do not fit its shape")
    return TensorInfo(dtype=entry["dtype"], shape=shape, start=start, end=end)


def _without_holes(tensors: Mapping[str, TensorInfo]) -> int:
    """Size of the data section, in bytes. Raises ValueError unless the tensors fill it."""
    position = 0
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start != position:
            raise ValueError("the tensors overlap or leave a hole")
        position = info.end
    return position


def _count(value: Any) -> int:
    """`value` itself, a whole number from 0 on. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
