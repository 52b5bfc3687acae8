"""`ttft`: time to the first token, cold and resumed, over prompt lengths."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import kvq
from benchmarks.measure import machine
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store


def run(model: str, lengths: Sequence[int], *, codec: str, runs: int, text: Path) -> None:
    """Print the table for a model folder and the words of `text`, with a suffix of 16 tokens."""
    with tempfile.TemporaryDirectory() as temp:
        store = Store.create(Path(temp) / "store")
        llm = kvq.open(model, store=store)
        ids = llm.encode(text.read_text())
        while len(ids) < max(lengths) + 16:
            ids = kvq.store.keys.as_ids([*ids, *ids])
        prefiller = Prefiller(store, llm.loaded)
        table = Table(title=f"time to first token, {codec}\n{machine()}", title_justify="left")
        for column in ("tokens", "cold s", "resumed s", "load s", "x sooner"):
            table.add_column(column, justify="right")
        for length in lengths:
            prompt = ids[: length + 16]
            prefiller.run(PrefillRequest(token_ids=ids[:length], name=f"n{length}", codec=codec))
            cold, warm, load = [], [], []
            for _ in range(runs):
                for reuse, seconds in ((False, cold), (True, warm)):
                    for _ in llm.stream(prompt, max_tokens=1, reuse=reuse, codecs=[codec]):
                        pass
                    assert llm.last is not None
                    assert llm.last.reused_tokens == (length if reuse else 0)
                    seconds.append(llm.last.ttft_seconds)
                    if reuse:
                        load.append(llm.last.load_seconds)
            middle = [statistics.median(one) for one in (cold, warm, load)]
            table.add_row(
                str(length), *(f"{one:.3f}" for one in middle), f"{middle[0] / middle[1]:.1f}"
            )
        Console(width=100).print(table)
