"""Whether the Redis user of this machine may do what its role does.

Each command is queued in a transaction that is then discarded: the server checks rights when a
command is queued, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvq.queue import keys, tally
from kvq_producer.doctor.finding import Result, broken, fine, note
from kvq_producer.doctor.machine import Machine, Role

#: No job, batch or worker has this name.
_NOBODY = "kvq-doctor"

#: What each role does, by kind of key.
PRODUCER = {
    "queue": "DEL LLEN LPUSH LRANGE RPUSH",
    "queues": "SADD",
    "job": "DEL EXISTS EXPIRE HDEL HGET HMGET HSET TTL",
    "dependents": "EXPIRE SADD",
    "dependencies": "DEL EXPIRE SADD",
    "results": "DEL EXPIRE TTL XREVRANGE",
    "deferred": "ZADD ZCARD ZREM",
    "finished": "ZREM",
    "failed": "ZREM",
    "canceled": "ZREM",
    "wip": "ZCARD",
    "workers": "SCARD SMEMBERS",
    "worker": "HMGET",
    "ids": "EXPIRE SET TTL",
    "batches": "ZADD ZRANGE ZREMRANGEBYSCORE",
    "batch": "EXPIRE HDEL HGET HMGET HSET",
    "": "EVALSHA SCRIPT|EXISTS SCRIPT|LOAD TIME",
}
WORKER = {
    "queue": "BLMOVE LMOVE LPUSH LREM LRANGE",
    "intermediate": "LRANGE LREM",
    "popped": "HDEL HGET HKEYS HSET",
    "job": "EXISTS EXPIRE HDEL HEXISTS HGET HGETALL HSET PERSIST",
    "dependents": "SMEMBERS SPOP SREM",
    "dependencies": "DEL SMEMBERS",
    "results": "DEL EXPIRE XADD",
    "deferred": "ZRANGE ZREM ZSCORE",
    "finished": "ZADD ZREMRANGEBYSCORE",
    "failed": "ZADD ZREMRANGEBYSCORE",
    "canceled": "ZADD",
    "wip": "ZADD ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYSCORE ZSCORE",
    "workers": "SADD SMEMBERS SREM",
    "worker": "DEL EXISTS EXPIRE HINCRBY HINCRBYFLOAT HSET",
    "ids": "GET",
    "tally": "HINCRBYFLOAT",
    "": "CLIENT|SETNAME EVAL EVALSHA INFO SCRIPT|LOAD TIME",
}
OPERATOR = {
    **PRODUCER,
    "tally": "HSCAN",
    "finished": "ZCARD ZREM",
    "failed": "ZCARD ZREM",
    "": PRODUCER[""] + " INFO",
}
OF_ROLE = {Role.PRODUCER: PRODUCER, Role.WORKER: WORKER, Role.OPERATOR: OPERATOR}

#: Arguments after the key that each command takes at the least.
_ARGUMENTS = {
    "BLMOVE": ("{intermediate}", "RIGHT", "LEFT", "0.01"),
    "LMOVE": ("{intermediate}", "RIGHT", "LEFT"),
    "EXPIRE": ("1",),
    "HDEL": ("f",),
    "HEXISTS": ("f",),
    "HGET": ("f",),
    "HINCRBY": ("f", "1"),
    "HINCRBYFLOAT": ("f", "1"),
    "HMGET": ("f",),
    "HSCAN": ("0",),
    "HSET": ("f", "v"),
    "LPUSH": ("v",),
    "LRANGE": ("0", "0"),
    "LREM": ("0", "v"),
    "RPUSH": ("v",),
    "SADD": ("v",),
    "SET": ("v",),
    "SREM": ("v",),
    "XADD": ("*", "f", "v"),
    "XREVRANGE": ("+", "-", "COUNT", "1"),
    "ZADD": ("1", "v"),
    "ZRANGE": ("0", "0"),
    "ZRANGEBYSCORE": ("0", "0"),
    "ZREM": ("v",),
    "ZREMRANGEBYSCORE": ("0", "0"),
    "ZSCORE": ("v",),
}
_WITHOUT_KEY = {
    "CLIENT|SETNAME": ("kvq-doctor",),
    "EVAL": ("return 1", "0"),
    "EVALSHA": ("0" * 40, "0"),
    "SCRIPT|EXISTS": ("0" * 40,),
    "SCRIPT|LOAD": ("return 1",),
}


def check_rights(machine: Machine) -> Result | None:
    """Every command on every kind of key that the role needs."""
    wanted = OF_ROLE.get(machine.role)
    if wanted is None:
        return None
    queue = machine.settings.queue
    try:
        missing = [shown for shown, _ in refused(machine.redis, commands(wanted, queue))]
        if machine.role is Role.WORKER and not _may_subscribe(machine.redis):
            missing.append(f"SUBSCRIBE {keys.RQ}:pubsub:*")
    except _NoTransactions:
        return note(
            "this user may not open transactions, so its rights cannot be told",
            "give it +multi and +discard (deploy/valkey/users.acl.in does)",
        )
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if missing[4:] else "")
        return broken(
            f"the Redis user lacks rights that a {machine.role} needs: {shown}",
            "compare its rules with deploy/valkey/users.acl.in",
        )
    return fine(f"the Redis user may do all that a {machine.role} does")


def names(queue: str) -> dict[str, str]:
    """A key of each kind; those of jobs, workers and batches are nobody's."""
    registries = ("deferred", "finished", "failed", "canceled", "wip")
    return {
        "queue": keys.queue(queue),
        "queues": keys.QUEUES,
        "intermediate": keys.intermediate(queue),
        "popped": f"kvq:popped:{queue}",
        "job": keys.job(_NOBODY),
        "dependents": keys.dependents(_NOBODY),
        "dependencies": keys.dependencies(_NOBODY),
        "results": keys.results(_NOBODY),
        **{one: keys.registry(one, queue) for one in registries},
        "workers": f"{keys.WORKERS}:{queue}",
        "worker": f"{keys.RQ}:worker:{_NOBODY}",
        "ids": f"kvq:ids:{_NOBODY}",
        "batches": keys.BATCHES,
        "batch": keys.batch(_NOBODY),
        "tally": tally.key(queue),
    }


