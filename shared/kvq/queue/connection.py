"""Connections to Redis or Valkey, and what their failures mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvq.errors import InvalidSetting, MissingExtra, QueueUnavailable
from kvq.parsing import masked_url
from kvq.queue.urls import find_url, is_sentinel, sentinel_address
from kvq.settings import Settings

try:
    import redis
    from redis.sentinel import MasterNotFoundError, Sentinel

    from kvq.queue.patience import Patience
except ModuleNotFoundError as missing:
    raise MissingExtra("redis", "producer") from missing

#: How long (seconds) a command that does not wait tries to reach Redis.
BRIEF = 3.0
_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 30.0

__all__ = ["PatientRedis", "connect", "find_url", "masked_url", "queue_errors"]


class PatientRedis(redis.Redis):  # type: ignore[misc]
    """A client that waits KVQ_REDIS_PATIENCE for a Redis that is gone.

    As RQ_CONNECTION_CLASS it lets a worker outlive a Redis restart. It takes every URL form that
    kvq does, Sentinels included.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("connection_pool") is None:
            kwargs.setdefault("retry", Patience(Settings.from_env().redis_patience))
        super().__init__(*args, **kwargs)

    @classmethod
    def from_url(cls, url: str, **kwargs: Any) -> PatientRedis:
        """A client of the server at `url`; nothing is sent yet. Raises InvalidSetting."""
        settings = Settings.from_env()
        patience = kwargs.pop("retry", None) or Patience(settings.redis_patience)
        options = {
            "retry": patience,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "socket_timeout": _REPLY_SECONDS,
            "health_check_interval": 30,
            **kwargs,
        }
        if url.lower().startswith("unix://"):
            del options["socket_connect_timeout"]
        if url.lower().startswith("rediss") and settings.redis_ca:
            options["ssl_ca_certs"] = str(settings.redis_ca)
        try:
            if is_sentinel(url):
                return _sentinel_client(cls, url, options)
            client: PatientRedis = super().from_url(url, **options)
        except (ValueError, TypeError) as error:
            raise InvalidSetting(f"{masked_url(url)!r} is not a Redis URL: {error}") from error
        return client

    @property
    def patience(self) -> Patience | None:
        """What decides how long this client waits; None when a foreign Retry does."""
        retry = self.connection_pool.connection_kwargs.get("retry")
        return retry if isinstance(retry, Patience) else None


def connect(url: str | None = None, *, patience: float = BRIEF) -> PatientRedis:
    """A client that has reached the server at `url` (default: as `find_url` says).

    It waits up to `patience` seconds for a server that is gone, now and at each later command.
    Raises InvalidSetting for a bad URL, QueueUnavailable saying what to do.
    """
    address = find_url(url)
    client = PatientRedis.from_url(address, retry=Patience(patience))
    with queue_errors(address):
        client.ping()
    return client


@contextmanager
def queue_errors(url: str) -> Iterator[None]:
    """Turns errors of Redis into QueueUnavailable, the cause kept, secrets masked."""
    where = f"Redis at {masked_url(url)}"
    try:
        yield
    except (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError) as error:
        raise QueueUnavailable(
            f"{where} refused the login ({error}). Check user and password in the URL."
        ) from error
    except redis.exceptions.NoPermissionError as error:
        raise QueueUnavailable(
            f"{where}: this user lacks a right that kvq needs ({error}). "
            "The access rules for producers and workers are in deploy/."
        ) from error
    except MasterNotFoundError as error:
        # Its own text shows how each Sentinel is logged in to.
        raise QueueUnavailable(
            f"{where}: no Sentinel can be reached that knows a master of this service."
        ) from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise QueueUnavailable(
            f"{where} cannot be reached ({error}). Is it running? Name another with --redis-url "
            "or KVQ_REDIS_URL; `kvq run` brings its own."
        ) from error
    except redis.exceptions.RedisError as error:
        raise QueueUnavailable(f"{where} refused a command: {error}") from error


def _sentinel_client(
    client_class: type[PatientRedis], url: str, options: dict[str, Any]
) -> PatientRedis:
    address = sentinel_address(url)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    common = {"socket_connect_timeout": _CONNECT_SECONDS, "socket_timeout": _CONNECT_SECONDS}
    if address.tls:
        tls["ssl"] = True
    sentinel = Sentinel(
        address.hosts,
        sentinel_kwargs={
            **common,
            **tls,
            "username": address.sentinel_username,
            "password": address.sentinel_password,
        },
    )
    client: PatientRedis = sentinel.master_for(
        address.service,
        redis_class=client_class,
        db=address.db,
        username=address.username,
        password=address.password,
        **{name: value for name, value in options.items() if not name.startswith("ssl_")},
        **tls,
    )
    return client
