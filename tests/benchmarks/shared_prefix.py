"""`shared-prefix`: many prompts that begin alike, against one process or one prefill for each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

import kvq
from benchmarks.measure import Timing, folder_bytes, show
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.keys import as_ids

#: Runs of the slow counterparts that are measured; the others are taken to be like them.
SAMPLE = 2


def run(model: str, prompts: int, tokens: int, *, codec: str, text: Path) -> None:
    """Print the table: `prompts` prompts of `tokens` tokens that share nine tenths of them."""
    llm = kvq.open(model)
    words = llm.encode(text.read_text())
    while len(words) < 2 * tokens:
        words = as_ids([*words, *words])
    shared = tokens * 9 // 10
    batch = [
        np.concatenate([words[:shared], np.roll(words, number)[: tokens - shared]])
        for number in range(1, prompts + 1)
    ]
    with tempfile.TemporaryDirectory() as temp:
        store = Store.create(Path(temp) / "store")
        prefiller = Prefiller(store, llm.loaded)
        began = time.perf_counter()
        prefilled = prefiller.run(
            PrefillRequest(token_ids=batch[0][:shared], name=None, codec=codec)
        ).prefilled_tokens
        for number, ids in enumerate(batch):
            request = PrefillRequest(token_ids=ids, name=f"p{number}", codec=codec)
            prefilled += prefiller.run(request).prefilled_tokens
        ours = time.perf_counter() - began
        size = folder_bytes(store.path)
        whole, stock_size = _whole(llm.model, batch[:SAMPLE], Path(temp))
        process = _processes(model, llm, batch[:SAMPLE], Path(temp))
    trie = shared + prompts * (tokens - shared)
    scale = prompts / SAMPLE
    timings = [
        Timing(
            name=f"kvq {codec}",
            seconds=[ours],
            note=f"{size / 1e6:.0f} MB, {prefilled / trie:.3f} x the trie's tokens",
        ),
        Timing(
            name="model kept, each prompt whole",
            seconds=[whole * scale],
            note=f"{stock_size * scale / 1e6:.0f} MB in stock files; {SAMPLE} measured",
        ),
        Timing(
            name="mlx_lm.cache_prompt, one process each",
            seconds=[process * scale],
            note=f"{SAMPLE} measured",
        ),
    ]
    title = f"{prompts} prompts that share {shared} of {tokens} tokens"
    show(title, timings, against="model kept, each prompt whole")


def _whole(model: object, batch: list[np.ndarray], folder: Path) -> tuple[float, int]:
    began = time.perf_counter()
    size = 0
    for number, ids in enumerate(batch):
        caches = make_prompt_cache(model)
        for start in range(0, len(ids), 512):
            model(mx.array(ids[start : start + 512])[None], cache=caches)  # type: ignore[operator]
            mx.eval([cache.state for cache in caches])
        path = folder / f"whole-{number}.safetensors"
        save_prompt_cache(str(path), caches)
        size += path.stat().st_size
    return time.perf_counter() - began, size


def _processes(model: str, llm: kvq.LLM, batch: list[np.ndarray], folder: Path) -> float:
    began = time.perf_counter()
    for number, ids in enumerate(batch):
        subprocess.run(
            [
                *(sys.executable, "-m", "mlx_lm.cache_prompt", "--model", model),
                *("--prompt", llm.tokenizer.decode(ids.tolist())),
                *("--prompt-cache-file", str(folder / f"process-{number}.safetensors")),
            ],
            check=True,
            capture_output=True,
        )
    return time.perf_counter() - began
