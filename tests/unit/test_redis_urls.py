from __future__ import annotations

import copy

import pytest
import redis

from kvq.errors import InvalidSetting, QueueUnavailable
from kvq.queue.connection import PatientRedis, connect, queue_errors
from kvq.queue.patience import Patience
from kvq.queue.urls import DEFAULT_URL, find_url, sentinel_address


def test_the_first_url_that_is_set_wins() -> None:
    env = {"REDIS_URL": "redis://c", "RQ_REDIS_URL": "redis://b", "KVQ_REDIS_URL": "redis://a"}
    assert find_url("unix:///x", env) == "unix:///x"
    assert find_url(None, env) == "redis://a"
    assert find_url("", {**env, "KVQ_REDIS_URL": " "}) == "redis://b"
    assert find_url(None, {"REDIS_URL": "rediss://c"}) == "rediss://c"
    assert find_url(None, {}) == DEFAULT_URL


def test_a_bad_url_names_its_source_and_hides_its_password() -> None:
    with pytest.raises(InvalidSetting, match=r"KVQ_REDIS_URL: 'http://u:\*\*\*@h'.*rediss://"):
        find_url(None, {"KVQ_REDIS_URL": "http://u:secret@h"})
    with pytest.raises(InvalidSetting, match="KVQ_REDIS_URL: 'nonsense'"):
        find_url("nonsense", {"KVQ_REDIS_URL": "nonsense"})
    with pytest.raises(InvalidSetting, match="--redis-url: 'localhost'"):
        find_url("localhost", {})
    with pytest.raises(InvalidSetting, match="service/0"):
        find_url("redis+sentinel://a:1,b:2", {})
    with pytest.raises(InvalidSetting, match="Port"):
        find_url("redis+sentinel://a:port/s", {})


def test_a_sentinel_url_is_taken_apart() -> None:
    address = sentinel_address(
        "rediss+sentinel://me:p%40w@a:26380,b,[::1]:5/main/3?sentinel_password=x%20y"
    )
    assert address.hosts == (("a", 26380), ("b", 26379), ("::1", 5))
    assert (address.service, address.db, address.tls) == ("main", 3, True)
    assert (address.username, address.password) == ("me", "p@w")
    assert (address.sentinel_username, address.sentinel_password) == (None, "x y")
    assert "p@w" not in repr(address)


def test_clients_are_made_of_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_REDIS_CA", "/ca.pem")
    plain = PatientRedis.from_url("redis://me:pw@h:7/2").connection_pool.connection_kwargs
    assert (plain["host"], plain["port"], plain["db"]) == ("h", 7, 2)
    assert (plain["username"], plain["password"]) == ("me", "pw")
    assert isinstance(plain["retry"], Patience)

    tls = PatientRedis.from_url("rediss://h").connection_pool
    assert issubclass(tls.connection_class, redis.SSLConnection)
    assert tls.connection_kwargs["ssl_ca_certs"] == "/ca.pem"

    unix = PatientRedis.from_url("unix://:pw@/run/r.sock?db=1").connection_pool.connection_kwargs
    assert (unix["path"], unix["db"], unix["password"]) == ("/run/r.sock", 1, "pw")

    watched = PatientRedis.from_url("rediss+sentinel://u:pw@a:1,b:2/main/3")
    pool = watched.connection_pool
    assert isinstance(watched, PatientRedis)
    assert pool.service_name == "main"
    assert (pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == (3, "pw")
    assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
    sentinels = pool.sentinel_manager.sentinels
    ports = [one.connection_pool.connection_kwargs["port"] for one in sentinels]
    assert ports == [1, 2]
    assert isinstance(watched.patience, Patience)


def test_rq_s_own_way_of_making_a_client_is_patient_too() -> None:
    client = PatientRedis(host="h", port=1)
    assert client.patience is not None
    assert client.patience.seconds == 300


def test_an_unreachable_server_says_what_to_do() -> None:
    with pytest.raises(QueueUnavailable) as caught:
        connect("redis://me:secret@127.0.0.1:1/0", patience=0)
    message = str(caught.value)
    assert "redis://me:***@127.0.0.1:1/0 cannot be reached" in message
    assert "--redis-url" in message
    assert "secret" not in message


def test_unreachable_sentinels_show_no_password() -> None:
    with pytest.raises(QueueUnavailable, match="no Sentinel can be reached") as caught:
        connect("redis+sentinel://u:secret@127.0.0.1:1/s?sentinel_password=hidden", patience=0)
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        (redis.exceptions.AuthenticationError("WRONGPASS"), "refused the login"),
        (redis.exceptions.NoPermissionError("no rights"), "lacks a right"),
        (redis.exceptions.TimeoutError("late"), "cannot be reached"),
        (redis.exceptions.OutOfMemoryError("OOM"), "refused a command: OOM"),
    ],
)
def test_foreign_errors_are_mapped_and_kept(foreign: Exception, shown: str) -> None:
    with pytest.raises(QueueUnavailable, match=shown) as caught, queue_errors("redis://h"):
        raise foreign
    assert caught.value.__cause__ is foreign


def test_patience_waits_for_a_server_but_not_for_a_password() -> None:
    patience = Patience(60)
    assert copy.deepcopy(patience) is patience
    failures: list[int] = []

    def comes_back() -> str:
        if len(failures) < 2:
            raise redis.exceptions.ConnectionError
        return "here"

    assert patience.call_with_retry(comes_back, lambda error: failures.append(1)) == "here"
    assert len(failures) == 2

    def wrong() -> str:
        raise redis.exceptions.AuthenticationError

    with pytest.raises(redis.exceptions.AuthenticationError):
        patience.call_with_retry(wrong, lambda error: failures.append(1))
    assert len(failures) == 2


def test_patience_can_end_while_it_lasts() -> None:
    patience = Patience(3600)
    counts: list[int] = []

    def fail(error: Exception, count: int) -> None:
        counts.append(count)
        patience.seconds = 0

    def gone() -> None:
        raise redis.exceptions.ConnectionError

    with pytest.raises(redis.exceptions.ConnectionError):
        patience.call_with_retry(gone, fail, with_failure_count=True)
    assert counts == [1]
