from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import UsageError
from kvq.store.keys import BLOCK, ROOT, TokenIds, chain_keys, child_key, common_prefix
from kvq_producer.plan import Group, JobKind, Plan, PlannedJob, Stored, TokenizedPrompt, make_plan

ONE = Group(model="one")
_TEXT = np.random.default_rng(7).integers(0, 150_000, (6, 1200), dtype=np.uint32)


def ids(*parts: tuple[int, int]) -> TokenIds:
    """Ids made of (text number, tokens) parts: equal parts at equal places give equal ids."""
    return np.concatenate([_TEXT[text, :tokens] for text, tokens in parts])


def prompts(
    *all_ids: TokenIds, group: Group = ONE, priority: Sequence[int] = ()
) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(
            custom_id=f"p{number}",
            group=group,
            ids=one,
            priority=priority[number] if priority else 0,
        )
        for number, one in enumerate(all_ids)
    ]


def job_of(plan: Plan, custom_id: str) -> PlannedJob:
    (found,) = [job for job in plan.jobs if custom_id in job.custom_ids]
    return found


def parent_of(plan: Plan, custom_id: str) -> PlannedJob | None:
    parent = job_of(plan, custom_id).parent
    return None if parent is None else plan.jobs[parent]


def prefixes(plan: Plan) -> list[PlannedJob]:
    return [job for job in plan.jobs if job.kind is JobKind.PREFIX]


def chain_key(one: TokenIds) -> bytes:
    keys = list(chain_keys(one))
    rest = len(one) % BLOCK
    last = keys[-1] if keys else ROOT
    return child_key(last, one[-rest:]) if rest else last


def test_an_empty_batch_has_an_empty_plan():
    with make_plan([]) as plan:
        assert plan.jobs == plan.done == plan.groups == ()
        assert (plan.totals.prompts, plan.totals.saving, plan.totals.best_saving) == (0, 0, 0)


def test_a_lone_prompt_is_one_job_whose_ids_can_be_read():
    one = ids((0, 600))
    with make_plan(prompts(one)) as plan:
        (job,) = plan.jobs
        assert job.kind is JobKind.PROMPT
        assert (job.tokens, job.prefill_tokens, job.parent, job.keep) == (600, 600, None, ())
        assert (job.custom_ids, job.serves, job.critical_tokens) == (("p0",), 1, 600)
        assert job.key == chain_key(one)
        assert np.array_equal(plan.ids(job), one)
        assert plan.ids(job).dtype == np.uint32
        assert plan.packed(job) == one.astype("<u4").tobytes()
        assert plan.packed(job, 512) == one[512:].astype("<u4").tobytes()


def test_a_prompt_without_tokens_is_refused_by_its_id():
    with pytest.raises(UsageError, match="'p1' has no tokens"):
        make_plan(prompts(ids((0, 3)), np.empty(0, np.uint32)))


def test_shared_blocks_become_a_prefix_job_and_the_branch_point_is_kept():
    with make_plan(prompts(ids((0, 700), (1, 300)), ids((0, 700), (2, 300)))) as plan:
        (prefix,) = prefixes(plan)
        assert (prefix.tokens, prefix.serves, prefix.custom_ids) == (512, 2, ())
        assert prefix.key == chain_key(ids((0, 512)))
        assert prefix.critical_tokens == 512 + 488
        assert np.array_equal(plan.ids(prefix), ids((0, 512)))
        for custom_id in ("p0", "p1"):
            assert parent_of(plan, custom_id) == prefix
            assert job_of(plan, custom_id).keep == (700,)
            assert job_of(plan, custom_id).prefill_tokens == 488
        assert plan.totals.tokens == 2000
        assert plan.totals.unique_tokens == plan.totals.new_tokens == 1300
        assert plan.totals.prefill_tokens == plan.totals.block_tokens == 512 + 2 * 488
        assert plan.totals.saving == pytest.approx(1 - 1488 / 2000)
        assert plan.totals.best_saving == pytest.approx(1 - 1300 / 2000)


def test_less_than_a_block_in_common_makes_no_prefix_job_but_is_kept():
    with make_plan(prompts(ids((0, 255), (1, 300)), ids((0, 255), (2, 300)))) as plan:
        assert not prefixes(plan)
        assert [job.keep for job in plan.jobs] == [(255,), (255,)]


