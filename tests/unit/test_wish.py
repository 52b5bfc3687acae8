"""Names of caches, and jobs made of a plan."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvq.queue.messages import PrefillMessage
from kvq.store.keys import pack
from kvq.store.names import valid_name
from kvq_producer.plan import Group, TokenizedPrompt, make_plan
from kvq_producer.prompts import Faults, Prompt
from kvq_producer.submit.garbage import seldom_collected
from kvq_producer.submit.intake import Intake
from kvq_producer.submit.jobs import Work
from kvq_producer.submit.lookup import whole_key
from kvq_producer.submit.wish import Wanted, Wish, caches_of

GROUP = Group(model="m")
KEY = b"k" * 20


def wanted(custom_id: str = "a", **facts: object) -> Wanted:
    prompt = Prompt(line=7, custom_id=custom_id, text="x", **facts)  # type: ignore[arg-type]
    return Wanted.of(prompt, (), Wish(ttl=60.0, metadata={"team": "x", "k": 1}))


def test_a_line_s_own_settings_win_over_those_for_all() -> None:
    one = wanted(ttl=5.0, metadata={"k": 2})
    assert (one.ttl, one.pin, one.metadata) == (5.0, False, {"team": "x", "k": 2})
    assert wanted().ttl == 60.0
    group = Wish(codec="q4").group("m", Prompt(line=1, custom_id="a", text="x", codec="raw"))
    assert group.codec == "raw"


@pytest.mark.parametrize(
    ("custom_id", "word"),
    [("minutes", "minutes"), ("a b/c", "a-b-c"), ("..", "prompt"), ("ü" * 5, "prompt"),
     ("x" * 200, "x" * 60), ("line-7", "prompt"), ("line-8", "line-8")],
)  # fmt: skip
def test_a_nameless_cache_is_named_after_its_id_and_content(custom_id: str, word: str) -> None:
    (cache,), names = caches_of([wanted(custom_id)], GROUP, KEY)
    assert cache.name == names[0]
    assert cache.name.startswith(f"{word}-")
    assert len(cache.name) == len(word) + 13
    assert valid_name(cache.name)


def test_the_name_changes_with_the_content_only() -> None:
    def name(group: Group, key: bytes) -> str:
        return caches_of([wanted()], group, key)[1][0]

    assert name(GROUP, KEY) == name(Group(model="m"), KEY)
    groups = [Group(model="n"), Group(model="m", codec="raw"), Group(model="m", adapter="a")]
    others = [name(GROUP, b"j" * 20), *(name(group, KEY) for group in groups)]
    assert len({name(GROUP, KEY), *others}) == 5


def test_prompts_of_the_same_ids_share_a_cache_unless_they_name_one() -> None:
    some = [wanted("a"), wanted("b", name="own"), wanted("c", ttl=900.0, pin=True)]
    caches, names = caches_of(some, GROUP, KEY)
    assert names[0] == names[2]
    assert names[1] == "own"
    assert [one.name for one in caches] == [names[0], "own"]
    assert (caches[0].ttl, caches[0].pin, caches[0].metadata) == (900.0, True, some[0].metadata)
    forever = [wanted("a"), Wanted.of(Prompt(line=1, custom_id="z", text="x"), (), Wish())]
    assert caches_of(forever, GROUP, KEY)[0][0].ttl is None


def test_folders_become_absolute_and_hub_ids_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    prompt = Prompt(line=1, custom_id="a", text="x")
    assert Wish().group("model", prompt).model == str(tmp_path / "model")
    assert Wish().group("org/model", prompt).model == "org/model"
    assert Wish(adapter="model").group("org/m", prompt).adapter == str(tmp_path / "model")


@pytest.fixture
def work() -> Iterator[Callable[..., Work]]:
    """Makes the work of prompts given by custom id."""
    made: list[Work] = []

    def make(ids: dict[str, list[int]], **wish: object) -> Work:
        made.append(_work(ids, **wish))
        return made[-1]

    yield make
    for one in made:
        one.intake.plan.close()


def _work(ids: dict[str, list[int]], **wish: object) -> Work:
    arrays = {name: np.array(one, np.uint32) for name, one in ids.items()}
    plan = make_plan(
        (TokenizedPrompt(custom_id=n, group=GROUP, ids=a) for n, a in arrays.items()), align=1
    )
    intake = Intake(
        source="test",
        plan=plan,
        wanted={name: wanted(name) for name in ids},
        lookup=None,
        faults=Faults("test"),
    )
    return Work(intake=intake, wish=Wish(**wish), batch="b-1")  # type: ignore[arg-type]


SHARED = list(range(1000, 1600))
IDS = {
    "a": [*SHARED, 1, 2, 3],
    "b": [*SHARED, 4, 5],
    "c": list(range(50)),
    "again": [*SHARED, 4, 5],
}


def test_jobs_carry_what_the_prompt_is_whichever_way_it_is_cut(work: Callable[..., Work]) -> None:
    made = work(IDS, store="/kv", window_records="all", keep_every=128, max_kl=0.1)
    count = len(made.intake.plan.jobs)
    pairs = list(made.jobs(0, count))
    held = {prefix.key: made.packed(prefix) for _, prefix in pairs if prefix}
    assert list(held.values()) == [pack(SHARED)]
    whole = {}
    for job, _ in pairs:
        message = PrefillMessage.decode(job.message.encode())
        assert message == job.message
        assert (message.store, message.window_records, message.keep_every, message.max_kl) == (
            "/kv", "all", 128, 0.1,
        )  # fmt: skip
        assert message.batch == "b-1"
        ids = message.token_ids(held.get)
        assert job.id == message.job_id(whole_key(np.frombuffer(ids, "<u4").astype(np.uint32)))
        whole[message.custom_ids] = ids
    assert whole[()] == pack(SHARED)
    assert whole["a",] == pack(IDS["a"])
    assert whole["b", "again"] == pack(IDS["b"])
    assert whole["c",] == pack(IDS["c"])
    by_ids = {job.message.custom_ids: job for job, _ in pairs}
    assert by_ids["a",].parents == by_ids["b", "again"].parents == (by_ids[()].id,)
    assert by_ids[()].parents == by_ids["c",].parents == ()
    assert len(by_ids["a",].message.tail) == 3 * 4


def test_ids_of_jobs_do_not_depend_on_the_rest_of_the_batch(work: Callable[..., Work]) -> None:
    alone = work({"a": IDS["a"]})
    together = work(IDS)
    assert set(alone.ids) < set(together.ids)
    assert len(set(together.ids)) == len(together.ids)


def test_entries_answer_every_custom_id_in_the_order_of_the_file(work: Callable[..., Work]) -> None:
    made = work(IDS)
    prompts, prefixes = made.entries()
    assert [one.custom_id for one in prompts] == ["a", "b", "c", "again"]
    assert prompts[1].job_id == prompts[3].job_id
    assert prompts[1].name == prompts[3].name
    assert [one.tokens for one in prompts] == [603, 602, 50, 602]
    assert prompts[3].work == 0
    assert [one.tokens for one in prefixes] == [600]
    total = sum(one.work for one in (*prompts, *prefixes))
    assert total == made.intake.plan.totals.prefill_tokens


def test_python_looks_for_garbage_seldom_and_then_as_before() -> None:
    before = gc.get_threshold()
    try:
        for given, inside in ((700, 100_000), (200_000, 200_000), (0, 0)):
            gc.set_threshold(given, 5, 7)
            with seldom_collected():
                assert gc.get_threshold() == (inside, 5, 7)
            assert gc.get_threshold() == (given, 5, 7)
    finally:
        gc.set_threshold(*before)
