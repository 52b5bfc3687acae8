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
from kvq.cache.dtypes import from_safetensors, to_array
from kvq.cache.groups import Group, tensor_name
from kvq.cache.landing import Landing
from kvq.cache.staging import Slot, Staging, is_discrete, staging_for, tensor_in
from kvq.codec import LayerCoding
from kvq.errors import DamagedFile
from kvq.store.blockfile import Header, TensorInfo, read_data, read_into
from kvq.store.parallel import ordered
from kvq.store.restorable import Part

#: Name of the reading threads.
_READERS = "kvq-read"

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

    for part, data in ordered(read, parts, threads=threads, name=_READERS):

        def host(info: TensorInfo, data: npt.NDArray[np.uint8] = data) -> mx.array:
            return to_array(data[info.start : info.end], from_safetensors(info.dtype), info.shape)

        _put(landings, part, host)
        mx.eval([landing.arrays() for landing in landings])


def _fill_staged(landings: list[Landing], parts: Sequence[Part], pool: ThreadPoolExecutor) -> None:
    staging = staging_for(max(part.header.data_bytes for part in parts))
    left = deque(parts)
    flying: deque[tuple[Part, Slot, Future[None]]] = deque()
    read: list[tuple[Part, Slot]] = []
    while left or flying:
        while left and staging.free:
            part, slot = left.popleft(), staging.take()
            view = slot.view[: part.header.data_bytes].data
            flying.append((part, slot, pool.submit(read_into, part.header, [view])))
        part, slot, future = flying.popleft()
        read.append((part, slot))
        try:
            future.result()
        except BaseException:
            _recall(staging, [slot for _, slot in read], flying)
            raise
        # Half of the buffers are copied from while the threads fill the other half.
        if len(read) > len(flying):
            _put_copies(landings, read)
            for _, slot in read:
                staging.give_back(slot)
            read.clear()


def _put_copies(landings: list[Landing], read: Sequence[tuple[Part, Slot]]) -> None:
    copies = [slot.copied(part.header.data_bytes) for part, slot in read]
    mx.eval(copies)
    for (part, _), data in zip(read, copies, strict=True):
        _put(landings, part, partial(tensor_in, data))
    arrays = [array for landing in landings for array in landing.arrays()]
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _recall(
    staging: Staging, slots: Sequence[Slot], flying: Sequence[tuple[Part, Slot, Future[None]]]
) -> None:
    """Give all buffers back once no thread writes to them any more."""
    for _, _, future in flying:
        if not future.cancel():
            future.exception()
    for slot in (*slots, *(slot for _, slot, _ in flying)):
        staging.give_back(slot)


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


def _put(landings: list[Landing], part: Part, tensor: Callable[[TensorInfo], mx.array]) -> None:
    """Decode a part on the device and put it in place. Lazy."""
    low = part.low - part.header.meta.low
    for number, landing in enumerate(landings):
        described = part.header.meta.groups[number]
        for index, (side, _) in enumerate(landing.group.sides()):
            coding = LayerCoding.from_json(described[side]["coding"])
            parts = {
                name: tensor(info) for name, info in _tensors(part.header, number, side).items()
            }
            kept = codecs.take(parts, low, low + part.high - part.low)
            landing.accept(index, part.start, kept, coding)


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
