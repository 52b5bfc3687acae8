from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvq.errors import UsageError
from kvq.queue.results import PromptResult, State
from kvq_producer.finish import counts
from kvq_producer.output import failures, results_table, whole_file, write_results

STORED = PromptResult(
    custom_id="a",
    state=State.STORED,
    name="cache-a",
    facts={"tokens": 1200, "reused_tokens": 256, "bytes": 5_000_000, "seconds": 1.5},
)
FAILED = PromptResult(custom_id="b\x1b[2J", state=State.FAILED, code="x", message="bad\nthing")


def shown(results: list[PromptResult]) -> str:
    console = Console(width=120, file=None, record=True)
    with console.capture() as capture:
        console.print(results_table(results))
    return capture.get()


def test_results_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    write_results(file, [STORED, FAILED])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["custom_id"] for one in lines] == ["a", "b\x1b[2J"]
    before = file.read_bytes()

    def broken() -> object:
        yield STORED
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_results(file, broken())  # type: ignore[arg-type]
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"gone/x cannot be written"),
        whole_file(tmp_path / "gone" / "x"),
    ):
        pass


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_results(Path("-"), [STORED])
    assert json.loads(capsys.readouterr().out)["custom_id"] == "a"


def test_the_table_shows_figures_and_failures() -> None:
    text = shown([STORED, FAILED])
    for part in ("1,200", "256", "5.00 MB", "1.5 s", "cache-a", "failed: bad?thing"):
        assert part in text
    assert "\x1b[2J" not in text


def test_the_table_of_a_large_batch_shows_every_failure() -> None:
    many = [PromptResult(custom_id=f"n{n}", state=State.STORED) for n in range(200)]
    text = shown([*many, FAILED])
    assert "151 more" in text
    assert "failed: bad?thing" in text


def test_failures_are_named_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures([STORED, FAILED, *[FAILED] * 30]) == 31
    said = capsys.readouterr().err
    assert "kvq: b?[2J: failed: bad?thing" in said
    assert "and 11 more" in said
    assert failures([STORED]) == 0


def test_counts_add_up() -> None:
    facts = counts([STORED, STORED, FAILED])
    assert facts["states"] == {"stored": 2, "failed": 1}
    assert facts["tokens"] == 2400
    assert facts["reused_tokens"] == 512
