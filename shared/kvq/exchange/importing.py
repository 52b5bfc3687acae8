"""From a stock prompt-cache file to blocks and a manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from kvq import codec as codecs
from kvq.cache.leaves import leaf_caches
from kvq.errors import PromptTooLong, StoreUnavailable, UsageError
from kvq.exchange.exporting import ORIGIN
from kvq.exchange.fitting import fitted
from kvq.exchange.reach import first_position, where
from kvq.exchange.record import record
from kvq.exchange.replay import QUANTIZED_TOLERANCE, TOLERANCE, check_beginning, replay
from kvq.model.loading import LoadedModel
from kvq.prefill.schedule import kept_positions
from kvq.prefill.spaces import ModelSpaces
from kvq.stock import PromptCacheFile, read_prompt_cache
from kvq.store import Manifest, Store
from kvq.store.keys import TokenIds, as_ids
from kvq.store.match import match_in_space

#: How often blocks are written that vanish before the manifest holds them.
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class ImportRequest:
    """How to store what a file holds. `ttl` is seconds from now."""

    name: str
    codec: str = "q8"
    ttl: float | None = None
    pin: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was stored. Sizes are bytes; `generation` is the file's.

    `notes` say what was lost before, and where the cache can be resumed if not anywhere.
    """

    name: str
    space: str
    codec: str
    tokens: int
    generation: str
    bytes: int
    bytes_written: int
    quality: Mapping[str, Any] | None
    notes: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Import:
    """A stock file as it is read for a model, before anything is stored.

    `tokens` is how many tokens its caches cover, None where they do not say; `ids` are those that
    the file itself holds, None where it holds none, as files that kvq did not write.
    """

    def __init__(self, llm: LoadedModel, file: str | os.PathLike[str]) -> None:
        self.path = Path(file)
        self._llm = llm
        self._file: PromptCacheFile = read_prompt_cache(file)
        self.tokens = self._file.tokens
        self.ids: TokenIds | None = self._file.token_ids

    def store(
        self, store: Store, request: ImportRequest, token_ids: Sequence[int] | TokenIds
    ) -> Imported:
        """Store the caches as those of `token_ids`; see `import_cache`."""
        began = time.monotonic()
        try:
            ids = self._checked(token_ids)
            bits = self._bits(request.codec)
            space = ModelSpaces(self._llm).of(request.codec)
            caches = fitted(self._file.cache, space, tokens=len(ids))
            tolerance = TOLERANCE if bits is None else QUANTIZED_TOLERANCE
            check_beginning(self._llm.model, caches, ids, tolerance=tolerance)
            replayed = replay(self._llm.model, caches, ids, space.codec, tolerance=tolerance)
        except UsageError as error:
            raise type(error)(f"{self.path}: {error}") from error
        first = first_position(caches)
        kept = tuple(one for one in kept_positions(len(ids)) if one >= first)
        notes = (*self._came_from(bits), *where(caches, first, replayed.logits))
        written = 0
        for _ in range(_TRIES):
            written += record(store, space, caches, ids, kept=kept, logits=replayed.logits)
            found = match_in_space(store, space, store.space_folder(space), ids)
            if found.tokens < len(ids):
                continue
            now = time.time()
            manifest = Manifest(
                name=request.name,
                space=space.digest,
                fingerprint=self._llm.fingerprint,
                model=self._llm.name,
                codec=space.codec,
                dtype=space.dtype,
                tokens=len(ids),
                chain=found.stems(),
                kept=kept,
                nbytes=found.nbytes,
                created=now,
                expires=None if request.ttl is None else now + request.ttl,
                pinned=request.pin,
                reused_tokens=len(ids),
                lossy_prefix_tokens=0 if bits is None else len(ids),
                quality=replayed.quality,
                notes=(*found.notes(), *notes),
                metadata=request.metadata,
            )
            if store.publish_held(manifest):
                return self._imported(manifest, written, time.monotonic() - began)
        raise StoreUnavailable(
            f"{store.path}: blocks vanish while they are in use ({found.reason.message}): is the "
            "disk sound, and is a sweep running with too short a grace period?"
        )

    def _imported(self, manifest: Manifest, written: int, seconds: float) -> Imported:
        return Imported(
            name=manifest.name,
            space=manifest.space,
            codec=manifest.codec,
            tokens=manifest.tokens,
            generation=self._file.generation,
            bytes=manifest.nbytes,
            bytes_written=written,
            quality=manifest.quality,
            notes=manifest.notes,
            seconds=seconds,
        )

    def _checked(self, token_ids: Sequence[int] | TokenIds) -> TokenIds:
        """The ids, which must be as many as the caches cover and those that the file names."""
        try:
            ids = as_ids(token_ids)
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not len(ids):
            raise UsageError("there are no tokens in it")
        if self.tokens not in (None, len(ids)):
            raise UsageError(f"its caches cover {self.tokens} tokens, not the {len(ids)} given")
        if self.ids is not None and not np.array_equal(self.ids, ids):
            raise UsageError("it holds the ids of its tokens, and they are not those given")
        limit = self._llm.facts.context_tokens
        if limit is not None and len(ids) > limit:
            raise PromptTooLong(f"{self.path}: {len(ids)} tokens, the model's context is {limit}")
        self._llm.facts.check_vocabulary(ids)
        origin = self._origin().get("fingerprint")
        if origin not in (None, self._llm.fingerprint):
            raise UsageError(
                f"it was exported for another model (fingerprint {str(origin)[:12]}, not "
                f"{self._llm.fingerprint[:12]})"
            )
        return ids

    def _bits(self, codec: str) -> int | None:
        """Bits a value that the file's rows went through, None for rows as computed.

        Raises UsageError where `codec` would claim more than that.
        """
        leaves = leaf_caches(self._file.cache)
        bits = [int(leaf.bits) for leaf in leaves if isinstance(leaf, QuantizedKVCache)]
        origin = self._origin().get("codec")
        if origin in codecs.names() and (stored := codecs.get(origin).bits) is not None:
            bits.append(stored)
        if not bits:
            return None
        wanted = codecs.get(codec).bits
        if wanted is None or wanted > min(bits):
            fitting = [
                name
                for name in codecs.names()
                if (one := codecs.get(name).bits) is not None and one <= min(bits)
            ]
            advice = f"use --codec {fitting[0]}" if fitting else "no codec holds so little"
            raise UsageError(
                f"its values went through {min(bits)} bits, so they are not what codec {codec} "
                f"promises to others who share its blocks: {advice}"
            )
        return min(bits)

    def _origin(self) -> Mapping[str, Any]:
        metadata = self._file.metadata
        origin = metadata.get(ORIGIN) if isinstance(metadata, dict) else None
        return origin if isinstance(origin, dict) else {}

    def _came_from(self, bits: int | None) -> tuple[str, ...]:
        note = f"imported from a prompt-cache file of generation {self._file.generation}"
        return (note if bits is None else f"{note}, whose values went through {bits} bits",)


def import_cache(
    store: Store,
    llm: LoadedModel,
    file: str | os.PathLike[str],
    request: ImportRequest,
    *,
    token_ids: Sequence[int] | TokenIds | None = None,
) -> Imported:
    """Store what a stock prompt-cache file of any generation holds, as if kvq had prefilled it.

    `token_ids` are those of the tokens that the caches cover; None takes them from the file, where
    it has them. First and last tokens are fed to the model again, and nothing is stored unless
    their rows are the file's.

    A file holds its layers at one position only. Full-attention layers can be cut anywhere all the
    same, but a sliding window that has wrapped and a recurrent state cannot: such a cache is
    matched by prompts that begin with all of its tokens, which the notes then say. The logits after
    the last token, which no stock file has, are computed by feeding that token again; where the
    caches cannot go back by one (recurrent states), a repetition of the very prompt finds none.

    Raises FileFormatError for a file that cannot be read; UsageError for token ids that do not fit,
    caches of another model, or values that were quantized more than the codec; StoreError.
    """
    found = Import(llm, file)
    ids = found.ids if token_ids is None else token_ids
    if ids is None:
        raise UsageError(
            f"{file} does not say which tokens its caches cover: give their ids, or the text"
        )
    return found.store(store, request, ids)