def test_a_branch_point_right_after_a_position_kept_anyway_is_not_kept():
    with make_plan(prompts(ids((0, 530), (1, 300)), ids((0, 530), (2, 300)))) as plan:
        assert [job.tokens for job in prefixes(plan)] == [512]
        assert job_of(plan, "p0").keep == ()


def test_nested_prefixes_wait_for_one_another():
    shared = ids((0, 512))
    batch = [np.concatenate([shared, ids((1, 512), (n, 100))]) for n in (2, 3)]
    batch += [np.concatenate([shared, ids((n, 300))]) for n in (4, 5)]
    with make_plan(prompts(*batch)) as plan:
        outer, inner = prefixes(plan)
        assert (outer.tokens, outer.parent, outer.serves) == (512, None, 4)
        assert (inner.tokens, inner.prefill_tokens, inner.serves) == (1024, 512, 2)
        assert plan.jobs[0] == outer
        assert inner.parent == 0
        assert parent_of(plan, "p0") == parent_of(plan, "p1") == inner
        assert parent_of(plan, "p2") == parent_of(plan, "p3") == outer
        assert outer.critical_tokens == 512 + 512 + 100


def test_a_growing_chat_is_a_chain_of_prompts_without_prefix_jobs():
    turns = [ids((0, 600)), ids((0, 600), (1, 700)), ids((0, 600), (1, 700), (2, 5))]
    with make_plan(prompts(*turns)) as plan:
        assert [job.custom_ids for job in plan.jobs] == [("p0",), ("p1",), ("p2",)]
        assert [job.parent for job in plan.jobs] == [None, 0, 1]
        assert [job.prefill_tokens for job in plan.jobs] == [600, 700, 5]
        assert plan.totals.prefill_tokens == plan.totals.unique_tokens == 1305
        assert plan.jobs[0].serves == 3


def test_a_prompt_that_ends_where_others_part_is_their_prefix_job():
    batch = [ids((0, 512)), ids((0, 512), (1, 50)), ids((0, 512), (2, 50))]
    with make_plan(prompts(*batch)) as plan:
        assert not prefixes(plan)
        assert parent_of(plan, "p1") == parent_of(plan, "p2") == job_of(plan, "p0")


@pytest.mark.parametrize(("siblings", "made"), [(2, 0), (40, 1)])
def test_a_piece_of_a_block_after_a_prompt_is_a_prefix_job_only_for_many(siblings, made):
    last = np.arange(siblings, dtype=np.uint32)
    batch = [np.concatenate([ids((0, 800)), last[n:]]) for n in range(siblings)]
    with make_plan(prompts(ids((0, 690)), *batch)) as plan:
        assert [job.prefill_tokens for job in prefixes(plan)] == [78] * made


def test_a_few_tokens_that_all_begin_with_are_no_prefix_job():
    batch = [np.array([2, *range(n, n + 50)], np.uint32) for n in range(100, 60_000, 150)]
    with make_plan(prompts(*batch), align=1) as plan:
        assert not prefixes(plan)


def test_equal_prompts_are_one_job_that_answers_every_custom_id():
    with make_plan(prompts(ids((0, 300)), ids((1, 10)), ids((0, 300)), priority=(1, 0, 4))) as plan:
        job = job_of(plan, "p2")
        assert job.custom_ids == ("p0", "p2")
        assert (job.serves, job.priority) == (2, 4)
        assert (plan.totals.prompts, plan.totals.duplicates, plan.totals.jobs) == (3, 1, 2)
        assert plan.totals.tokens == 610
        assert plan.totals.unique_tokens == 310


def test_groups_never_share():
    other = Group(model="one", codec="raw")
    batch = prompts(ids((0, 600)), ids((0, 512), (1, 8)))
    batch += [
        TokenizedPrompt(custom_id=f"raw{n}", group=other, ids=one.ids)
        for n, one in enumerate(batch)
    ]
    with make_plan(batch) as plan:
        assert [(job.group, job.tokens) for job in prefixes(plan)] == [(ONE, 512), (other, 512)]
        for job in plan.jobs:
            assert job.parent is None or plan.jobs[job.parent].group == job.group
        assert [one.group for one in plan.groups] == [ONE, other]
        assert plan.groups[0].totals == plan.groups[1].totals
        assert plan.totals.prompts == 4


def test_prefixes_can_end_right_where_prompts_part():
    with make_plan(prompts(ids((0, 700), (1, 300)), ids((0, 700), (2, 300))), align=1) as plan:
        (prefix,) = prefixes(plan)
        assert prefix.tokens == 700
        assert prefix.key == chain_key(ids((0, 700)))
        assert job_of(plan, "p0").keep == ()
        assert plan.totals.prefill_tokens == plan.totals.unique_tokens


