from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

from kvq.store.manifest import Manifest
from kvq_producer.plan import Group, Plan, Stored, TokenizedPrompt, make_plan
from kvq_producer.plan.draw import draw
from kvq_producer.plan.estimate import Keeping, disk_use, estimate, measured_rate
from kvq_producer.plan.report import Report, sizes_json, sizes_table
from kvq_producer.sizes import CacheShape, Rows

ONE, TWO = Group(model="one"), Group(model="two", adapter="tuned", codec="q4")
_TEXT = np.random.default_rng(3).integers(0, 1000, (6, 4000), dtype=np.uint32)

#: 1024 bytes a token as computed, 544 as q8.
PLAIN = CacheShape(kv=(Rows(layers=2, heads=2, keys=64, values=64),))
WINDOWED = CacheShape(
    kv=(Rows(layers=1, heads=1, keys=64, values=64),),
    window=(Rows(layers=3, heads=1, keys=64, values=64),),
    window_tokens=300,
    logits=100,
)
RECURRENT = CacheShape(kv=PLAIN.kv, state_bytes=5000)


def ids(*parts: tuple[int, int]) -> np.ndarray:
    return np.concatenate([_TEXT[text, :tokens] for text, tokens in parts])


def prompt(custom_id: str, *parts: tuple[int, int], group: Group = ONE) -> TokenizedPrompt:
    return TokenizedPrompt(custom_id=custom_id, group=group, ids=ids(*parts))


@pytest.fixture
def family() -> Iterator[Plan]:
    """Two prompts of 1000 tokens that share 700, one of them twice."""
    a, b = prompt("a", (0, 700), (1, 300)), prompt("b", (0, 700), (2, 300))
    with make_plan([a, b, prompt("again", (0, 700), (1, 300))]) as plan:
        yield plan


