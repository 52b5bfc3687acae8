"""Capturing: after each chunk, the new tokens' rows of every layer, cut into blocks.

The recorder runs on the thread that runs the model. It builds arrays lazily, so that they are
evaluated together with the chunk, and hands their memory to the writer's threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvq import codec as codecs
from kvq.cache.coding import encode_files
from kvq.cache.dtypes import safetensors_name
from kvq.cache.groups import groups_of
from kvq.cache.leaves import leaf_caches
from kvq.cache.rows import GroupRows
from kvq.cache.staging import Outgoing
from kvq.errors import DamagedFile
from kvq.store.blockfile import BlockMeta, Tensor, read_header
from kvq.store.hold import touch
from kvq.store.keys import BLOCK, ROOT, TokenIds
from kvq.store.layout import BlockName, block_path
from kvq.store.space import Space
from kvq.store.writer import Writer

#: Tokens between two checkpoints of a recurrent state, from which a killed job goes on.
STATE_CHECKPOINT = 1024


@dataclass(frozen=True, kw_only=True)
class BuiltFile:
    """A file whose arrays are built, and perhaps not evaluated yet."""

    path: Path
    meta: BlockMeta
    #: Safetensors dtype name and shape of each tensor, by its name.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    #: Their bytes: bfloat16 as 16-bit words, because a memoryview has no name for it.
    outgoing: Outgoing
    checkpoint: bool


class Recorder:
    """Records one prompt into one space.

    `kept` are the kept positions (tokens); `all_windows` keeps every window record. Call `begin`
    with restored caches, or start at 0. For each chunk call `capture`, evaluate `arrays()` with the
    chunk, then `hand_over` what `take` gave. A chunk must end at each kept position if the model
    has states.
    """

    def __init__(
        self,
        *,
        space: Space,
        folder: Path,
        ids: TokenIds,
        kept: Sequence[int],
        writer: Writer,
        all_windows: bool = False,
    ) -> None:
        self.position = 0
        self._space = space
        self._needs = space.needs
        self._folder = folder
        self._ids = ids
        self._kept = frozenset(kept)
        self._writer = writer
        self._codec = codecs.get(space.codec)
        self._rows = [GroupRows(group) for group in groups_of(space.leaves)]
        self._all_windows = all_windows
        self._chain: list[BlockName] = []
        self._files: list[BuiltFile] = []
        self._checkpoints: list[tuple[int, Path]] = []
        self._last_state = 0

    def begin(self, caches: Sequence[Any], position: int) -> None:
        """Start at `position` with caches that were restored there."""
        self.position = self._last_state = position
        for start in range(0, position - BLOCK + 1, BLOCK):
            self._chain.append(self._name(start, start + BLOCK))
        for rows in self._rows:
            rows.take(leaf_caches(caches), position % BLOCK, position)

    def capture(self, caches: Sequence[Any], position: int) -> None:
        """Take the rows of the tokens up to `position`; build the blocks that they fill."""
        leaves = leaf_caches(caches)
        for rows in self._rows:
            rows.take(leaves, position - self.position, position)
        self.position = position
        first = len(self._chain)
        for start in range(first * BLOCK, position - BLOCK + 1, BLOCK):
            self._chain.append(self._name(start, start + BLOCK))
        self._build_blocks(first)
        for rows in self._rows:
            rows.drop_before(len(self._chain) * BLOCK)
        is_kept = position in self._kept
        if position % BLOCK and (position == len(self._ids) or (is_kept and self._needs.state)):
            block, start = self._leaf(), len(self._chain) * BLOCK
            if not touch(block_path(self._folder, block)):
                self._build_kv([block], start, position)
            self._build_window(block, start, position)
        if self._needs.state:
            self._build_state(leaves, is_kept)

    def keep_logits(self, logits: mx.array) -> None:
        """Keep the logits ([vocab]) after the last token captured."""
        block = self._leaf()
        self._build("logits", block, self.position - block.n, {"logits": logits})

    def arrays(self) -> list[mx.array]:
        """What the files built and the next `capture` read: evaluate it with the chunk."""
        built = [array for file in self._files for array in file.outgoing.arrays()]
        return built + [array for rows in self._rows for array in rows.arrays()]

    def take(self) -> list[BuiltFile]:
        """The files built since the last call."""
        files, self._files = self._files, []
        return files

    def hand_over(self, files: Sequence[BuiltFile]) -> None:
        """Give files to the writer, once their arrays are evaluated."""
        for file in files:
            sent = file.outgoing.send()
            tensors = [
                Tensor(name=name, dtype=dtype, shape=shape, data=partial(sent.data, name))
                for name, (dtype, shape) in file.tensors.items()
            ]
            self._writer.submit(
                file.path, file.meta, tensors, checkpoint=file.checkpoint, written=sent.done
            )
            if file.checkpoint:
                self._checkpoints.append((file.meta.end, file.path))
        # What is captured can be a chunk ahead of what is handed over.
        handed = max((file.meta.end for file in files), default=0)
        self._drop_checkpoints(handed - self._needs.window - STATE_CHECKPOINT - BLOCK)

    def stems(self) -> tuple[str, ...]:
        """`<key>.<n>.<first>` of every block up to the last token captured."""
        blocks = [*self._chain, *([self._leaf()] if self.position % BLOCK else [])]
        return tuple(block.file().split(".safetensors")[0] for block in blocks)

    def remove_checkpoints(self) -> None:
        """Once the cache is complete: remove this job's checkpoints, and a killed one's."""
        self._drop_checkpoints(self.position)
        for block in self._chain:
            for record in ("window", "state"):
                _remove(block_path(self._folder, block, record, ckpt=True))

    # Names

    def _name(self, start: int, stop: int) -> BlockName:
        parent = self._chain[start // BLOCK - 1].key if start else ROOT
        return BlockName.of(parent, self._ids[start:stop])

    def _leaf(self) -> BlockName:
        """The block that ends at the position: a full one, or a shorter one of its own."""
        if self.position % BLOCK == 0:
            return self._chain[-1]
        return self._name(len(self._chain) * BLOCK, self.position)

    # Records

    def _build_blocks(self, first: int) -> None:
        """The files of the full blocks from number `first` on, as far as the store lacks them."""
        missing = [
            number
            for number in range(first, len(self._chain))
            if not touch(block_path(self._folder, self._chain[number]))
        ]
        for run in _runs(missing):
            blocks = self._chain[run.start : run.stop]
            self._build_kv(blocks, run.start * BLOCK, run.stop * BLOCK)
        for number in range(first, len(self._chain)):
            self._build_window(self._chain[number], number * BLOCK, (number + 1) * BLOCK)

    def _build_kv(self, blocks: Sequence[BlockName], start: int, stop: int) -> None:
        """The `kv` files of consecutive blocks, which cover the tokens [start, stop)."""
        described, files = encode_files(self._codec, self._groups("kv"), start, stop)
        for number, (block, arrays) in enumerate(zip(blocks, files, strict=True)):
            self._build("kv", block, start + number * BLOCK, arrays, described)

    def _build_window(self, block: BlockName, start: int, stop: int) -> None:
        windows = self._groups("window")
        if not windows:
            return
        low = max(start, *(rows.low for rows in windows))
        if low >= stop:
            return
        checkpoint = not self._window_is_kept(start, stop)
        if not self._covered(block, low - start, checkpoint):
            described, (arrays,) = encode_files(self._codec, windows, low, stop)
            self._build("window", block, start, arrays, described, low - start, checkpoint)

    def _groups(self, record: str) -> list[GroupRows]:
        return [rows for rows in self._rows if rows.group.record == record]

    def _window_is_kept(self, start: int, stop: int) -> bool:
        if self._all_windows or start < self._needs.keep:
            return True
        reach = self._needs.window + BLOCK
        return any(start < kept and stop > kept - reach for kept in self._kept)

    def _covered(self, block: BlockName, low: int, checkpoint: bool) -> bool:
        """Whether the store has the block's window record from token `low` of the block on."""
        for ckpt in (False, True) if checkpoint else (False,):
            path = block_path(self._folder, block, "window", ckpt=ckpt)
            try:
                header = read_header(path)
            except (FileNotFoundError, DamagedFile):
                continue
            if header.meta.low <= low and touch(path):
                return True
        return False

    def _build_state(self, leaves: Sequence[Any], is_kept: bool) -> None:
        due = self.position % BLOCK == 0 and self.position - self._last_state >= STATE_CHECKPOINT
        if not (is_kept or due):
            return
        self._last_state = self.position
        arrays: dict[str, mx.array] = {}
        described = []
        for index, leaf in enumerate(self._space.leaves):
            if leaf.record == "state":
                slots = leaves[index].cache
                present = [slot for slot, array in enumerate(slots) if array is not None]
                described.append({"leaf": index, "slots": len(slots), "present": present})
                arrays |= {f"{index}.{slot}": slots[slot] for slot in present}
        block = self._leaf()
        start = self.position - block.n
        self._build("state", block, start, arrays, described, checkpoint=not is_kept)

    def _build(
        self,
        record: str,
        block: BlockName,
        start: int,
        arrays: Mapping[str, mx.array],
        groups: Sequence[Mapping[str, Any]] = (),
        low: int = 0,
        checkpoint: bool = False,
    ) -> None:
        path = block_path(self._folder, block, record, ckpt=checkpoint)
        if record in ("state", "logits") and touch(path):
            return
        meta = BlockMeta(
            record=record,
            space=self._folder.name,
            parent=block.parent,
            token_ids=self._ids[start : start + block.n],
            start=start,
            low=low,
            groups=tuple(groups),
        )
        file = BuiltFile(
            path=path,
            meta=meta,
            tensors={
                name: (safetensors_name(array.dtype), tuple(array.shape))
                for name, array in arrays.items()
            },
            outgoing=Outgoing({name: _words(array) for name, array in arrays.items()}),
            checkpoint=checkpoint,
        )
        self._files.append(file)

    def _drop_checkpoints(self, before: int) -> None:
        passed = [path for end, path in self._checkpoints if end <= before]
        self._checkpoints = [one for one in self._checkpoints if one[0] > before]
        for path in passed:
            _remove(path)


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as ranges without gaps."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield range(numbers[start], numbers[index - 1] + 1)
            start = index


def _words(array: mx.array) -> mx.array:
    """The array's bytes in C order. Lazy."""
    return mx.contiguous(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
