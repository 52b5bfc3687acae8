from __future__ import annotations

import pytest

from kvq.queue import tally


class Pipe:
    """Does what the script does."""

    def __init__(self) -> None:
        self.added: dict[str, dict[str, float]] = {}

    def eval(self, script: str, count: int, key: str, *arguments: str) -> None:
        assert "HINCRBYFLOAT" in script
        assert count == 1
        names, amounts = arguments[::2], map(float, arguments[1::2])
        self.added.setdefault(key, {}).update(zip(names, amounts, strict=True))


RESULT = {
    "status": "stored",
    "model": "org/model",
    "codec": "q4",
    "tokens": 1000,
    "prefilled_tokens": 400,
    "reused_tokens": 600,
    "bytes": 5000,
    "bytes_written": 2000,
    "prefill_seconds": 0.25,
    "seconds": 0.5,
    "quality": {"mean_kl": 0.002},
}


def test_a_lossy_result_is_counted_by_model_and_codec_and_its_divergence_by_class() -> None:
    pipe = Pipe()
    tally.count_result(pipe, "night", RESULT, caches=2)
    assert pipe.added["kvq:tally:night"] == {
        '["jobs","org/model","q4"]': 1,
        '["caches","org/model","q4"]': 2,
        '["tokens","org/model","q4"]': 1000,
        '["prefilled_tokens","org/model","q4"]': 400,
        '["reused_tokens","org/model","q4"]': 600,
        '["bytes","org/model","q4"]': 5000,
        '["bytes_written","org/model","q4"]': 2000,
        '["prefill_seconds","org/model","q4"]': 0.25,
        '["seconds","org/model","q4"]': 0.5,
        '["kl_sum","org/model","q4"]': 0.002,
        '["kl_class","org/model","q4","0.003"]': 1,
    }


@pytest.mark.parametrize(
    ("divergence", "bound"),
    [(0.0, "0.0001"), (0.0001, "0.0001"), (0.00011, "0.0003"), (1.0, "1"), (99.0, "+Inf")],
)
def test_a_class_includes_its_end(divergence: float, bound: str) -> None:
    assert tally.bound_of(divergence) == bound
