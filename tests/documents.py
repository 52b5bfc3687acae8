"""The parts of the documents that are made from the code. `python tests/documents.py` writes them.

Such a part stands between `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvq import settings
from kvq.errors import KvqError
from kvq.queue.results import error_code
from kvq.units import format_bytes
from kvq_producer.cli import COMMANDS, cli
from kvq_producer.metrics import table as metrics
from kvq_producer.sizes import shape_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "shared/README.md", "worker/README.md",
             "producer/README.md", "producer/examples/README.md", "deploy/README.md",
             "deploy/metrics.md", "shared/FORMAT.md")  # fmt: skip
_MADE = re.compile(r"(<!-- made: (?P<name>[a-z]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)

_LAYERS, _HEADS, _KV = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
#: What decides the sizes of well-known models' caches, from their published configs.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.2 3B": {"model_type": "llama", "hidden_size": 3072, _LAYERS: 28, _HEADS: 24, _KV: 8},
    "Llama 3.1 8B": {"model_type": "llama", "hidden_size": 4096, _LAYERS: 32, _HEADS: 32, _KV: 8},
    "Llama 3.3 70B": {"model_type": "llama", "hidden_size": 8192, _LAYERS: 80, _HEADS: 64, _KV: 8},
    "Qwen3 8B": {"model_type": "qwen3", "hidden_size": 4096, _LAYERS: 36, _HEADS: 32, _KV: 8,
                 "head_dim": 128},
    "Qwen3 32B": {"model_type": "qwen3", "hidden_size": 5120, _LAYERS: 64, _HEADS: 64, _KV: 8,
                  "head_dim": 128},
    "Qwen3 30B A3B": {"model_type": "qwen3_moe", "hidden_size": 2048, _LAYERS: 48, _HEADS: 32,
                      _KV: 4, "head_dim": 128},
    "Qwen3-Next 80B A3B": {
        "model_type": "qwen3_next", "hidden_size": 2048, _LAYERS: 48, _HEADS: 16, _KV: 2,
        "head_dim": 256, "full_attention_interval": 4, "linear_num_value_heads": 32,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4},
    "Mistral Small 24B": {"model_type": "mistral3", "text_config": {
        "model_type": "mistral", "hidden_size": 5120, _LAYERS: 40, _HEADS: 32, _KV: 8,
        "head_dim": 128}},
    "Gemma 3 4B": {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, _LAYERS: 34, "sliding_window": 1024}},
    "Gemma 3 12B": {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, _LAYERS: 48, _HEADS: 16, _KV: 8,
        "sliding_window": 1024}},
    "gpt-oss 20B": {
        "model_type": "gpt_oss", "hidden_size": 2880, _LAYERS: 24, _HEADS: 64, _KV: 8,
        "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12},
    "DeepSeek V3": {"model_type": "deepseek_v3", _LAYERS: 61, _HEADS: 128, _KV: 128,
                    "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}  # fmt: skip


def sizes() -> str:
    """Bytes that a token takes, and a cache of 32K tokens, of well-known models."""
    lines = ["| model | raw, a token | q8 | q4 | besides (raw) | 32K tokens, raw | q8 | q4 |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name, config in MODELS.items():
        shape = shape_of({"torch_dtype": "bfloat16", **config})
        tokens = [f"{shape.kv_bytes(codec):,.0f}" for codec in ("raw", "q8", "q4")]
        caches = [format_bytes(shape.cache_bytes(codec, 32768)) for codec in ("raw", "q8", "q4")]
        besides = shape.constant_bytes("raw")
        cells = [name, *tokens, format_bytes(besides) if besides else "", *caches]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def command(name: str) -> click.Command:
    """The click command of that name."""
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def options(name: str) -> Iterator[tuple[str, str]]:
    """Each option of a command as it is written, and what help says of it."""
    context = click.Context(command(name), info_name=name)
    for parameter in command(name).get_params(context):
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts:
            record = parameter.get_help_record(context)
            assert record is not None
            yield record[0], " ".join(record[1].split())


def commands() -> str:
    """Every command: how it is called, what it does, its options."""
    parts = []
    for name in COMMANDS:
        found = command(name)
        words = [p.make_metavar(click.Context(found)) for p in found.params
                 if isinstance(p, click.Argument)]  # fmt: skip
        call = " ".join(["kvq", name, *words])
        text = " ".join((found.help or "").split())
        rows = [f"| `{_cell(written)}` | {_cell(said)} |" for written, said in options(name)]
        table = "\n".join(["| option | |", "|---|---|", *rows]) if rows else ""
        parts.append(f"### `{call}`\n\n{text}\n\n{table}\n")
    return "\n".join(parts)


def errors() -> str:
    """Every error: its code in results, the exit status, what it means."""
    tree = ast.parse(Path(sys.modules[KvqError.__module__].__file__ or "").read_text())
    lines = ["| error | code in results | exit | |", "|---|---|--:|---|"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            kind = getattr(importlib.import_module("kvq.errors"), node.name)
            said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            code = error_code(kind.__new__(kind))
            lines.append(f"| `{node.name}` | `{code}` | {kind.exit_status} | {_cell(said)} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings.table,
    "metrics": metrics.markdown,
    "commands": commands,
    "errors": errors,
    "sizes": sizes,
}


def made(text: str) -> str:
    """A document's text with its made parts as they should be."""
    return _MADE.sub(lambda found: f"{found[1]}{PARTS[found['name']]()}{found[4]}", text)


def documents() -> list[Path]:
    """Every document that there is."""
    return [ROOT / name for name in DOCUMENTS if (ROOT / name).is_file()]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for path in documents():
        path.write_text(made(path.read_text()))