def text_of(*renderables: object, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(width=width, file=out)
    for one in renderables:
        console.print(one)
    return out.getvalue()


# Bytes


def test_every_distinct_block_is_written_once(family):
    assert disk_use(family, ONE, PLAIN, "raw").kv == (512 + 2 * 488) * 1024
    assert disk_use(family, ONE, PLAIN, "q8").kv == (512 + 2 * 488) * 544
    assert disk_use(family, ONE, PLAIN, "auto") == disk_use(family, ONE, PLAIN, "q8")


def test_windows_are_written_for_the_blocks_before_kept_positions(family):
    # The prefix keeps its end at 512, within reach of both its blocks. Each prompt keeps 700,
    # 768 and its end at 1000, within reach of both blocks that it adds.
    assert disk_use(family, ONE, WINDOWED, "raw").window == (512 + 2 * 488) * 3 * 256
    with make_plan([prompt("long", (0, 4000))]) as long:
        # 3840 and 4000 are kept: from block 12 on, which holds token 3840 - 300 - 256 = 3284.
        assert disk_use(long, ONE, WINDOWED, "raw").window == (4000 - 3072) * 3 * 256


def test_states_are_written_once_at_each_kept_position_of_the_jobs_own_parts(family):
    # 256 and 512 by the prefix; 768 and 1000 by each prompt, and 700 by whichever is first.
    assert disk_use(family, ONE, RECURRENT, "q4").state == 7 * 5000


def test_rows_of_partial_blocks_rest_beside_states_and_ends_of_prefixes(family):
    full = 512 + 2 * 488
    # A state at 700 rests beside the 188 rows of its block up to there.
    assert disk_use(family, ONE, RECURRENT, "raw").kv == (full + 188) * 1024
    batch = [prompt("a", (0, 700), (1, 300)), prompt("b", (0, 700), (2, 300))]
    with make_plan(batch, align=1) as plan:
        assert disk_use(plan, ONE, PLAIN, "raw").kv == (full + 188) * 1024
        assert disk_use(plan, ONE, RECURRENT, "raw").kv == (full + 188) * 1024


def test_logits_are_written_for_prompts_only(family):
    use = disk_use(family, ONE, WINDOWED, "q8")
    assert use.logits == 2 * 200
    assert use.total == use.kv + use.window + use.state + use.logits


def test_more_can_be_kept_than_the_jobs_say(family):
    every = Keeping(keep_every=100, positions={"a": (650,), "again": (999,), "other": (3,)})
    # Besides the usual: 100 to 500 and 300 of these by the prefix; the prompts' own part begins
    # at 512: 600, 800 and 900 by each, 650 and 999 by the first. 700 is kept anyway.
    assert disk_use(family, ONE, RECURRENT, "q4", every).state == (7 + 5 + 3 + 3 + 2) * 5000
    with make_plan([prompt("long", (0, 4000))]) as long:
        everywhere = disk_use(long, ONE, WINDOWED, "raw", Keeping(all_windows=True))
        assert everywhere.window == 4000 * 3 * 256


def manifest(model: str, tokens: int, reused: int, seconds: float) -> Manifest:
    return Manifest(
        name="a", space="s", fingerprint="f", model=model, codec="q8", dtype="float16",
        tokens=tokens, chain=(), kept=(tokens,), nbytes=1, created=0.0,
        prefill_seconds=seconds, reused_tokens=reused,
    )  # fmt: skip


def test_the_rate_is_measured_by_the_caches_of_the_same_models():
    found = [
        manifest("/mnt/models/one", 1000, 0, 2.0),
        manifest("org/one", 1000, 500, 1.0),
        manifest("two", 9000, 0, 1.0),
        manifest("one", 300, 300, 0.0),
    ]
    assert measured_rate(found, ["hub/one/"]) == 500.0
    # What a job costs beside its tokens does not count as slow tokens.
    short = [manifest("one", 1000, 990, 0.5)] * 20
    assert measured_rate([*found, *short], ["one"]) == 500.0
    assert measured_rate(found, ["three"]) is None
    assert measured_rate(found[3:], ["one"]) is None


# Times


def test_times_follow_from_the_rates(family):
    found = estimate(family, {ONE: PLAIN}, 100, disk_rate=544_000)
    assert found.least_seconds == 13.0
    assert found.most_seconds == 14.88
    assert found.unshared_seconds == 30.0
    assert found.load_seconds == 3.0  # 3 caches of 1000 tokens of 544 bytes
    assert found.break_even_resumes == pytest.approx(14.88 / 27)
    assert found.break_even_disk_rate == pytest.approx(3 * 544_000 / 30)


def test_reading_slower_than_prefilling_never_pays(family):
    found = estimate(family, {ONE: PLAIN}, 100, disk_rate=50_000)
    assert found.break_even_resumes == math.inf
    report = Report(plan=family, shapes={ONE: PLAIN}, rate=100, disk_rate=50_000)
    assert report.as_json()["seconds"]["break_even_resumes"] is None
    assert "never" in text_of(report.render())


def test_without_sizes_the_times_of_prefilling_are_still_told(family):
    found = estimate(family, {}, 100)
    assert (found.most_seconds, found.load_seconds) == (14.88, None)
    assert (found.break_even_resumes, found.break_even_disk_rate) == (None, None)


def test_an_empty_plan_has_times_too():
    with make_plan([]) as plan:
        found = estimate(plan, {}, 100)
    assert (found.most_seconds, found.unshared_seconds, found.load_seconds) == (0, 0, None)


# The report


def test_the_report_as_facts(family):
    facts = Report(plan=family, shapes={ONE: PLAIN}, rate=100).as_json()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    expected = {
        "prompts": 3,
        "tokens": 3000,
        "unique_tokens": 1300,
        "new_tokens": 1300,
        "prefill_tokens": 1488,
        "jobs": 3,
        "prefix_jobs": 1,
        "prompt_jobs": 2,
        "duplicates": 1,
        "already_stored": 0,
        "rate": 100,
    }
    assert {name: facts[name] for name in expected} == expected
    assert facts["saving"] == pytest.approx(1 - 1488 / 3000)
    assert facts["bytes"]["q8"] == {
        "total": 1488 * 544, "kv": 1488 * 544, "window": 0, "state": 0, "logits": 0
    }  # fmt: skip
    assert facts["seconds"]["most_seconds"] == 14.88
    (group,) = facts["groups"]
    assert (group["model"], group["codec"], group["prompts"]) == ("one", "q8", 3)
    assert group["cache"]["bytes_per_token"]["raw"] == 1024


def test_what_is_not_known_is_null(family):
    facts = Report(plan=family, shapes={}).as_json()
    assert facts["bytes"] == {"raw": None, "q8": None, "q4": None}
    assert facts["seconds"] is None
    assert facts["groups"][0]["cache"] is None


def test_the_report_as_a_table(family):
    shown = text_of(Report(plan=family, shapes={ONE: PLAIN}, rate=100).render())
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "prompts 3 1 equal to another" in lines
    assert "tokens 3,000 one prefill for each prompt" in lines
    assert "to prefill 1,300 – 1,488 one by one – side by side" in lines
    assert "saving 50.4% – 56.7% of the tokens" in lines
    assert "jobs 3 1 shared prefixes, 2 prompts" in lines
    assert "bytes as q8 809 kB chosen" in lines
    assert "prefill 13.0 s – 14.9 s of one worker at 100 tokens/s" in lines
    assert "pays after 1 use of each prompt" in lines


def test_without_a_rate_and_sizes_the_table_says_what_is_missing(family):
    shown = text_of(Report(plan=family, shapes={}).render())
    assert "unknown" in shown
    assert "tokens/s" not in shown


def test_several_groups_are_told_apart():
    batch = [prompt("a", (0, 300)), prompt("b", (0, 400), group=TWO)]
    with make_plan(batch) as plan:
        shown = text_of(Report(plan=plan, shapes={ONE: PLAIN, TWO: WINDOWED}).render())
        assert "two + tuned" in shown
        assert "chosen" not in shown
        facts = Report(plan=plan, shapes={ONE: PLAIN}).as_json()
        assert [one["cache"] is None for one in facts["groups"]] == [False, True]
        assert facts["bytes"]["raw"] is None


def test_sizes_of_models_as_table_and_facts():
    facts = sizes_json(WINDOWED, (100, 1000))
    assert facts["raw"] == {
        "bytes_per_token": 256,
        "constant_bytes": 300 * 768,
        "window_tokens": 300,
        "state_bytes": 0,
        "caches": {"100": 100 * 1024, "1000": 1000 * 256 + 300 * 768},
    }
    shown = text_of(sizes_table(WINDOWED, (1000,)))
    assert [line.split() for line in shown.splitlines()] == [
        ["codec", "a", "token", "besides", "1,000", "tokens"],
        ["raw", "256", "B", "230", "kB", "486", "kB"],
        ["q8", "136", "B", "122", "kB", "258", "kB"],
        ["q4", "74", "B", "66.6", "kB", "141", "kB"],
    ]


# The tree


def test_the_tree_shows_what_jobs_add_and_how_many_share_it(family):
    shown = text_of(*draw(family, lambda group, ids: f"{group.model} [{len(ids)}]\n {ids[0]}"))
    assert [line.rstrip() for line in shown.splitlines()] == [
        "one q8: 3 prompts, 3,000 tokens, 1,488 to prefill",
        f"└── +512 tokens shared by 3 prompts one [24] {_TEXT[0, 0]}",
        f"    ├── +488 tokens a and 1 equal … one [24] {_TEXT[1, 0]}",
        f"    └── +488 tokens b … one [24] {_TEXT[2, 0]}",
    ]


def test_the_tree_is_bounded_and_sums_up_the_rest():
    batch = [prompt(f"p{n}", (0, 512), (n % 4 + 1, 256 + n)) for n in range(20)]
    batch += [prompt(f"lone{n}", (5, n + 1)) for n in range(3)]
    with make_plan(batch) as plan:
        shown = text_of(*draw(plan, depth=2, breadth=2))
    assert [line.rstrip() for line in shown.splitlines()] == [
        "one q8: 23 prompts, 15,556 tokens, 1,609 to prefill",
        "├── +512 tokens shared by 20 prompts",
        "│   ├── +259 tokens p3, then 4 more",
        "│   │   └── … 4 prompts more, +16 tokens",
        "│   ├── +258 tokens p2, then 4 more",
        "│   │   └── … 4 prompts more, +16 tokens",
        "│   └── … 10 prompts more, +545 tokens",
        "└── +1 tokens lone0, then 2 more",
        "    └── +1 tokens lone1, then 1 more",
        "        └── … 1 prompt more, +1 tokens",
    ]


def test_text_of_prompts_cannot_change_how_the_tree_is_drawn():
    odd = TokenizedPrompt(custom_id="[red]x[/]", group=Group(model="[bold]m"), ids=ids((0, 40)))
    with make_plan([odd]) as plan:
        shown = text_of(*draw(plan, lambda group, ids: "[/]\x1b[2J\n" + "w" * 100), width=60)
    assert "[bold]m q8" in shown
    assert "[red]x[/]" in shown
    assert "\x1b" not in shown
    assert all(len(line) <= 60 for line in shown.splitlines())
    assert len(shown.splitlines()) == 2


def test_stored_prompts_are_counted_in_the_tree():
    batch = [prompt("a", (0, 300)), prompt("b", (1, 300))]
    whole = {batch[0].ids.tobytes()}

    def stored(group, ids, custom_ids):
        found = ids.tobytes() in whole
        return Stored(tokens=len(ids) if found else 0, complete=found)

    with make_plan(batch, stored=stored) as plan:
        assert "1 prompt stored already" in text_of(*draw(plan))
        assert "1 stored already" in text_of(Report(plan=plan, shapes={}).render())
