"""`restore`: from disk to evaluated caches, against stock mlx-lm and bare reads of the files."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks.measure import Timing, Ways, drop_page_cache, show
from benchmarks.shapes import SHAPES, CacheOnly
from kvq.model.folder import ModelFacts
from kvq.model.loading import LoadedModel
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store

PART = 1 << 20
STOCK = "stock load_prompt_cache"


def run(shape: str, tokens: int, *, codec: str, runs: int, folder: str | None, cold: bool) -> None:
    """Print the table for one shape, length and codec."""
    timings = measure(shape, tokens, codec=codec, runs=runs, folder=folder, cold=cold)
    where = "from the disk" if cold else "from the page cache"
    show(f"restore {shape} {tokens} tokens {codec}, {where}", timings, against=STOCK)


def measure(
    shape: str, tokens: int, *, codec: str, runs: int, folder: str | None, cold: bool
) -> list[Timing]:
    """The timings of stock loading, kvq, and a bare read of the same files, in this order."""
    threads = min(16, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        model = CacheOnly(SHAPES[shape])
        store = Store.create(Path(temp) / "store")
        ids = np.arange(tokens, dtype=np.uint32)
        _fill(store, model, ids, codec)
        match = store.match("benchmark", ids)
        assert match.tokens == tokens, match.reason
        stock = Path(temp) / "stock.safetensors"
        restored = match.load(model)
        save_prompt_cache(str(stock), list(restored))
        _check_equal(restored, load_prompt_cache(str(stock)))
        nbytes = sum(cache.nbytes for cache in restored)
        del restored
        paths = [header.path for header in match.plan.files()]
        stored = sum(path.stat().st_size for path in paths)

        def fresh() -> None:
            if cold:
                drop_page_cache(Path(temp))

        def kvq() -> Any:
            fresh()
            caches = match.load(model)
            mx.eval([cache.state for cache in caches])
            return caches

        def stock_load() -> Any:
            fresh()
            caches = load_prompt_cache(str(stock))
            mx.eval([cache.state for cache in caches])
            return caches

        def bare() -> Any:
            fresh()
            with ThreadPoolExecutor(threads) as pool:
                return list(pool.map(read_whole, paths))

        ways = Ways(runs=runs)
        ways.add(STOCK, stock_load, stock.stat().st_size)
        ways.add(f"kvq {codec}", kvq, stored, f"cache {nbytes / 1e9:.2f} GB in memory")
        ways.add("bare read, same files", bare, stored, f"{threads} threads, no digest")
        return ways.time()


def loaded(model: Any) -> LoadedModel:
    """A model as the library takes it, without a folder."""
    return LoadedModel(
        name="benchmark",
        folder=Path(),
        fingerprint="benchmark",
        facts=ModelFacts(model_type="benchmark", context_tokens=None, vocab_size=None),
        nbytes=0,
        model=model,
        tokenizer=None,
    )


def _fill(store: Store, model: CacheOnly, ids: Any, codec: str) -> None:
    request = PrefillRequest(token_ids=ids, name="benchmark", codec=codec)
    Prefiller(store, loaded(model), step=2048).run(request)


def _check_equal(ours: Any, stock: Any) -> None:
    for one, other in zip(ours, stock, strict=True):
        for a, b in zip(one.keys_and_values(), other.keys_and_values(), strict=True):
            assert mx.array_equal(a, b)


def read_whole(path: Path) -> bytearray:
    """The file in memory of its own, as any reader that keeps it has to have it."""
    with open(path, "rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view = memoryview(data)
        while len(view) and (got := file.readinto(view[:PART])):
            view = view[got:]
    return data
