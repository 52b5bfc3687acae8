"""`kvq metrics`: figures of a real queue and store as a real scrape gets them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from dummystore import WINDOWED, save_cache
from jobs_for_tests import job, submit
from prometheus_client.parser import text_string_to_metric_families
from servers import Server
from workers import Fleet, environment, eventually

from kvq.queue import keys, tally
from kvq.queue.connection import PatientRedis
from kvq.store.store import Store
from kvq_producer.cli import run
from kvq_producer.metrics.files import StoreFigures, count_files
from kvq_producer.metrics.table import METRICS, markdown

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

Values = dict[tuple[str, ...], float]


def scraped(text: str) -> Values:
    """Every sample by its name and label values, in the order of the table."""
    labels_of = {one.name: one.labels for one in METRICS}
    return {
        (one.name, *(one.labels[label] for label in (*labels_of[family.name], "le")
                     if label in one.labels)): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }  # fmt: skip


@pytest.fixture
def once(server: Server, store: Store, capsys: pytest.CaptureFixture[str]) -> Callable[[], Values]:
    def scrape() -> Values:
        given = ["--redis-url", server.url, "--store", str(store.path)]
        assert run(["metrics", "--once", *given]) == 0
        return scraped(capsys.readouterr().out)

    return scrape


@contextmanager
def served(folder: Path, url: str, *options: str) -> Iterator[Callable[[], str]]:
    """`kvq metrics` in a process of its own; gives a function that scrapes it."""
    log = folder / "metrics.log"
    command = [sys.executable, "-m", "kvq_producer", "metrics", "--listen", "127.0.0.1:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--redis-url", url, *options], stderr=output, env=environment(url)
        )
    try:
        eventually(lambda: "serving" in log.read_text() or process.poll() is not None, 30)
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", log.read_text())
        assert found is not None, log.read_text()

        def scrape() -> str:
            with urllib.request.urlopen(found[0], timeout=10) as reply:
                return str(reply.read().decode())

        yield scrape
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM


def test_a_scrape_of_a_queue_before_and_after_its_jobs(
    fleet: Fleet, server: Server, client: PatientRedis, store: Store, tmp_path: Path
) -> None:
    prefix = job(1, 64, name="")
    children = [job(n, 64, parents=(prefix.id,)) for n in range(2, 5)]
    submit(client, [*children, job(9, model="wrong")], [prefix])
    client.hset(keys.job(prefix.id), "enqueued_at", "2020-01-01T00:00:00.000000Z")
    with served(tmp_path, server.url, "--store", str(store.path)) as scrape:
        before = scraped(scrape())
        assert before["kvq_jobs", "kvq", "waiting"] == 2
        assert before["kvq_jobs", "kvq", "deferred"] == 3
        assert before["kvq_oldest_waiting_job_seconds", "kvq"] > 5 * 365 * 86400
        assert before["kvq_workers", "kvq", "idle", ""] == 0
        assert before["kvq_batches",] == before["kvq_redis_up",] == 1
        assert ("kvq_prefilled_tokens_total", "kvq", "fast", "raw") not in before

        fleet.start()
        eventually(lambda: client.zcard(keys.registry("finished", "kvq")) == 5)
        eventually(lambda: ("kvq_workers", "kvq", "idle", "fast") in scraped(scrape()))
        after = scraped(scrape())
        assert after["kvq_jobs", "kvq", "waiting"] == after["kvq_jobs", "kvq", "deferred"] == 0
        assert after["kvq_jobs", "kvq", "finished"] == 5
        assert after["kvq_oldest_waiting_job_seconds", "kvq"] == 0
        assert after["kvq_workers", "kvq", "idle", "fast"] == 1
        assert after["kvq_jobs_stored_total", "kvq", "fast", "raw"] == 4
        assert after["kvq_caches_written_total", "kvq", "fast", "raw"] == 3
        assert after["kvq_prefilled_tokens_total", "kvq", "fast", "raw"] == 256
        assert after["kvq_jobs_failed_total", "kvq", "unsupported_model"] == 1
        assert after["kvq_store_up", str(store.path)] == 1


def test_redis_may_go_and_come_back(server: Server, tmp_path: Path) -> None:
    with served(tmp_path, server.url) as scrape:
        assert scraped(scrape())["kvq_redis_up",] == 1
        server.kill()
        gone = scraped(scrape())
        assert gone["kvq_redis_up",] == 0
        assert "kvq_build_info" in {name for name, *_ in gone}
        server.start()
        assert scraped(scrape())["kvq_redis_up",] == 1


def test_divergences_make_a_histogram(client: PatientRedis, once: Callable[[], Values]) -> None:
    result: dict[str, Any] = {
        "status": "stored", "model": "m", "codec": "q4", "tokens": 10, "prefilled_tokens": 4,
        "reused_tokens": 6, "bytes": 100, "bytes_written": 30, "prefill_seconds": 1,
        "seconds": 2,
    }  # fmt: skip
    for divergence in (0.0002, 0.002, 0.002, 5.0):
        tally.count_result(client, "kvq", {**result, "quality": {"mean_kl": divergence}}, caches=1)
    found = once()
    name, of = "kvq_cache_divergence_nats", ("kvq", "m", "q4")
    assert found[f"{name}_bucket", *of, "0.0001"] == 0
    assert found[f"{name}_bucket", *of, "0.0003"] == 1
    assert found[f"{name}_bucket", *of, "0.003"] == 3
    assert found[f"{name}_bucket", *of, "1"] == 3
    assert found[f"{name}_bucket", *of, "+Inf"] == found[f"{name}_count", *of] == 4
    assert found[f"{name}_sum", *of] == pytest.approx(5.0042)
    assert found["kvq_reused_bytes_total", *of] == 4 * 70
    assert found["kvq_job_seconds_total", *of] == 8


def test_hostile_values_break_no_scrape(client: PatientRedis, once: Callable[[], Values]) -> None:
    client.sadd("rq:workers:kvq", "rq:worker:a", b"rq:worker:\xff", "rq:worker:b")
    client.hset("rq:worker:a", mapping={"state": b"\xff\n", "kvq_model": 'x"\n' + "y" * 999})
    client.set("rq:worker:b", "text")
    client.rpush(keys.queue("kvq"), b"\xff\xfe", "nobody", "text")
    client.set(keys.job("text"), "x")
    client.hset(tally.key("kvq"), '["failed","a\\nb\\"c"]', "3")
    client.hset(tally.key("kvq"), '["jobs","only one label"]', "3")
    found = once()
    assert found["kvq_redis_up",] == 1
    assert found["kvq_jobs_failed_total", "kvq", 'a\nb"c'] == 3
    ((_, _, state, model),) = [name for name in found if name[0] == "kvq_workers"]
    assert state == "�\n"
    assert len(model) == 200


def test_files_of_a_store_are_counted_by_kind_and_codec(store: Store) -> None:
    save_cache(store, WINDOWED, "a", range(300))
    (store.path / "quarantine").mkdir()
    (store.path / "quarantine" / "1-x.safetensors").write_bytes(b"damaged")
    folder = store.space_folder(WINDOWED)
    (folder / ".tmp-1-2.safetensors").write_bytes(b"half")
    count = count_files(store.path)
    names = [path for path in folder.rglob("*.safetensors") if not path.name.startswith(".")]
    words = Counter(name.suffixes[2].lstrip(".") for name in names)
    assert {kind: count.files[kind, "raw"] for kind in ("kv", "window", "logits")} == {
        "kv": 2,
        "window": words["window"],
        "logits": words["logits"],
    }
    windows = [path.stat().st_size for path in names if ".window." in path.name]
    assert count.bytes["window", "raw"] == sum(windows) > 0
    assert count.files["manifest", ""] == 1
    assert count.files["quarantine", ""] == 1
    assert count.bytes["quarantine", ""] == 7
    # space.json, and what is being written
    assert count.files["other", "raw"] == 2
    assert sum(count.files.values()) == len([p for p in store.path.rglob("*") if p.is_file()]) - 1


def test_a_store_is_counted_at_most_so_often(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(StoreFigures, "count", lambda self: counted.append(1))
    figures = StoreFigures(store.path, every=3600)
    for _ in range(3):
        list(figures.samples())
    eventually(lambda: counted == [1])
    list(StoreFigures(store.path, every=0).samples())
    eventually(lambda: counted == [1, 1])


def test_a_store_that_is_gone_is_said_to_be_down(tmp_path: Path) -> None:
    (sample,) = StoreFigures(tmp_path / "gone", every=1).samples()
    assert (sample.metric.name, sample.value) == ("kvq_store_up", 0)


def test_a_port_that_is_taken_is_told_and_a_bad_one_too(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = f"127.0.0.1:{server.port}"
    assert run(["metrics", "--listen", taken, "--redis-url", server.url]) == 2
    assert f"cannot listen on {taken}" in capsys.readouterr().err
    assert run(["metrics", "--listen", "127.0.0.1", "--redis-url", server.url]) == 2
    assert "not HOST:PORT" in capsys.readouterr().err


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


#: A metric, the labels that it is selected by, and those that it is summed by.
_USE = re.compile(r"\b(kvq_[a-z_]+)(\{[^}]*\})?")


def test_dashboard_and_alerts_use_metrics_and_labels_that_exist() -> None:
    of_name = {one.shown: one for one in METRICS}
    used = set()
    for where, expression in expressions():
        for name, selector in _USE.findall(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = of_name.get(name) or of_name.get(base)
            assert metric is not None, f"{where}: {name}"
            used.add(metric.shown)
            selected = set(re.findall(r"([a-z_]+)\s*=~?\s*\"", selector))
            assert selected <= set(metric.labels), f"{where}: {name}{selector}"
            summed = {
                label
                for listed in re.findall(r"by \(([a-z_, ]+)\)", expression)
                for label in listed.split(", ")
            }
            assert summed <= set(metric.labels) | {"le"}, f"{where}: {expression}"
    assert used == set(of_name)


def test_the_dashboard_s_panels_have_places_of_their_own() -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_names_follow_prometheus_conventions() -> None:
    assert len({one.name for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"kvq(_[a-z]+)+", one.name)
        assert not one.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert one.doc


def test_the_documented_metrics_are_the_code_s() -> None:
    assert markdown() in (DEPLOY / "metrics.md").read_text()
