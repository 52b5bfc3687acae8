"""Files of published mlx-lm versions, of mlx-swift-lm and of mlx-lm before 0.19.1."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from fixtures.stock_scenarios import Scenario, resume, scenario

from kvq.errors import FileFormatError
from kvq.stock import read_prompt_cache, trim_prompt_cache, write_prompt_cache

FOLDER = Path(__file__).parents[1] / "fixtures" / "stock"
FILES = sorted(path.name for path in FOLDER.iterdir())
#: The writer of a fixture, and the generation that its files belong to.
WRITERS = {"0.19.3": "A", "0.25.3": "A", "0.28.4": "B", "0.31.3": "B", "P": "P", "swift": "swift"}
#: A and B write these alike, so the older one is reported.
ALIKE = ("full", "recurrent", "hybrid", "chunked")


def parts(file: str) -> tuple[str, Scenario]:
    writer, _, name = file.removesuffix(".safetensors").partition("-")
    return writer, scenario(name)


def expected_generation(writer: str, case: Scenario) -> str:
    generation = WRITERS[writer]
    return "A" if generation == "B" and case.name in ALIKE else generation


def test_the_fixtures_are_all_there() -> None:
    assert {parts(file)[0] for file in FILES} == set(WRITERS)
    assert len(FILES) == 42


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_any_generation_resumes_as_if_uninterrupted(file: str) -> None:
    writer, case = parts(file)
    model = case.build()
    live = case.make(model)
    case.prefill(model, live)

    found = read_prompt_cache(FOLDER / file)

    assert [type(layer) for layer in found.cache] == [type(layer) for layer in live]
    assert found.tokens in (len(case.token_ids), None)
    assert found.token_ids is None
    assert found.metadata["model"] == f"tiny/{case.name}"
    assert found.generation == expected_generation(writer, case)
    tokens, logits = resume(model, live)
    resumed_tokens, resumed_logits = resume(model, found.cache)
    assert resumed_tokens == tokens
    # Another machine's BLAS rounds the rows in the file another way.
    assert np.abs(np.array(resumed_logits) - np.array(logits)).max() < 2e-5


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_any_generation_can_be_written_as_the_newest(file: str, tmp_path: Path) -> None:
    _, case = parts(file)
    model = case.build()
    found = read_prompt_cache(FOLDER / file)
    ids = case.token_ids
    path = write_prompt_cache(tmp_path / "c", found.cache, found.metadata, token_ids=ids)
    again = read_prompt_cache(path)
    assert again.generation == "C"
    assert again.metadata == found.metadata
    assert again.token_ids.tolist() == list(ids)
    tokens, logits = resume(model, found.cache)
    resumed_tokens, resumed_logits = resume(model, again.cache)
    assert resumed_tokens == tokens
    assert mx.array_equal(resumed_logits, logits)


@pytest.mark.parametrize("file", ["0.19.3-full.safetensors", "0.25.3-window-open.safetensors"])
def test_an_old_file_can_be_trimmed(file: str) -> None:
    _, case = parts(file)
    model = case.build()
    found = read_prompt_cache(FOLDER / file)
    live = case.make(model)
    case.prefill(model, live)
    assert trim_prompt_cache(found.cache, 2) == trim_prompt_cache(live, 2) == 2
    tokens, logits = resume(model, live)
    resumed_tokens, resumed_logits = resume(model, found.cache)
    assert resumed_tokens == tokens
    assert np.abs(np.array(resumed_logits) - np.array(logits)).max() < 2e-5


class TestP:
    def _write(self, path: Path, rows: int, **header: str) -> Path:
        tensors = {
            f"{layer}_{part}": mx.random.normal((1, 2, rows, 4))
            for layer in range(2)
            for part in ("keys", "values")
        }
        mx.save_safetensors(str(path), tensors, {"model": "m", **header})
        return path

    def test_without_a_maximum_size(self, tmp_path: Path) -> None:
        found = read_prompt_cache(self._write(tmp_path / "p.safetensors", 5, max_kv_size="None"))
        assert found.generation == "P"
        assert [layer.offset for layer in found.cache] == [5, 5]
        assert found.metadata == {"model": "m", "max_kv_size": "None"}

    def test_a_window_that_is_not_full(self, tmp_path: Path) -> None:
        found = read_prompt_cache(self._write(tmp_path / "p.safetensors", 5, max_kv_size="6"))
        layer = found.cache[0]
        assert (layer.offset, layer._idx, layer.max_size, layer.keep) == (5, 5, 6, 4)

    def test_a_full_window_does_not_say_what_came_before(self, tmp_path: Path) -> None:
        path = self._write(tmp_path / "p.safetensors", 6, max_kv_size="6")
        with pytest.raises(FileFormatError, match="its window of 6 tokens is full"):
            read_prompt_cache(path)

    def test_a_layer_that_is_missing(self, tmp_path: Path) -> None:
        tensors = {"1_keys": mx.zeros((1, 1, 2, 4)), "1_values": mx.zeros((1, 1, 2, 4))}
        mx.save_safetensors(str(tmp_path / "p.safetensors"), tensors)
        with pytest.raises(FileFormatError, match="layer 0 is missing"):
            read_prompt_cache(tmp_path / "p.safetensors")

    def test_keys_without_values(self, tmp_path: Path) -> None:
        mx.save_safetensors(str(tmp_path / "p.safetensors"), {"0_keys": mx.zeros((1, 1, 2, 4))})
        with pytest.raises(FileFormatError, match="keys or values, but not both"):
            read_prompt_cache(tmp_path / "p.safetensors")
