"""The examples of the library's page, run one after the other as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commandline import CommandLine, write_lines
from tinymodel import tiny_model

PAGE = Path(__file__).parents[2] / "shared" / "README.md"
PROMPT = "The harbour master's log for Monday."


def test_the_examples_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, store = tiny_model(tmp_path / "tiny"), tmp_path / "store"
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt": PROMPT})
    ran = CommandLine(tmp_path)("run", prompts, "-m", model, "-s", store, "--codec", "raw")
    assert ran.returncode == 0, ran.stderr
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"<!-- example[^>]*-->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    names: dict[str, Any] = {"MODEL": str(model), "STORE": str(store)}
    said = []
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
        said.append(capsys.readouterr().out)
    whole = len(names["llm"].encode(PROMPT))
    assert f"{whole} of {whole} tokens were stored" in said[0]
    assert said[1].splitlines()[0].startswith(f"{whole} ")
    assert "'active'" in said[2] or "skipped" in said[2], said[2]
    assert said[3].startswith("C ")
    assert names["back"].metadata == {"note": "mine"}