def test_many_branch_points_on_one_path_are_thinned_to_the_far_apart():
    path = np.concatenate(_TEXT)
    batch = [path]
    for position in range(100, 6000, 100):
        batch.append(np.concatenate([path[:position], [999_999]]).astype(np.uint32))
    with make_plan(prompts(*batch), align=10_000) as plan:
        keep = job_of(plan, "p0").keep
        assert len(keep) == 16
        assert all(position % 100 == 0 for position in keep)
        assert keep[-1] == 5800
        assert np.diff((0, *keep)).max() <= 400


# What is stored


class FakeStore:
    """Has the given sequences; matches tokens one by one."""

    def __init__(self, *stored: TokenIds, complete: bool = True) -> None:
        self.stored, self.complete = stored, complete
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, group: Group, ids: TokenIds, custom_ids: tuple[str, ...]) -> Stored:
        self.asked.append(custom_ids)
        tokens = max((common_prefix(ids, one) for one in self.stored), default=0)
        whole = self.complete and any(np.array_equal(ids, one) for one in self.stored)
        return Stored(tokens=tokens, complete=whole)


def test_stored_prompts_need_no_job_and_others_start_from_them():
    batch = [ids((0, 600)), ids((0, 600), (1, 300)), ids((2, 300)), ids((0, 600))]
    store = FakeStore(batch[0])
    with make_plan(prompts(*batch), stored=store) as plan:
        (done,) = plan.done
        assert (done.custom_ids, done.tokens, done.key) == (("p0", "p3"), 600, chain_key(batch[0]))
        job = job_of(plan, "p1")
        assert (job.prefill_tokens, job.parent, job.critical_tokens) == (300, None, 300)
        assert plan.totals.already_stored == 2
        assert plan.totals.duplicates == 1
        assert plan.totals.unique_tokens == 1200
        assert plan.totals.new_tokens == plan.totals.prefill_tokens == 600
        assert plan.totals.block_tokens == 600 + (900 - 512) + 300
        assert plan.totals.new_block_tokens == (900 - 512) + 300


def test_a_stored_prefix_needs_no_prefix_job():
    batch = [ids((0, 600), (n, 100)) for n in (1, 2, 3)]
    with make_plan(prompts(*batch), stored=FakeStore(ids((0, 512)))) as plan:
        assert not prefixes(plan)
        assert [job.parent for job in plan.jobs] == [None] * 3
        assert plan.totals.prefill_tokens == 3 * 188


def test_a_prompt_stored_without_its_manifest_is_a_job_that_prefills_nothing():
    one = ids((0, 600))
    with make_plan(prompts(one), stored=FakeStore(one, complete=False)) as plan:
        (job,) = plan.jobs
        assert (job.prefill_tokens, job.parent) == (0, None)
        assert not plan.done


def test_what_all_but_one_have_stored_is_no_prefix_job_for_the_last():
    batch = [ids((0, 512), (n, 100)) for n in (1, 2, 3)]
    with make_plan(prompts(*batch), stored=FakeStore(*batch[:2])) as plan:
        (job,) = plan.jobs
        assert job.custom_ids == ("p2",)
        assert job.prefill_tokens == 100


def test_a_store_that_has_nothing_is_asked_once_for_all_that_share_a_token():
    store = FakeStore()
    with make_plan(prompts(*(ids((0, 300), (n, 300)) for n in range(1, 6))), stored=store):
        assert len(store.asked) == 1


# The order


def test_shared_work_comes_first_then_lone_prompts_then_families():
    batch = [ids((3, 1000)), ids((4, 200))]
    batch += [ids((0, 512), (n, 90)) for n in (1, 2)]
    batch += [ids((5, 256), (n, 20 * n)) for n in (1, 2)]
    with make_plan(prompts(*batch)) as plan:
        assert [(job.kind, job.tokens, job.custom_ids) for job in plan.jobs] == [
            (JobKind.PREFIX, 512, ()),
            (JobKind.PREFIX, 256, ()),
            (JobKind.PROMPT, 1000, ("p0",)),
            (JobKind.PROMPT, 200, ("p1",)),
            (JobKind.PROMPT, 602, ("p2",)),
            (JobKind.PROMPT, 602, ("p3",)),
            (JobKind.PROMPT, 296, ("p5",)),
            (JobKind.PROMPT, 276, ("p4",)),
        ]


