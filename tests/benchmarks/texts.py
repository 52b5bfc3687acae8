"""Real texts of several kinds that are on any machine with this project and Python."""

from __future__ import annotations

import argparse
import inspect
import json
import pydoc_data.topics
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _prose() -> str:
    lines = (ROOT / "producer" / "examples" / "prompts.jsonl").read_text().splitlines()
    return "\n\n".join(json.loads(line)["prompt"] for line in lines[::4])


def _reference() -> str:
    """Chapters of Python's language reference, which Python has for its own help."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in ("objects", "execmodel", "dynamic-features"))


def _markdown() -> str:
    pages = ("shared/FORMAT.md", "CONTRIBUTING.md", "README.md", "tests/benchmarks/README.md")
    return "\n\n".join((ROOT / page).read_text() for page in pages if (ROOT / page).exists())


def _code() -> str:
    return "\n\n".join(map(inspect.getsource, (subprocess, argparse, tarfile)))


def _numbers() -> str:
    """A table such as an instrument writes: times, readings that drift, states."""
    draw = random.Random(0)
    rows, level = ["time;level_m;flow_m3s;temp_c;state"], 2.4
    for minute in range(0, 15 * 400, 15):
        level = max(0.3, level + draw.gauss(0, 0.04))
        state = "HIGH" if level > 3 else "LOW" if level < 1 else "OK"
        day, rest = divmod(minute, 1440)
        rows.append(
            f"2024-03-{day + 1:02}T{rest // 60:02}:{rest % 60:02};{level:.3f};"
            f"{level**1.6 * 4.1:.2f};{8 + draw.gauss(0, 2):.1f};{state}"
        )
    return "\n".join(rows)


KINDS: dict[str, Callable[[], str]] = {
    "prose": _prose,
    "reference": _reference,
    "markdown": _markdown,
    "code": _code,
    "numbers": _numbers,
}
