"""From files to landings: threads read and check, and rows go where they belong.

Raw rows are read straight to their place where memory is unified. Quantized ones are decoded on
the device, block by block, so that little is in memory twice. A card with memory of its own gets
both through staging buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kvq import codec as codecs
from kvq.cache.device import is_discrete
from kvq.cache.dtypes import from_safetensors, to_array
from kvq.cache.groups import Group, tensor_name
from kvq.cache.landing import Coded, Landing
from kvq.cache.staging import STAGING, Slot, tensor_in
from kvq.codec import LayerCoding
from kvq.errors import DamagedFile
from kvq.store.blockfile import Header, TensorInfo, read_data, read_into
from kvq.store.parallel import ordered
from kvq.store.restorable import Part

#: Name of the reading threads.
_READERS = "kvq-read"

#: Bytes that the buffers of one restore take, where that makes a number of them within the limits.
STAGED_BYTES = 512 << 20
_FEWEST_SLOTS, _MOST_SLOTS = 4, 64

#: Files that are decoded at a time where no staging buffers are in between.
_DECODED_TOGETHER = 4

#: Gives a tensor of one file's data section.
Tensors = Callable[[TensorInfo], mx.array]

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def fill(landings: list[Landing], parts: Sequence[Part], threads: int) -> None:
    """Put the rows of every part into the landings, one for each group of the files.

    Raises DamagedFile, OSError; the landings are worthless then.
    """
    groups = [landing.group for landing in landings]
    for part in parts:
        _check_groups(part.header, groups)
    if is_discrete():
        with ThreadPoolExecutor(threads, thread_name_prefix=_READERS) as pool:
            _fill_staged(landings, parts, pool)
    elif _is_lossy(parts[0].header):
        _fill_decoded(landings, parts, threads)
    else:
        for landing in landings:
            landing.open_views()
        for _ in ordered(partial(_read_raw, landings), parts, threads=threads, name=_READERS):
            pass


def _fill_decoded(landings: list[Landing], parts: Sequence[Part], threads: int) -> None:
    def read(part: Part) -> npt.NDArray[np.uint8]:
        return read_data(part.header)

    batch: list[tuple[Part, Tensors]] = []
    for part, data in ordered(read, parts, threads=threads, name=_READERS):
        batch.append((part, partial(_host_tensor, data)))
        if len(batch) == _DECODED_TOGETHER or part is parts[-1]:
            _put(landings, batch)
            batch.clear()
            mx.eval([landing.arrays() for landing in landings])


def _fill_staged(landings: list[Landing], parts: Sequence[Part], pool: ThreadPoolExecutor) -> None:
    size = max(part.header.data_bytes for part in parts)
    slots = min(len(parts), max(_FEWEST_SLOTS, STAGED_BYTES // max(size, 1)), _MOST_SLOTS)
    free = [STAGING.take(size) for _ in range(slots)]
    left = deque(parts)
    flying: deque[tuple[Part, Slot, Future[None]]] = deque()
    read: list[tuple[Part, Slot]] = []
    try:
        while left or flying:
            while left and free:
                part, slot = left.popleft(), free.pop()
                view = slot.view[: part.header.data_bytes].data
                flying.append((part, slot, pool.submit(read_into, part.header, [view])))
            part, slot, future = flying[0]
            future.result()
            flying.popleft()
            read.append((part, slot))
            # Half of the buffers are copied from while the threads fill the other half.
            if len(read) > len(flying):
                _put_copies(landings, read)
                free += [slot for _, slot in read]
                read.clear()
    finally:
        for _, slot, future in flying:
            if not future.cancel():
                future.exception()  # until then a thread writes to the buffer
            free.append(slot)
        for slot in (*free, *(slot for _, slot in read)):
            STAGING.give_back(slot)


def _put_copies(landings: list[Landing], read: Sequence[tuple[Part, Slot]]) -> None:
    copies = [slot.load(part.header.data_bytes) for part, slot in read]
    mx.eval(copies)
    tensors = [partial(tensor_in, data) for data in copies]
    _put(landings, [(part, one) for (part, _), one in zip(read, tensors, strict=True)])
    arrays = [array for landing in landings for array in landing.arrays()]
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _read_raw(landings: list[Landing], part: Part) -> None:
    """Read a file straight to where its rows go, or through a buffer where only some are wanted."""
    header = part.header
    low, count = part.low - header.meta.low, part.high - part.low
    views: list[memoryview] = []
    copies: list[tuple[Landing, int, npt.NDArray[np.uint8]]] = []
    for number, landing in enumerate(landings):
        for side, (name, _) in enumerate(landing.group.sides()):
            info = header.tensors[tensor_name(number, name, "")]
            whole = low == 0 and info.shape[2] == count
            slabs = landing.slabs(side, part.start, count) if whole else None
            if slabs is None:
                buffer = np.empty(info.end - info.start, np.uint8)
                slabs = [buffer.data]
                words = buffer.view(_WORDS[from_safetensors(info.dtype).size])
                copies.append((landing, side, words.reshape(info.shape)))
            views.extend(slabs)
    read_into(header, views)
    for landing, side, rows in copies:
        landing.put_host(side, part.start, rows[:, :, low : low + count])


def _put(landings: list[Landing], batch: Sequence[tuple[Part, Tensors]]) -> None:
    """Decode parts, in the prompt's order, on the device and put them in place. Lazy."""
    for number, landing in enumerate(landings):
        for index, (side, _) in enumerate(landing.group.sides()):
            landing.accept(index, [_coded(part, read, number, side) for part, read in batch])


def _coded(part: Part, read: Tensors, group: int, side: str) -> Coded:
    header = part.header
    coding = LayerCoding.from_json(header.meta.groups[group][side]["coding"])
    parts = {name: read(info) for name, info in _tensors(header, group, side).items()}
    low = part.low - header.meta.low
    return Coded(part.start, codecs.take(parts, low, low + part.high - part.low), coding)


def _host_tensor(data: npt.NDArray[np.uint8], info: TensorInfo) -> mx.array:
    return to_array(data[info.start : info.end], from_safetensors(info.dtype), info.shape)


def _tensors(header: Header, group: int, side: str) -> dict[str, TensorInfo]:
    """The codec's parts of one side of a group, by the part's name."""
    whole = tensor_name(group, side, "")
    return {
        name[len(whole) + 1 :]: info
        for name, info in header.tensors.items()
        if name == whole or name.startswith(f"{whole}.")
    }


def _is_lossy(header: Header) -> bool:
    sides = (group[side]["coding"] for group in header.meta.groups for side in ("k", "v"))
    return any(coding["codec"] != "raw" for coding in sides)


def _check_groups(header: Header, groups: Sequence[Group]) -> None:
    """Raise DamagedFile unless a file's groups are those of the space."""
    expected = [(list(g.leaves), g.keys.heads, g.values.heads) for g in groups]
    found = [(g["leaves"], g["k"]["heads"], g["v"]["heads"]) for g in header.meta.groups]
    if expected != found:
        raise DamagedFile(str(header.path), "its layers are not those of its space")
