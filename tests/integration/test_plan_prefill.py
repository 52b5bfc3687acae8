"""Plans carried out by the real Prefiller: what they promise is what happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from oracle import as_loaded
from zoo import ARCHITECTURES

from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.keys import BLOCK, TokenIds
from kvq_producer.plan import Group, JobKind, TokenizedPrompt, make_plan
from kvq_producer.plan.estimate import disk_use
from kvq_producer.sizes import shape_of

GROUP = Group(model="m", codec="raw")
KINDS = {"llama-64": "kv", "gemma3_text-32": "window", "gpt_oss": "window", "qwen3_next": "state"}


def batch() -> list[TokenizedPrompt]:
    """Two documents after one instruction, three questions on each, and a chat that grows."""
    random = np.random.default_rng(0)

    def text(tokens: int) -> TokenIds:
        return random.integers(3, 280, tokens).astype(np.uint32)

    start = text(700)
    documents = [np.concatenate([start, text(500)]) for _ in range(2)]
    prompts = [np.concatenate([one, text(60)]) for one in documents for _ in range(3)]
    chat = text(300)
    prompts += [chat, np.concatenate([chat, text(150)]), np.concatenate([chat, text(500)])]
    return [
        TokenizedPrompt(custom_id=f"p{number}", group=GROUP, ids=ids)
        for number, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("align", [BLOCK, 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_plan_prefills_no_token_twice_and_writes_what_it_said(name, align, tmp_path):
    architecture = next(one for one in ARCHITECTURES if one.name == name)
    store = Store.create(tmp_path / "store")
    prefiller = Prefiller(store, as_loaded(architecture), step=256)
    with make_plan(batch(), align=align) as plan:
        outcomes = [
            prefiller.run(
                PrefillRequest(
                    token_ids=plan.ids(job),
                    name=job.custom_ids[0] if job.kind is JobKind.PROMPT else None,
                    codec="raw",
                    keep=job.keep,
                )
            )
            for job in plan.jobs
        ]
        shape = shape_of({**architecture.fresh_config(), "dtype": "float32"})
        said = disk_use(plan, GROUP, shape, "raw")
        totals = plan.totals

    assert sum(one.prefilled_tokens for one in outcomes) == totals.new_tokens
    for job, outcome in zip(plan.jobs, outcomes, strict=True):
        assert outcome.prefilled_tokens <= job.prefill_tokens
    written = sizes_by_record(tmp_path)
    assert written["kv"] == pytest.approx(said.kv, rel=0.03)
    assert written["state"] == pytest.approx(said.state, rel=0.1)
    # Of the first block before a kept position, only the rows within reach are written.
    assert 0.7 * said.window <= written["window"] <= 1.01 * said.window
    assert sorted(store.names()) == [f"p{number}" for number in range(9)]


def sizes_by_record(folder: Path) -> Counter[str]:
    """Bytes of all block files, headers included."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*.safetensors"):
        words = path.name.split(".")
        sizes[words[3] if len(words) == 5 else "kv"] += path.stat().st_size
    return sizes
