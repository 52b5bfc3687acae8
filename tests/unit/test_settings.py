from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvq.errors import InvalidSetting
from kvq.parsing import masked_url
from kvq.settings import VARIABLES, Settings, default_state, table
from kvq.units import format_bytes, format_seconds, parse_bytes, parse_seconds

ROOT = Path(__file__).parents[2]


def test_every_field_has_one_variable_and_the_other_way_round() -> None:
    assert sorted(v.field for v in VARIABLES) == sorted(one.name for one in fields(Settings))
    assert all(v.variable.startswith("KVQ_") for v in VARIABLES)
    assert len({v.variable for v in VARIABLES}) == len(VARIABLES)


def test_the_documented_table_is_the_code_s() -> None:
    assert table() in (ROOT / "worker" / "README.md").read_text()


@pytest.mark.parametrize("one", VARIABLES, ids=lambda v: v.variable)
def test_documented_defaults_are_the_real_ones(one: object) -> None:
    field, default = one.field, one.default  # type: ignore[attr-defined]
    try:
        documented = one.parse(default)  # type: ignore[attr-defined]
    except ValueError:
        documented = None
    value = getattr(Settings.from_env({"HOME": "/home/u"}), field)
    if value is not None and field != "state":
        assert documented == value


def test_values_are_parsed_and_given_ones_win() -> None:
    env = {
        "KVQ_QUEUE": "night",
        "KVQ_STORE": "~/kv",
        "HOME": "/home/u",
        "KVQ_MODEL_MEMORY": "24GiB",
        "KVQ_JOB_TIMEOUT": "1h30m",
        "KVQ_MODELS": "mlx-community/*, /models/*",
        "KVQ_LEASE": "",
    }
    settings = Settings.from_env(env, queue="day", store=None)
    assert settings.queue == "day"
    assert settings.model_memory == 24 * 2**30
    assert settings.job_timeout == 5400
    assert settings.models == ("mlx-community/*", "/models/*")
    assert settings.lease == 8
    assert settings.store is not None
    assert settings.store.is_absolute()


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("KVQ_STEP", "many", "whole number from 16"),
        ("KVQ_STEP", "3", "from 16 to 65536"),
        ("KVQ_QUEUE", "a b", "letters"),
        ("KVQ_MIN_FREE", "lots", "24GiB"),
        ("KVQ_GRACE", "-1", "zero or more"),
        ("KVQ_GRACE", "0", "from 1 to"),
        ("KVQ_MODELS", " , ", "globs"),
        ("KVQ_LEASE", "5x", "1h30m"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_accepted(
    variable: str, value: str, accepted: str
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Settings.from_env({variable: value})
    message = str(caught.value)
    assert variable in message
    assert repr(value) in message
    assert accepted in message


def test_a_lease_must_outlast_its_heartbeats() -> None:
    with pytest.raises(InvalidSetting, match="KVQ_HEARTBEAT=4 is too long for KVQ_LEASE=8"):
        Settings.from_env({"KVQ_HEARTBEAT": "4"})


def test_repr_shows_no_password() -> None:
    shown = repr(Settings.from_env({"KVQ_REDIS_URL": "redis://:hunter2@h/0"}))
    assert "hunter2" not in shown
    assert "redis://:***@h/0" in shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://me:p%40w@h", "redis://me:***@h"),
        ("redis://me:p@ss@h", "redis://me:***@h"),
        ("rediss://:x:y@h", "rediss://:***@h"),
        ("unix://me:pw@/run/r.sock?db=1", "unix://me:***@/run/r.sock?db=1"),
        ("unix:///run/r.sock?db=1&password=pw", "unix:///run/r.sock?db=1&password=***"),
        (
            "redis+sentinel://u:pw@a:1,b:2/s/0?sentinel_password=q&x=1",
            "redis+sentinel://u:***@a:1,b:2/s/0?sentinel_password=***&x=1",
        ),
    ],
)
def test_passwords_in_urls_are_masked(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_private_state_follows_the_system() -> None:
    import os

    if os.uname().sysname != "Darwin":
        assert default_state({"XDG_STATE_HOME": "/s"}) == Path("/s/kvq")
        assert default_state({"HOME": "/home/u"}) == Path("/home/u/.local/state/kvq")


def test_units() -> None:
    assert parse_bytes("1500") == 1500
    assert parse_bytes("2.5k") == 2500
    assert parse_bytes("24 GiB") == 24 * 2**30
    assert parse_bytes("1tb") == 10**12
    assert parse_seconds("1h30m") == 5400
    assert parse_seconds("250ms") == 0.25
    assert parse_seconds("2.5") == 2.5
    assert parse_seconds("1w 2d") == 9 * 86400
    for bad in ("", "G", "1i", "ten", "-3"):
        with pytest.raises(ValueError, match="not a size"):
            parse_bytes(bad)
    for bad in ("", "h", "1h5", "nan", "inf", "-3"):
        with pytest.raises(ValueError, match="duration"):
            parse_seconds(bad)
    assert [format_bytes(n) for n in (0, 999, 1000, 12345, 999_600, 4.3e9, 2e12)] == [
        "0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "4.30 GB", "2.00 TB",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.012, 3.44, 125, 11_400, 187_200)] == [
        "12 ms", "3.4 s", "2 m 05 s", "3 h 10 m", "2 d 4 h",
    ]  # fmt: skip
