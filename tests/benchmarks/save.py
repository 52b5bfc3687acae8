"""`prefill-overhead`: a whole job, files on the disk, against the bare prefill of its tokens.

`save` is the same with a stand-in whose rows cost nothing, so that what is left is saving.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from benchmarks.measure import Timing, folder_bytes, show
from benchmarks.restore import loaded
from benchmarks.shapes import SHAPES, CacheOnly, whole_model
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.writer import THREADS


def run(
    shape: str,
    tokens: int,
    *,
    codec: str,
    runs: int,
    folder: str | None,
    step: int,
    rows_only: bool = False,
) -> None:
    """Print the table. Every way starts from nothing; all of them write to the same folder."""
    dtype = mx.bfloat16 if mx.default_device().type == mx.gpu else mx.float32
    model = CacheOnly(SHAPES[shape]) if rows_only else whole_model(shape, dtype)
    # As a worker does, or Python now and then goes through all imported objects meanwhile.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for number in range(runs + 1):
        with tempfile.TemporaryDirectory(dir=folder) as temp:
            ids = np.random.default_rng(number).integers(0, 32000, tokens).astype(np.uint32)
            bare, caches = _bare(model, ids, step)
            stock, stock_bytes = _stock(caches, Path(temp) / "stock.safetensors")
            del caches
            mx.clear_cache()
            job, nbytes = _job(model, ids, codec, step, Path(temp) / "store")
            disk = _disk(Path(temp), nbytes)
        if number:
            for name, took in (
                ("bare", bare),
                ("stock", bare + stock),
                ("job", job),
                ("disk", disk),
            ):
                seconds.setdefault(name, []).append(took)
            sizes = {"stock": stock_bytes, "job": nbytes, "disk": nbytes}
    limit = [max(pair) for pair in zip(seconds["bare"], seconds["disk"], strict=True)]
    ratio = sorted(a / b for a, b in zip(seconds["job"], limit, strict=True))[runs // 2]
    timings = [
        Timing(name="bare prefill, nothing saved", seconds=seconds["bare"]),
        Timing(
            name="bare, then stock save_prompt_cache",
            seconds=seconds["stock"],
            nbytes=sizes["stock"],
            note="no fsync, no digest",
        ),
        Timing(
            name=f"kvq job {codec}",
            seconds=seconds["job"],
            nbytes=sizes["job"],
            note=f"{ratio:.2f} x the larger of bare and disk",
        ),
        Timing(
            name="disk: same bytes, write and fsync",
            seconds=seconds["disk"],
            nbytes=sizes["disk"],
            note=f"{THREADS} threads",
        ),
    ]
    what = "random rows" if rows_only else f"random weights, {dtype}"
    verb = "save" if rows_only else "prefill"
    title = f"{verb} {shape} {tokens} tokens {codec}, {what}"
    show(title, timings, against="bare prefill, nothing saved")


def _bare(model: Any, ids: Any, step: int) -> tuple[float, Any]:
    began = time.perf_counter()
    caches = make_prompt_cache(model)
    for start in range(0, len(ids), step):
        logits = model(mx.array(ids[start : start + step])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
    mx.eval(logits[0, -1])
    return time.perf_counter() - began, caches


def _stock(caches: Any, path: Path) -> tuple[float, int]:
    began = time.perf_counter()
    save_prompt_cache(str(path), caches)
    took = time.perf_counter() - began
    size = path.stat().st_size
    path.unlink()
    return took, size


def _job(model: Any, ids: Any, codec: str, step: int, path: Path) -> tuple[float, int]:
    store = Store.create(path)
    prefiller = Prefiller(store, loaded(model), step=step, prefix_memory=0)
    prefiller.spaces.of(codec)
    request = PrefillRequest(token_ids=ids, name="benchmark", codec=codec)
    began = time.perf_counter()
    outcome = prefiller.run(request)
    took = time.perf_counter() - began
    match = store.match("benchmark", ids)
    assert match.exact
    assert outcome.prefilled_tokens == len(ids)
    return took, folder_bytes(path)


def _disk(folder: Path, nbytes: int) -> float:
    """The time that the disk itself needs for that many bytes in files of a block's size."""
    size = 32 << 20
    data = os.urandom(1 << 20) * 32

    def write(number: int) -> None:
        fd = os.open(folder / f"disk-{number}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, data[: min(size, nbytes - number * size)])
        os.fsync(fd)
        os.close(fd)

    count = -(-nbytes // size)
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(count)))
    took = time.perf_counter() - began
    for number in range(count):
        (folder / f"disk-{number}").unlink()
    return took
