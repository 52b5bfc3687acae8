"""Loading with `live`: layers stay quantized as they rest, where the model can attend to that."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from oracle import as_loaded
from zoo import by_name, prompt

from kvq import GenerateParameters, KVCacheContainer, TokenIterator
from kvq.cache.rotating import QuantizedRotatingKVCache
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.keys import as_ids

TOKENS = 300


def stored(tmp_path: Path, name: str, codec: str):
    llm = as_loaded(by_name(name))
    store = Store.create(tmp_path / "store")
    ids = as_ids(prompt(by_name(name), TOKENS))
    Prefiller(store, llm).run(PrefillRequest(token_ids=ids, name="one", codec=codec))
    return llm.model, store.match(llm.fingerprint, ids)


def following(model, cache: KVCacheContainer) -> list[int]:
    return list(TokenIterator([5, 6, 7], model, cache, GenerateParameters(max_tokens=6)))


@pytest.mark.parametrize("upto", [TOKENS, 299, 256, 70, 3])
def test_codes_are_loaded_as_they_rest(tmp_path: Path, upto: int) -> None:
    model, match = stored(tmp_path, "llama-64", "q8")
    live = match.load(model, upto=upto, live=True)
    plain = match.load(model, upto=upto)
    for one, other in zip(live, plain, strict=True):
        assert type(one) is QuantizedKVCache
        assert one.offset == other.offset == upto
        for codes, rows in ((one.keys, other.keys), (one.values, other.values)):
            decoded = mx.dequantize(*codes, group_size=one.group_size, bits=8)
            # Sinks rest as computed, so their codes are the only ones found anew.
            exact = mx.array_equal(decoded[:, :, 4:], rows[:, :, 4:upto])
            assert exact or mx.allclose(decoded, rows[:, :, :upto], atol=1e-6)
            assert mx.allclose(decoded, rows[:, :, :upto], atol=0.02)
    assert live.nbytes < plain.nbytes / 2
    assert following(model, live) == following(model, plain)


def test_windows_stay_quantized_too(tmp_path: Path) -> None:
    model, match = stored(tmp_path, "llama-sliding-32", "q8")
    live = match.load(model, live=True)
    kinds = {type(one) for one in live}
    assert kinds <= {QuantizedKVCache, QuantizedRotatingKVCache}
    assert len(kinds) == 2
    assert following(model, live) == following(model, match.load(model))


@pytest.mark.parametrize(
    ("name", "codec"),
    [("gpt_oss", "q8"), ("deepseek_v3", "q8"), ("llama-64", "q4"), ("llama-64", "raw")],
)
def test_what_cannot_be_attended_to_is_decoded(tmp_path: Path, name: str, codec: str) -> None:
    model, match = stored(tmp_path, name, codec)
    live = match.load(model, live=True)
    assert [type(one) for one in live] == [type(one) for one in make_prompt_cache(model)]
    assert following(model, live) == following(model, match.load(model))
