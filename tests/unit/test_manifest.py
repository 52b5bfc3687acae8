from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store.keys import BLOCK, ROOT, as_ids
from kvq.store.layout import BlockName
from kvq.store.manifest import Manifest

FIRST = BlockName.of(ROOT, as_ids(range(BLOCK)))
TAIL = BlockName.of(FIRST.key, as_ids([1, 2, 3]))
BRANCH = BlockName.of(ROOT, as_ids(range(100)))

MANIFEST = Manifest(
    name="contract-7",
    space="ab" * 20,
    fingerprint="cd" * 20,
    model="tiny",
    codec="q8",
    dtype="bfloat16",
    tokens=BLOCK + 3,
    chain=(FIRST.stem, TAIL.stem),
    branches=((100, BRANCH.stem),),
    kept=(100, BLOCK, BLOCK + 3),
    nbytes=12345,
    created=1_700_000_000.25,
    expires=None,
    quality={"mean_kl": 1e-7},
    notes=("head_dim 80: padded",),
    metadata={"customer": "Zoë", "nested": {"list": [1, None, True]}, "odd": "\ud800"},
)


def test_it_survives_its_file():
    assert Manifest.decode(MANIFEST.encode(), "m.json") == MANIFEST


def test_the_file_is_readable_json():
    facts = json.loads(MANIFEST.encode())
    assert facts["format"] == 1
    assert facts["tokens"] == 259
    assert list(facts)[-1] == "digest"


def test_the_digest_is_of_the_file_with_zeros_in_its_place():
    data = MANIFEST.encode()
    digest = json.loads(data)["digest"]
    blank = data.replace(digest.encode(), b"0" * 32)
    assert xxhash.xxh3_128_hexdigest(blank) == digest


def test_metadata_that_looks_like_a_digest_does_no_harm():
    odd = replace(MANIFEST, metadata={"digest": "0" * 32, "a": '"digest": "'})
    assert Manifest.decode(odd.encode(), "m.json") == odd


def test_every_flipped_byte_is_noticed():
    data = MANIFEST.encode()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DamagedFile):
            Manifest.decode(bytes(damaged), "m.json")


def test_every_cut_is_noticed():
    data = MANIFEST.encode()
    for length in range(len(data)):
        with pytest.raises(DamagedFile):
            Manifest.decode(data[:length], "m.json")


def sealed(**changes: object) -> bytes:
    """A manifest with other facts whose digest holds; None takes a fact away."""
    facts = json.loads(MANIFEST.encode()) | changes | {"digest": "0" * 32}
    facts = {name: value for name, value in facts.items() if value != "absent"}
    facts["digest"] = facts.pop("digest")
    blank = json.dumps(facts, indent=1).encode()
    digest = xxhash.xxh3_128_hexdigest(blank).encode()
    return blank.replace(b'"digest": "' + b"0" * 32, b'"digest": "' + digest)


def test_facts_of_a_later_version_are_ignored():
    assert Manifest.decode(sealed(colour="green"), "m.json") == MANIFEST


def test_facts_that_came_later_have_defaults():
    assert Manifest.decode(sealed(branches="absent"), "m.json") == replace(MANIFEST, branches=())


def test_a_newer_format_is_not_guessed_at():
    with pytest.raises(UnsupportedFormat, match=r"m\.json: manifest format 2 .* upgrade kvq"):
        Manifest.decode(sealed(format=2), "m.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"chain": "absent"},
        {"chain": [1]},
        {"chain": ["../../../etc/passwd"]},
        {"branches": [[2**40, "x"]]},
        {"branches": [[5 * BLOCK, BRANCH.stem]]},
        {"branches": [1]},
        {"kept": None},
        {"format": None},
    ],
    ids=str,
)
def test_facts_that_make_no_sense_are_refused(changes):
    with pytest.raises(DamagedFile, match="cannot be read"):
        Manifest.decode(sealed(**changes), "m.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_garbage_is_refused(data):
    with pytest.raises(DamagedFile, match=r"^m\.json: "):
        Manifest.decode(data, "m.json")


def test_blocks_are_linked_by_their_keys():
    assert MANIFEST.blocks() == (FIRST, TAIL, BRANCH)
