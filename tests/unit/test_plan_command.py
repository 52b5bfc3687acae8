from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tinytext import byte_level, save_model

from kvq.store.store import Store
from kvq_producer.cli import run

SYSTEM = "You are a helpful assistant. " * 60


@pytest.fixture
def model(tmp_path: Path) -> str:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    return str(save_model(tmp_path / "tiny", byte_level(), **sizes))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines = [{"custom_id": f"p{n}", "text": f"{SYSTEM} {n}"} for n in range(3)]
    lines.append({"text": f"{SYSTEM} 1"})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_facts_of_a_file(model, prompts, capsys):
    assert run(["plan", prompts, "--model", model, "--rate", "100", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["prompts"], facts["duplicates"], facts["prefix_jobs"]) == (4, 1, 1)
    assert facts["prompt_jobs"] == 3
    assert facts["groups"][0]["model"] == model
    assert facts["groups"][0]["cache"]["bytes_per_token"]["raw"] == 2 * 2 * 4 * 64 * 2
    # The shared prefix ends inside a block, whose 106 tokens rest once more as its own.
    assert facts["bytes"]["raw"]["kv"] == (facts["new_block_tokens"] + 106) * 2048
    assert facts["seconds"]["unshared_seconds"] == facts["tokens"] / 100
    assert "tree" not in facts


def test_facts_with_the_tree_list_every_job(model, prompts, capsys):
    assert run(["plan", prompts, "--model", model, "--json", "--tree"]) == 0
    jobs = json.loads(capsys.readouterr().out)["tree"]
    assert [(job["kind"], job["parent"], job["serves"]) for job in jobs] == [
        ("prefix", None, 4),
        ("prompt", 0, 1),
        ("prompt", 0, 2),
        ("prompt", 0, 1),
    ]
    assert sorted(name for job in jobs for name in job["custom_ids"]) == [
        "line-4",
        "p0",
        "p1",
        "p2",
    ]


def test_the_table_and_the_tree(model, prompts, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["plan", prompts, "--model", model, "--codec", "q4", "--tree"]) == 0
    shown = capsys.readouterr().out
    assert "1 equal to another" in shown
    assert "chosen" in shown
    assert "shared by 4 prompts You are a helpful assistant. You are" in shown
    assert "p1 and 1 equal 1" in shown


def test_prompts_from_standard_input(model, prompts, capsys, monkeypatch):
    text = Path(prompts).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert run(["plan", "-", "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 4


def test_an_empty_store_changes_nothing(model, prompts, tmp_path, capsys):
    Store.create(tmp_path / "store")
    given = ["plan", prompts, "--model", model, "--store", str(tmp_path / "store"), "--json"]
    assert run(given) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["already_stored"], facts["rate"]) == (0, None)


def test_sizes_of_a_model_without_a_file(model, capsys):
    assert run(["plan", "--model", model]) == 0
    assert "2,048 B" in capsys.readouterr().out
    assert run(["plan", "--model", model, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["codecs"]["raw"]["caches"]["4096"] == 4096 * 2048


def test_a_config_that_does_not_tell_leaves_bytes_unknown(tmp_path, prompts, capsys):
    model = str(save_model(tmp_path / "bare", byte_level()))
    assert run(["plan", prompts, "--model", model, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bytes"]["q8"] is None
    assert "bytes are not known" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give a file of prompts"),
        (["plan", "PROMPTS", "--model", "MODEL", "--rate", "0"], "--rate"),
        (["plan", "PROMPTS", "--model", "MODEL", "--disk-rate", "0"], "reads nothing"),
        (["plan", "PROMPTS", "--model", "MODEL", "--disk-rate", "fast"], "not a size"),
        (["plan", "PROMPTS"], "name one in the line"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, model, prompts, capsys):
    given = [{"PROMPTS": prompts, "MODEL": model}.get(one, one) for one in arguments]
    assert run(given) == 2
    assert message in capsys.readouterr().err


def test_a_store_that_is_not_there_is_said_to_be_missing(model, prompts, tmp_path, capsys):
    assert run(["plan", prompts, "--model", model, "--store", str(tmp_path / "gone")]) == 1
    assert "is not a kvq store" in capsys.readouterr().err