def test_a_prefix_has_the_priority_of_the_most_urgent_prompt_below_it():
    batch = [ids((3, 1000)), ids((0, 512), (1, 90)), ids((0, 512), (2, 90)), ids((4, 30))]
    with make_plan(prompts(*batch, priority=(1, 0, 5, 9))) as plan:
        assert [(job.tokens, job.priority) for job in plan.jobs] == [
            (30, 9),
            (512, 5),
            (602, 5),
            (1000, 1),
            (602, 0),
        ]


def test_jobs_of_a_model_stay_together():
    a, b, c = (Group(model=m, codec=k) for m, k in (("a", "q8"), ("b", "q8"), ("a", "raw")))
    batch = [
        TokenizedPrompt(custom_id=str(n), group=group, ids=ids((n, 20)))
        for n, group in enumerate((a, b, c, a, b))
    ]
    with make_plan(batch) as plan:
        assert [job.group for job in plan.jobs] == [a, a, c, b, b]


# Any batch

_part = st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 63, 100, 255, 256, 257, 300, 512]))
_ids = st.lists(_part, min_size=1, max_size=4).map(lambda parts: ids(*parts))
_batches = st.lists(_ids, min_size=1, max_size=14)


def distinct(batch: list[TokenIds]) -> dict[bytes, TokenIds]:
    return {one.tobytes(): one for one in batch}


def trie_tokens(batch: list[TokenIds]) -> int:
    """Distinct non-empty prefixes, counted one by one."""
    nodes: dict[tuple[int, int], int] = {}
    for one in batch:
        node = 0
        for token in one.tolist():
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def block_tokens(batch: list[TokenIds]) -> int:
    """Tokens of all distinct blocks."""
    seen = {}
    for one in distinct(batch).values():
        for start in range(0, len(one), BLOCK):
            end = min(start + BLOCK, len(one))
            seen[one[:end].tobytes()] = end - start
    return sum(seen.values())


def is_prefix(a: TokenIds, b: TokenIds) -> bool:
    return common_prefix(a, b) == len(a)


@settings(max_examples=80, deadline=None)
@given(_batches, st.sampled_from([BLOCK, 1]))
def test_every_plan_is_a_forest_that_answers_each_prompt_once(batch, align):
    with make_plan(prompts(*batch), align=align) as plan:
        answers = [custom_id for job in plan.jobs for custom_id in job.custom_ids]
        assert sorted(answers) == sorted(f"p{n}" for n in range(len(batch)))
        assert len({job.key for job in plan.jobs}) == len(plan.jobs)
        for place, job in enumerate(plan.jobs):
            own = plan.ids(job)
            assert job.key == chain_key(own)
            assert bool(job.custom_ids) == (job.kind is JobKind.PROMPT)
            for custom_id in job.custom_ids:
                assert np.array_equal(own, batch[int(custom_id[1:])])
            start = 0
            if job.parent is not None:
                assert job.parent < place
                parent = plan.jobs[job.parent]
                start = parent.tokens
                assert start < job.tokens
                assert is_prefix(plan.ids(parent), own)
                assert parent.critical_tokens >= job.critical_tokens + parent.prefill_tokens
            assert job.prefill_tokens == job.tokens - start
            assert job.serves == sum(
                job.tokens <= len(one) and is_prefix(own, one) and waits(plan, n, place)
                for n, one in enumerate(batch)
            )
            if job.kind is JobKind.PREFIX:
                assert job.tokens % align == 0
                assert sum(is_prefix(own, one) for one in distinct(batch).values()) >= 2


def waits(plan: Plan, prompt: int, place: int) -> bool:
    """Whether the prompt's job is the one at `place` or below it."""
    here: int | None = plan.jobs.index(job_of(plan, f"p{prompt}"))
    while here is not None and here != place:
        here = plan.jobs[here].parent
    return here == place


@settings(max_examples=80, deadline=None)
@given(_batches)
def test_prefixes_that_end_where_prompts_part_spare_all_but_a_block_a_branch(batch):
    with make_plan(prompts(*batch), align=1) as plan:
        spare = plan.totals.prefill_tokens - plan.totals.unique_tokens
    assert 0 <= spare <= BLOCK * (len(distinct(batch)) - 1)


