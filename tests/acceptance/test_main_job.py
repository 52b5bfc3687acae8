"""The main job with its real parts: a real model and server, real processes, files on a disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import CommandLine, bodies, read_lines, write_lines
from servers import Server
from workers import eventually

import kvq
from kvq.store import End, Store

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "producer" / "examples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def prompts() -> dict[str, str]:
    """Three that share 389 tokens, and one of 720, for which the model's window of 512 wraps."""
    lines = read_lines(EXAMPLES)
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["custom_id"].split("-")[0], []).append(line)
    chosen = [*groups["minutes"][:3], *groups["clock"][:1]]
    return {line["custom_id"]: line["prompt"] for line in chosen}


class Job:
    """One store that `kvq run` has filled, and how to run it again."""

    def __init__(self, folder: Path, model: Path, prompts: dict[str, str], **env: str) -> None:
        self.kvq = CommandLine(folder, **env)
        self.model, self.store, self.prompts = model, folder / "store", prompts
        self.results = folder / "results.jsonl"
        self.file = write_lines(
            folder / "prompts.jsonl",
            *({"custom_id": name, "prompt": text} for name, text in prompts.items()),
        )

    def run(self, *options: object, **variables: str) -> str:
        """Run it; what was said on standard error."""
        done = self.kvq(*self.command(*options), **variables)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def command(self, *options: object) -> tuple[object, ...]:
        return ("run", self.file, "-m", self.model, "-s", self.store, "--codec", "raw",
                "-o", self.results, *options)  # fmt: skip


