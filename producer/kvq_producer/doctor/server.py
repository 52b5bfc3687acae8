"""Redis or Valkey: reached, new enough, durable, not evicting, and its clock."""

from __future__ import annotations

import time

from kvq.parsing import masked_url
from kvq.queue import keys
from kvq.units import format_bytes, format_seconds
from kvq_producer.doctor.finding import Result, broken, fine, note, warning
from kvq_producer.doctor.machine import Machine, Role

#: The oldest servers that hand jobs over without losing any.
_LEAST_REDIS, _LEAST_VALKEY = (6, 2), (7, 2)
_NEARLY_FULL = 0.9
#: Seconds that two clocks may differ: batches and caches expire by them.
_SKEW_NOTED, _SKEW_BROKEN = 2.0, 60.0


def check_reach(machine: Machine) -> Result:
    """A connection, with the login in the URL."""
    connection, error = machine.redis_or_why
    where = masked_url(machine.redis_url)
    if error is None:
        started = time.perf_counter()
        connection.ping()
        took = format_seconds(time.perf_counter() - started)
        return fine(f"Redis at {where} answers in {took}")
    text = str(error)
    if "refused the login" in text:
        return broken(
            f"Redis at {where} refused the login", "correct user and password in KVQ_REDIS_URL"
        )
    if "cannot be reached" in text:
        return broken(
            f"Redis at {where} cannot be reached",
            "start it, open its port to this machine, or correct KVQ_REDIS_URL "
            "(`kvq run` brings its own)",
        )
    return broken(text, "see the message")


def check_version(machine: Machine) -> Result | None:
    """The server's version."""
    info = machine.redis_info
    if info is None:
        return note(
            "this user may not ask for the server's version, persistence and eviction policy",
            "run `kvq doctor` as the operator",
        )
    name, least = "Redis", _LEAST_REDIS
    version = str(info.get("redis_version", "0"))
    if info.get("server_name") == "valkey":
        name, least, version = "Valkey", _LEAST_VALKEY, str(info.get("valkey_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < least:
        wanted = ".".join(map(str, least))
        return broken(f"{name} {version} can lose jobs", f"upgrade it to {wanted} or newer")
    return fine(f"{name} {version}")


def check_persistence(machine: Machine) -> Result | None:
    """Every write is appended to a file, and the last ones could be."""
    info = machine.redis_info
    if info is None:
        return None
    if not info.get("aof_enabled"):
        return broken(
            "persistence is off (no append-only file): a restart of Redis loses all queued jobs",
            "set `appendonly yes` and `appendfsync everysec` in its configuration",
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        return broken("the append-only file cannot be written", "free space on the server's disk")
    return fine("the append-only file is on")


def check_eviction(machine: Machine) -> Result | None:
    """No job is evicted when memory runs short."""
    info = machine.redis_info
    if info is None:
        return None
    policy, limit = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0))
    used = int(info.get("used_memory", 0))
    if policy != "noeviction":
        mend = "set `maxmemory-policy noeviction` in its configuration"
        if limit:
            return broken(f"eviction policy {policy}: Redis drops jobs when memory is short", mend)
        return warning(f"eviction policy {policy}, though no memory limit makes it act yet", mend)
    if limit and used > _NEARLY_FULL * limit:
        return warning(
            f"Redis uses {format_bytes(used)} of {format_bytes(limit)}; when full it takes no jobs",
            "raise maxmemory, or shorten KVQ_BATCH_LIFETIME",
        )
    return fine(f"nothing is evicted; {format_bytes(used)} used")


def check_clock(machine: Machine) -> Result:
    """This machine's clock against the server's."""
    sent = machine.clock()
    seconds, micros = machine.redis.time()
    half = (machine.clock() - sent) / 2
    skew = sent + half - (seconds + micros / 1e6)
    if abs(skew) <= _SKEW_NOTED + half:
        return fine("this machine's clock and Redis' agree")
    side = "ahead of" if skew > 0 else "behind"
    message = f"this machine's clock is {format_seconds(abs(skew))} {side} Redis'"
    mend = "synchronize both by NTP (macOS: Date & Time, set automatically; Linux: timedatectl)"
    return broken(message, mend) if abs(skew) > _SKEW_BROKEN else warning(message, mend)


def check_workers(machine: Machine) -> Result:
    """Who listens, and that all are of this kvq's version."""
    queue = machine.settings.queue
    names = machine.redis.smembers(f"{keys.WORKERS}:{queue}")
    versions = {}
    for name in names:
        found = machine.redis.hmget(name, "kvq_version", "state")
        if found[1]:
            versions[name] = (found[0] or b"").decode("utf-8", "replace")
    if not versions:
        say = note if machine.role is Role.WORKER else warning
        return say(f"no worker listens on the queue {queue!r}", "start one with `kvq worker`")
    foreign = [name for name, version in versions.items() if not version]
    if foreign:
        return warning(
            f"{len(foreign)} of {len(versions)} workers on {queue!r} are not kvq's own",
            "start workers with `kvq worker`",
        )
    own = machine.installed("kvq") or ""
    others = sorted(set(versions.values()) - {own})
    if others:
        return note(f"workers run kvq {', '.join(others)}; here it is {own}", "upgrade the older")
    return fine(f"{len(versions)} workers listen on {queue!r}")
