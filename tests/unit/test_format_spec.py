"""FORMAT.md is enough: a reader written from it alone finds the same tokens, rows and states."""

from __future__ import annotations

import json
from base64 import b64decode
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from oracle import as_loaded
from zoo import by_name, prompt

from kvq.cache.leaves import leaf_caches
from kvq.prefill import Prefiller, PrefillRequest
from kvq.store import Store
from kvq.store.keys import as_ids

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
DTYPES = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "BF16": "<u2"}


def digest(size: int, data: bytes) -> bytes:
    return blake2b(data, digest_size=size).digest()


def first_letters(ids: np.ndarray) -> str:
    ends = range(1, min(16, len(ids)) + 1)
    return "".join(LETTERS[digest(5, ids[:end].astype("<u4").tobytes())[0] >> 3] for end in ends)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A block file by the specification, its digests checked."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    entries = json.loads(head)
    metadata = entries.pop("__metadata__")
    blank = head.replace(f'"head":"{metadata["head"]}"'.encode(), b'"head":"' + b"0" * 32 + b'"')
    assert xxhash.xxh3_128_hexdigest(blank) == metadata["head"]
    assert xxhash.xxh3_128_hexdigest(body) == metadata["data"]
    tensors = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(body[start:end], DTYPES[entry["dtype"]])
        tensors[name] = tensors[name].reshape(entry["shape"])
    return json.loads(metadata["kvq"]), tensors


def read_space(store: Path) -> tuple[Path, dict[str, Any]]:
    (folder,) = (store / "spaces").iterdir()
    facts = json.loads((folder / "space.json").read_text())
    names = ("fingerprint", "dtype", "codec", "codec_parameters", "max_kv_size")
    covered = json.dumps({n: facts[n] for n in names}, sort_keys=True, separators=(",", ":"))
    assert digest(20, covered.encode()).hex() == folder.name
    return folder, facts


def read_chain(folder: Path, ids: np.ndarray, record: str) -> list[tuple[dict, dict]]:
    """The files of one record for all blocks of `ids`, found by name alone."""
    parent, found = bytes(20), []
    for start in range(0, len(ids), 256):
        part = ids[start : start + 256]
        key = digest(20, parent + part.astype("<u4").tobytes())
        name = f"{key.hex()}.{len(part)}.{first_letters(part)}{record}.safetensors"
        path = folder / "nodes" / parent.hex()[:2] / parent.hex() / name
        if path.exists():
            meta, tensors = read_file(path)
            assert (meta["space"], meta["parent"], meta["start"]) == (
                folder.name,
                parent.hex(),
                start,
            )
            assert np.array_equal(np.frombuffer(b64decode(meta["tokens"]), "<u4"), part)
            found.append((meta, tensors))
        parent = key
    return found


def rows_of(files: list[tuple[dict, dict]], leaf: int, side: str) -> np.ndarray:
    pieces = []
    for meta, tensors in files:
        for number, group in enumerate(meta["groups"]):
            if leaf in group["leaves"]:
                pieces.append(tensors[f"{number}.{side}"][group["leaves"].index(leaf)])
    return np.concatenate(pieces, axis=1)


@pytest.mark.parametrize("name", ["llama-16", "gemma3_text", "qwen3_next"])
def test_a_reader_of_the_specification_finds_what_the_library_restores(
    tmp_path: Path, name: str
) -> None:
    ids = as_ids(prompt(by_name(name), 600))
    llm = as_loaded(by_name(name))
    store = Store.create(tmp_path / "store")
    Prefiller(store, llm, step=128).run(PrefillRequest(token_ids=ids, name="one", codec="raw"))
    match = store.match(llm.fingerprint, ids)
    caches = leaf_caches(match.load(llm.model))
    folder, facts = read_space(store.path)
    kv = read_chain(folder, ids, "")
    windows = read_chain(folder, ids, ".window")
    states = read_chain(folder, ids, ".state")
    assert sum(len(b64decode(meta["tokens"])) // 4 for meta, _ in kv) == 600
    for index, leaf in enumerate(facts["leaves"]):
        if leaf["record"] == "kv":
            keys = np.array(caches[index].keys[0, :, :600])
            assert np.array_equal(rows_of(kv, index, "k"), keys)
        elif leaf["record"] == "window":
            kept = rows_of(windows, index, "v")[:, -leaf["window"] :]
            held = np.array(mx.sort(caches[index].values[0], axis=1))
            assert np.array_equal(np.sort(kept, axis=1), held)
        elif leaf["record"] == "state":
            slots = states[-1][1]
            for slot, array in enumerate(caches[index].cache):
                assert np.array_equal(slots[f"{index}.{slot}"], np.array(array))


def test_a_manifest_names_its_blocks_and_digests_itself(tmp_path: Path) -> None:
    ids = as_ids(prompt(by_name("llama-16"), 300))
    llm = as_loaded(by_name("llama-16"))
    store = Store.create(tmp_path / "store")
    request = PrefillRequest(token_ids=ids, name="one", codec="raw", metadata={"title": "Île"})
    Prefiller(store, llm, step=128).run(request)
    data = (store.path / "caches" / "one.json").read_bytes()
    facts = json.loads(data)
    assert facts["metadata"] == {"title": "Île"}
    before, mark, after = data.rpartition(b'"digest": "')
    blank = before + mark + b"0" * 32 + after[32:]
    assert xxhash.xxh3_128_hexdigest(blank) == facts["digest"]
    first = digest(20, bytes(20) + ids[:256].tobytes())
    second = digest(20, first + ids[256:].tobytes())
    assert facts["chain"] == [
        f"{first.hex()}.256.{first_letters(ids)}",
        f"{second.hex()}.44.{first_letters(ids[256:])}",
    ]
    assert facts["format"] == 1


def test_branches_end_at_kept_positions_and_hold_their_states(tmp_path: Path) -> None:
    ids = as_ids(prompt(by_name("qwen3_next"), 700))
    llm = as_loaded(by_name("qwen3_next"))
    store = Store.create(tmp_path / "store")
    request = PrefillRequest(token_ids=ids, name="one", codec="raw", keep=(100, 300))
    Prefiller(store, llm, step=128).run(request)
    facts = json.loads((store.path / "caches" / "one.json").read_bytes())
    folder, _ = read_space(store.path)
    assert [position for position, _ in facts["branches"]] == [100, 300]
    for position, stem in facts["branches"]:
        before = position // 256
        parent = bytes.fromhex(facts["chain"][before - 1][:40]) if before else bytes(20)
        part = ids[before * 256 : position]
        assert (
            stem == f"{digest(20, parent + part.tobytes()).hex()}.{len(part)}.{first_letters(part)}"
        )
        path = folder / "nodes" / parent.hex()[:2] / parent.hex() / f"{stem}.state.safetensors"
        meta, tensors = read_file(path)
        assert meta["start"] + len(part) == position
        assert tensors
