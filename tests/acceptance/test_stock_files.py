"""Files of mlx-lm's own commands, in and out, with a real model whose window has wrapped."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from commandline import CommandLine, read_lines

import kvq

pytestmark = [pytest.mark.model, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "producer" / "examples" / "prompts.jsonl"


def mlx_lm(name: str, *arguments: object) -> None:
    """Run `mlx_lm NAME ...` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"mlx_lm.{name}", *map(str, arguments)])
        import_module(f"mlx_lm.{name}").main()


@pytest.fixture(scope="module")
def prompt() -> str:
    lines = {line["custom_id"]: line["prompt"] for line in read_lines(EXAMPLES)}
    return next(text for name, text in lines.items() if name.startswith("clock"))


@pytest.fixture(scope="module")
def stock(demo_model: Path, prompt: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `mlx_lm cache_prompt` makes of the prompt."""
    path = tmp_path_factory.mktemp("stock") / "clock.safetensors"
    mlx_lm("cache_prompt", "--model", demo_model, "--prompt", prompt, "--prompt-cache-file", path)
    return path


def generated(capsys: pytest.CaptureFixture[str], file: Path) -> str:
    """What `mlx_lm generate` says after the cached prompt and a few words more."""
    capsys.readouterr()
    mlx_lm("generate", "--prompt-cache-file", file, "--prompt", " On Sundays", "--max-tokens", 6)
    return capsys.readouterr().out.split("==========")[1]


def test_what_mlx_lm_cached_is_resumed_by_kvq_and_goes_back_unchanged(
    demo_model: Path,
    prompt: str,
    stock: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kvq_command = CommandLine(tmp_path)
    store, back = tmp_path / "store", tmp_path / "back.safetensors"
    done = kvq_command("import", stock, "-m", demo_model, "-s", store, "--create-store",
                       "--codec", "raw", "--prompt", prompt, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["tokens"] > 512
    assert f"after all of its {facts['tokens']} tokens, not before" in " ".join(facts["notes"])

    llm = kvq.open(str(demo_model), store=store)
    resumed = [chunk.token for chunk in llm.stream(prompt, max_tokens=6)]
    assert llm.last is not None
    assert llm.last.reused_tokens == facts["tokens"]
    assert resumed == [chunk.token for chunk in llm.stream(prompt, max_tokens=6, reuse=False)]

    done = kvq_command("export", facts["name"], back, "-s", store)
    assert done.returncode == 0, done.stderr
    assert generated(capsys, back) == generated(capsys, stock)