@settings(max_examples=80, deadline=None)
@given(_batches)
def test_following_any_plan_prefills_no_block_twice(batch):
    with make_plan(prompts(*batch)) as plan:
        totals = plan.totals
    assert totals.tokens == sum(len(one) for one in batch)
    assert totals.unique_tokens == totals.new_tokens == trie_tokens(batch)
    assert totals.block_tokens == totals.new_block_tokens == block_tokens(batch)
    assert totals.unique_tokens <= totals.prefill_tokens <= totals.block_tokens
    assert totals.prefill_tokens == sum(job.prefill_tokens for job in plan.jobs)
    kept = list(distinct(batch).values())
    if not any(a is not b and is_prefix(a, b) for a in kept for b in kept):
        assert totals.prefill_tokens == totals.block_tokens
        shared = {common_prefix(a, b) // BLOCK for a in kept for b in kept if a is not b} - {0}
        assert {job.tokens // BLOCK for job in prefixes(plan)} == shared


@settings(max_examples=60, deadline=None)
@given(_batches)
def test_running_any_plan_job_by_job_prefills_only_the_tries_tokens(batch):
    """With a store that matches within blocks, and jobs one after the other."""
    store: list[TokenIds] = []
    prefilled = 0
    with make_plan(prompts(*batch)) as plan:
        for job in plan.jobs:
            own = plan.ids(job)
            prefilled += len(own) - max((common_prefix(own, one) for one in store), default=0)
            store.append(own)
        assert prefilled == plan.totals.new_tokens


@settings(max_examples=80, deadline=None)
@given(_batches)
def test_kept_positions_are_where_prompts_part_far_enough_from_what_is_kept_anyway(batch):
    with make_plan(prompts(*batch)) as plan:
        for job in plan.jobs:
            own = plan.ids(job)
            parts = {common_prefix(own, one) for one in batch}
            assert set(job.keep) <= parts
            assert len(job.keep) <= 16
            gaps = np.diff((0, *job.keep, job.tokens))
            assert all(gap >= 64 for gap in gaps[:-1])
            assert gaps[-1] > 0
        # Wherever two prompts part, one that runs later finds a position within reach.
        for a in range(len(batch)):
            for b in range(a):
                point = common_prefix(batch[a], batch[b])
                mine = job_of(plan, f"p{a}")
                ends = {len(one) for one in batch if is_prefix(one, batch[a])}
                ends |= {job.tokens for job in prefixes(plan) if is_prefix(plan.ids(job), batch[a])}
                reach = max(p for p in {0, *mine.keep, *ends} if p <= point)
                assert point - reach < 64


@settings(max_examples=80, deadline=None)
@given(_batches, st.randoms(use_true_random=False))
def test_the_plan_depends_on_nothing_but_the_prompts(batch, random):
    with make_plan(prompts(*batch)) as plan, make_plan(prompts(*batch)) as again:
        assert plan == again
    shuffled = prompts(*batch)
    random.shuffle(shuffled)
    with make_plan(shuffled) as other:
        assert other.totals == plan.totals
        assert _links(other) == _links(plan)


def _links(plan: Plan) -> set[tuple[bytes, bytes | None, tuple[int, ...]]]:
    return {
        (job.key, None if job.parent is None else plan.jobs[job.parent].key, job.keep)
        for job in plan.jobs
    }


@settings(max_examples=60, deadline=None)
@given(_batches, st.lists(_ids, max_size=4), st.data())
def test_what_is_stored_is_never_planned_again(batch, stored, data):
    stored = stored + data.draw(st.lists(st.sampled_from(batch), max_size=3))
    store = FakeStore(*stored)
    everything = FakeStore(*stored)
    with make_plan(prompts(*batch), stored=store) as plan:
        answers = [c for job in plan.jobs for c in job.custom_ids]
        done = [c for one in plan.done for c in one.custom_ids]
        assert sorted(answers + done) == sorted(f"p{n}" for n in range(len(batch)))
        for custom_id in done:
            assert any(np.array_equal(batch[int(custom_id[1:])], one) for one in stored)
        assert plan.totals.already_stored == len(done)
        least = trie_tokens([*batch, *stored]) - trie_tokens(stored) if stored else None
        if least is not None:
            assert plan.totals.new_tokens == least
        assert plan.totals.new_tokens <= plan.totals.prefill_tokens
        for job in plan.jobs:
            found = everything(job.group, plan.ids(job), job.custom_ids).tokens
            parent = plan.jobs[job.parent].tokens if job.parent is not None else 0
            assert job.prefill_tokens == job.tokens - max(found, parent)
            assert not parent or parent > found