@pytest.fixture(scope="module")
def job(demo_model: Path, prompts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = Job(tmp_path_factory.mktemp("job"), demo_model, prompts)
    made.run()
    return made


@pytest.fixture(scope="module")
def llm(demo_model: Path, job: Job) -> kvq.LLM:
    return kvq.open(str(demo_model), store=job.store)


# Run, and run again


def test_prompts_share_what_they_have_in_common(job: Job, prompts: dict[str, str]) -> None:
    lines = read_lines(job.results)
    assert [line["custom_id"] for line in lines] == list(prompts)
    found = bodies(job.results)
    assert all(300 <= one["tokens"] <= 900 for one in found)
    # The shared prefix is one job of its own: the prompts of the group compute what follows it.
    assert all(one["reused_tokens"] >= 256 for one in found[:3])
    assert found[3]["reused_tokens"] < 256  # the beginning-of-text token, perhaps
    names = {manifest.name for manifest in Store(job.store).manifests()}
    assert names == {one["name"] for one in found}


def test_a_second_run_prefills_nothing_and_says_the_same(job: Job) -> None:
    first = bodies(job.results)
    files = {path: path.stat().st_mtime_ns for path in job.store.rglob("*.safetensors")}
    said = job.run()
    assert "4 stored already, 0 jobs, 0 tokens to prefill" in said
    second = bodies(job.results)
    for old, new in zip(first, second, strict=True):
        assert new["prefilled_tokens"] == 0
        assert new["reused_tokens"] == new["tokens"]
        same = ("name", "store", "model", "space", "codec", "tokens", "bytes", "quality")
        assert {key: new[key] for key in same} == {key: old[key] for key in same}
    assert {path: path.stat().st_mtime_ns for path in job.store.rglob("*.safetensors")} == files


# Killed


def test_what_a_killed_worker_finished_is_used_when_it_is_run_again(
    job: Job, tmp_path: Path
) -> None:
    text = "\n\n".join(list(job.prompts.values())[2:])
    # The digests of the model's files are known already.
    known = {"KVQ_CACHE_DIR": job.kvq.environment["KVQ_CACHE_DIR"]}
    killed = Job(tmp_path, job.model, {"long": text}, **known)
    blocks = "spaces/*/nodes/*/*/*.256.*.safetensors"
    with killed.kvq.start(*killed.command(), KVQ_STEP="128") as process:
        try:
            eventually(lambda: len(list(killed.store.glob(blocks))) >= 4, 120)
            (worker,) = killed.kvq.children(process.pid, "rq.cli")
            os.kill(worker, signal.SIGKILL)
        finally:
            process.kill()
    assert not list(killed.store.glob("caches/*"))

    killed.run()
    (found,) = bodies(killed.results)
    assert 0 < found["reused_tokens"] < found["tokens"]
    assert found["reused_tokens"] % 256 == 0
    assert found["prefilled_tokens"] == found["tokens"] - found["reused_tokens"]
    # What was there before is not written again, and nothing of the dead one is left.
    assert not list(killed.store.rglob("*.ckpt.*"))


# Damaged


def flip(path: Path) -> None:
    """Turn one bit in the middle of the file's tensors."""
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little") + 8
    data[(header + len(data)) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def copy(job: Job, tmp_path: Path) -> Path:
    return shutil.copytree(job.store, tmp_path / "store")


def long_prompt(job: Job) -> str:
    return list(job.prompts.values())[-1]


def test_generate_says_that_a_block_is_damaged_and_answers_correctly(
    job: Job, copy: Path, llm: kvq.LLM, cold: list[int]
) -> None:
    asked = long_prompt(job)
    target = file_of(copy, "kv", 1)
    flip(target)
    done = job.kvq("generate", "-m", job.model, "-s", copy, "--stdin", "--json", "-n", len(cold),
                   stdin=asked)  # fmt: skip
    assert done.returncode == 0, done.stderr
    warm = json.loads(done.stdout)
    assert warm["reused_tokens"] == 256
    assert warm["reason"]["end"] == "damaged"
    assert target.name in warm["reason"]["message"]
    assert warm["text"] == llm.tokenizer.decode(cold)
    assert in_quarantine(copy) == [target.name]


@pytest.fixture(scope="module")
def cold(job: Job, llm: kvq.LLM) -> list[int]:
    """What the model says after the long prompt, with nothing reused."""
    return greedy(llm, long_prompt(job), reuse=False)


@pytest.mark.parametrize(
    ("record", "number"), [("kv", 0), ("kv", 2), ("window", 0), ("window", 2), ("logits", 2)]
)
def test_a_flipped_byte_in_any_file_ends_the_match_before_it(
    job: Job, copy: Path, llm: kvq.LLM, cold: list[int], record: str, number: int
) -> None:
    asked = long_prompt(job)
    target = file_of(copy, record, number)
    flip(target)
    damaged = kvq.LLM(llm.loaded, Store(copy))
    assert greedy(damaged, asked) == cold
    assert damaged.last is not None
    assert damaged.last.reason is not None
    assert damaged.last.reason.end is End.DAMAGED
    assert target.name in damaged.last.reason.message
    # Without the logits after its last token, that token is fed again. The first token of all
    # is in another prompt's first block too.
    before = damaged.last.prompt_tokens - 1 if record == "logits" else max(1, 256 * number)
    assert damaged.last.reused_tokens == before
    assert in_quarantine(copy) == [target.name]
    # It is out of the way: the next match is as short, and finds nothing wrong.
    again = damaged.match(damaged.encode(asked))
    assert again is not None
    assert again.reason.end is not End.DAMAGED


def file_of(store: Path, record: str, number: int) -> Path:
    """The file with that record of a block of the long prompt."""
    (manifest,) = (one for one in Store(store).manifests() if one.tokens > 512)
    word = "" if record == "kv" else f".{record}"
    (path,) = store.glob(f"spaces/*/nodes/*/*/{manifest.chain[number]}{word}.safetensors")
    return path


def in_quarantine(store: Path) -> list[str]:
    names = [path.name for path in (store / "quarantine").glob("*.safetensors")]
    return [name.partition("-")[2] for name in names]


# Exact


def greedy(llm: kvq.LLM, prompt: str | list[int], tokens: int = 6, **options: Any) -> list[int]:
    chunks = llm.stream(prompt, max_tokens=tokens, temperature=0.0, **options)
    return [chunk.token for chunk in chunks if chunk.token is not None]


@pytest.mark.parametrize("cut", [1, 300, 511, 512, 513, 719])
def test_resuming_at_any_token_gives_the_tokens_of_an_uninterrupted_run(
    job: Job, llm: kvq.LLM, cut: int
) -> None:
    stored = llm.encode(long_prompt(job))
    assert cut < len(stored)
    other = llm.encode(" In the morning the harbour was quiet, and")
    asked = [*stored[:cut].tolist(), *other[1:].tolist()]
    match = llm.match(asked)
    assert match is not None
    assert match.tokens == cut
    resumed = greedy(llm, asked)
    assert llm.last is not None
    assert llm.last.reused_tokens == cut
    assert resumed == greedy(llm, asked, reuse=False)
    assert llm.last.reused_tokens == 0


def test_the_very_prompt_goes_on_without_a_forward_pass(
    job: Job, llm: kvq.LLM, cold: list[int]
) -> None:
    calls: list[int] = []
    asked = long_prompt(job)
    ids = llm.encode(asked)
    match = llm.match(ids)
    assert match is not None
    assert match.exact
    container = match.load(llm.model)
    iterator = kvq.TokenIterator([], counting(llm.model, calls), container)
    first = next(iterator)
    # The call under way computes the second token already.
    assert calls == [1]
    assert first == cold[0]


def counting(model: Any, calls: list[int]) -> Callable[..., Any]:
    class Counting:
        layers = model.layers

        def __call__(self, ids: Any, cache: Any = None) -> Any:
            calls.append(ids.shape[1])
            return model(ids, cache=cache)

    return Counting()


# Bad lines


def test_every_fault_is_told_with_its_line_and_nothing_is_enqueued(
    demo_model: Path, tmp_path: Path
) -> None:
    file = write_lines(
        tmp_path / "prompts.jsonl",
        {"custom_id": "good", "prompt": "Good morning."},
        "not json",
        {"custom_id": "none"},
        {"custom_id": "number", "prompt": 7},
        {"custom_id": "empty", "prompt": ""},
        {"custom_id": "good", "prompt": "Good morning again."},
        {"custom_id": "long", "token_ids": [5] * 40_000},
        b'{"custom_id": "bytes", "prompt": "caf\xe9"}',
        {"custom_id": "also good", "prompt": "Good evening."},
    )
    reasons = {2: "JSON", 3: "prompt", 4: "prompt", 5: "empty", 6: "good", 7: "32,?768", 8: "UTF-8"}
    kvq = CommandLine(tmp_path)
    Store.create(tmp_path / "store")
    with Server(tmp_path / "server") as server:
        for command, extra in (("submit", ("--redis-url", server.url)), ("run", ())):
            done = kvq(command, file, "-m", demo_model, "-s", tmp_path / "store", *extra)
            assert done.returncode == 2, done.stderr
            told = dict(faults(done.stderr))
            assert set(told) == set(reasons), done.stderr
            for number, reason in reasons.items():
                assert re.search(reason, told[number]), told[number]
            assert "7 faults; nothing was submitted" in done.stderr
            assert "Traceback" not in done.stderr
        assert server.client().dbsize() == 0
    assert not (tmp_path / "store" / "spaces").exists()
    assert not (tmp_path / "store" / "caches").exists()


def faults(said: str) -> list[tuple[int, str]]:
    """(line, reason) of each fault that was told."""
    lines = [line.strip() for line in said.splitlines() if line.startswith("  line ")]
    return [
        (int(number.removeprefix("line ")), reason)
        for number, _, reason in (line.partition(": ") for line in lines)
    ]
