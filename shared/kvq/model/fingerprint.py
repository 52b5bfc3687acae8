"""What determines a model's tensors, as one digest."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvq.errors import ModelNotFound
from kvq.model.filedigest import DIGEST_BYTES, file_digests
from kvq.model.folder import read_config, resolve

#: Keys of config.json, at any depth, that say where a model came from and nothing about tensors.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version"})


def fingerprint(model: str | Path, adapter: str | Path | None = None) -> str:
    """40 hex digits that are equal for two models exactly when their caches can be exchanged.

    `model` is a folder or a hub id (downloaded when it is not cached), `adapter` the folder of a
    LoRA adapter. Covered are the weights that mlx-lm loads, by content, the config and the
    adapter; not the folder's name, the tokenizer, or the chat template. A config key that is not
    known to be harmless counts, so the worst error is a cache that is not found.

    With H = blake2b-160, u64 little-endian, and a part = u64(length of name), name,
    u64(length of data), data:

        file        = H(u64(size), H(each 64 MiB of it) ...)
        canonical   = JSON with sorted keys, no blanks, ASCII; without the keys `_name_or_path`
                      and `transformers_version` at any depth
        fingerprint = H("kvq fingerprint 1",
                        part "config":         canonical config.json,
                        part "quantization":   canonical hf_quant_config.json, if there is one,
                        part "weights":        file of each model*.safetensors, in order of name,
                        part "adapter config": canonical adapter_config.json, with an adapter,
                        part "adapter":        file of adapters.safetensors, with an adapter)

    Weight files are read by several threads; while they stay the same they are not read again
    (KVQ_CACHE_DIR, by default the user's cache folder, holds their digests). Raises ModelNotFound.
    """
    folder = resolve(str(model))
    weights = sorted(folder.glob("model*.safetensors"), key=lambda path: path.name)
    parts = [("config", _canonical(read_config(folder)))]
    if (quantization := folder / "hf_quant_config.json").is_file():
        parts.append(("quantization", _canonical(_read_json(quantization))))
    if adapter is None:
        return _digest([*parts, ("weights", b"".join(file_digests(weights)))])
    lora = Path(adapter).expanduser()
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (lora / name).is_file():
            raise ModelNotFound(
                f"the adapter {str(adapter)!r} has no {name}: give a folder that mlx_lm.lora wrote"
            )
    *digests, last = file_digests([*weights, lora / "adapters.safetensors"])
    parts.append(("weights", b"".join(digests)))
    parts.append(("adapter config", _canonical(_read_json(lora / "adapter_config.json"))))
    return _digest([*parts, ("adapter", last)])


def _digest(parts: list[tuple[str, bytes]]) -> str:
    digest = blake2b(b"kvq fingerprint 1", digest_size=DIGEST_BYTES)
    for name, data in parts:
        for one in (name.encode(), data):
            digest.update(len(one).to_bytes(8, "little"))
            digest.update(one)
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(_essential(value), sort_keys=True, separators=(",", ":")).encode("ascii")


def _essential(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _essential(one) for key, one in value.items() if key not in _PROVENANCE}
    if isinstance(value, list):
        return [_essential(one) for one in value]
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} cannot be read ({error}): copy it again") from error