def commands(wanted: dict[str, str], queue: str) -> Iterator[tuple[str, ...]]:
    """The commands of a role's table, whole."""
    key_of = names(queue)
    for kind, listed in wanted.items():
        for name in listed.split():
            if not kind:
                yield (*name.split("|"), *_WITHOUT_KEY.get(name, ()))
                continue
            rest = (one.format(**key_of) for one in _ARGUMENTS.get(name, ()))
            yield (name, key_of[kind], *rest)


def refused(client: Any, wanted: Iterator[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Of the `wanted` commands those that the server will not queue for lack of a right.

    Yields what was refused, as people read it, and the server's words.
    """
    from redis.exceptions import NoPermissionError, RedisError

    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("MULTI")
        try:
            connection.read_response()
        except NoPermissionError as error:
            raise _NoTransactions from error
        for command in wanted:
            connection.send_command(*command)
            try:
                connection.read_response()
            except NoPermissionError as error:
                yield _shown(command), str(error)
            except RedisError:
                continue  # what an old server does not know is not for this check to tell
        connection.send_command("DISCARD")
        connection.read_response()
    finally:
        # Whatever is left of the transaction ends with the connection.
        connection.disconnect()
        client.connection_pool.release(connection)


class _NoTransactions(Exception):
    pass


def _shown(command: tuple[str, ...]) -> str:
    if command[0] in ("CLIENT", "SCRIPT"):
        return " ".join(command[:2])
    keyed = len(command) > 1 and command[0] not in ("EVAL", "EVALSHA")
    return f"{command[0]} {command[1]}" if keyed else command[0]


def _may_subscribe(client: Any) -> bool:
    from redis.exceptions import NoPermissionError

    listener = client.pubsub()
    try:
        listener.subscribe(f"{keys.RQ}:pubsub:{_NOBODY}")
        listener.get_message(timeout=2)
    except NoPermissionError:
        return False
    finally:
        listener.close()
    return True
