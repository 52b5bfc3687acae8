"""What the lossy codecs take and cost on a real model's cache of 2,048 tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from commandline import read_lines

import kvq
from kvq.prefill import Prefiller, PrefillOutcome, PrefillRequest
from kvq.prefill.gate import REPLAY_TOKENS
from kvq.store import Match, Store
from kvq.store.blockfile import Header
from kvq.store.keys import TokenIds

pytestmark = [pytest.mark.model, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "producer" / "examples" / "prompts.jsonl"
TOKENS = 2048
#: Bits a value, scales and headers included.
MOST_BITS = {"q8": 8.6, "q4": 4.6}


@dataclass(frozen=True, kw_only=True)
class Stored:
    outcome: PrefillOutcome
    match: Match


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> kvq.LLM:
    return kvq.open(str(demo_model))


@pytest.fixture(scope="module")
def ids(llm: kvq.LLM) -> TokenIds:
    text = "\n\n".join(line["prompt"] for line in read_lines(EXAMPLES)[::4])
    found = llm.encode(text)
    assert len(found) >= TOKENS
    return found[:TOKENS]


@pytest.fixture(scope="module", params=MOST_BITS)
def stored(
    request: pytest.FixtureRequest,
    llm: kvq.LLM,
    ids: TokenIds,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stored:
    store = Store.create(tmp_path_factory.mktemp(request.param) / "store")
    wanted = PrefillRequest(token_ids=ids, name="it", codec=request.param)
    outcome = Prefiller(store, llm.loaded).run(wanted)
    return Stored(outcome=outcome, match=store.match(llm.fingerprint, ids))


def values(header: Header) -> int:
    """Numbers that a restore gets out of a file: rows, times what a token has in each layer."""
    rows = len(header.meta.token_ids) - header.meta.low
    return sum(
        rows * len(group["leaves"]) * group[side]["heads"] * group[side]["coding"]["dim"]
        for group in header.meta.groups
        for side in ("k", "v")
    )


def test_a_value_takes_the_bits_that_were_promised(stored: Stored) -> None:
    plan = stored.match.plan
    assert stored.match.tokens == TOKENS
    headers = {
        "kv": [part.header for part in plan.kv],
        "window": [part.header for part in plan.window],
    }
    most = MOST_BITS[stored.outcome.codec]
    for files in headers.values():
        assert files
        size = sum(one.path.stat().st_size for one in files)
        assert 8 * size / sum(map(values, files)) <= most
    # 3 full layers and 15 windows, keys and values of 256 each; no file has more than its rows.
    assert sum(map(values, headers["kv"])) == TOKENS * 3 * 2 * 256
    assert sum(map(values, headers["window"])) == 512 * 15 * 2 * 256


def test_the_manifest_has_a_figure_worth_having(stored: Stored) -> None:
    quality = stored.outcome.quality
    assert quality is not None
    assert quality["tokens"] == REPLAY_TOKENS
    assert 0 < quality["mean_kl"] <= quality["max_kl"] < math.inf
    assert quality["mean_kl"] < {"q8": 0.01, "q4": 0.1}[stored.outcome.codec]
    assert quality["top1"] >= {"q8": 0.95, "q4": 0.8}[stored.outcome.codec]


def test_restored_rows_are_near_the_computed_ones(
    stored: Stored, llm: kvq.LLM, ids: TokenIds
) -> None:
    import mlx.core as mx

    few = 64
    cache = stored.match.load(llm.model)
    fresh = kvq.KVCacheContainer.make(llm.model)
    llm.model(mx.array(ids[:few])[None], cache=fresh)
    full = [layer for layer, one in enumerate(fresh) if type(one).__name__ == "KVCache"]
    assert full == [5, 11, 17]
    near = {"q8": 0.01, "q4": 0.15}[stored.outcome.codec]
    for layer in full:
        for side in ("keys", "values"):
            ours, theirs = (
                np.array(getattr(one[layer], side)[..., :few, :].astype(mx.float32))
                for one in (cache, fresh)
            )
            assert np.linalg.norm(ours - theirs) <= near * np.linalg.norm(theirs)
            # The first tokens, on which attention leans most, rest as they were computed.
            assert np.allclose(ours[..., :4, :], theirs[..., :4, :], rtol=1e-4, atol=1e-4)
