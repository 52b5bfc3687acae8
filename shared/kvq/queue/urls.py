"""The forms of a Redis URL, taken apart without the redis package.

redis://[user:password@]host[:port][/db]        rediss:// the same over TLS
unix://[user:password@]/path/to/socket[?db=0]
redis+sentinel://[user:password@]host[:port],host[:port].../service[/db]
    [?sentinel_username=...&sentinel_password=...]   rediss+sentinel:// the same over TLS
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from kvq.errors import InvalidSetting
from kvq.parsing import masked_url

#: Where a server is looked for when nothing says so.
DEFAULT_URL = "redis://localhost:6379/0"
#: Variables that may hold the URL, the first that is set wins.
VARIABLES = ("KVQ_REDIS_URL", "RQ_REDIS_URL", "REDIS_URL")
_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True, kw_only=True, repr=False)
class SentinelAddress:
    """A service that Sentinels look after, and how to log in to it and to them."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    db: int
    tls: bool
    username: str | None
    password: str | None
    sentinel_username: str | None
    sentinel_password: str | None


def find_url(given: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The URL to use: `given`, else KVQ_REDIS_URL, RQ_REDIS_URL, REDIS_URL, else localhost.

    Raises InvalidSetting when its form is not one of those above.
    """
    env = os.environ if environment is None else environment
    named = [(name, env.get(name, "")) for name in VARIABLES]
    # Settings hand on what they read of the variable as if it had been given.
    if given is not None and given != named[0][1]:
        named.insert(0, ("--redis-url", given))
    for source, url in named:
        if url.strip():
            return _checked(url.strip(), source)
    return DEFAULT_URL


def is_sentinel(url: str) -> bool:
    """Whether `url` names Sentinels rather than a server."""
    return url.split("://", 1)[0].lower().endswith("+sentinel")


def sentinel_address(url: str) -> SentinelAddress:
    """The parts of a redis+sentinel:// URL. Raises InvalidSetting."""
    scheme, _, rest = url.partition("://")
    location, _, query = rest.partition("?")
    authority, _, path = location.partition("/")
    login, _, hosts = authority.rpartition("@")
    username, _, password = login.partition(":")
    service, _, db = path.partition("/")
    options = dict(parse_qsl(query))
    if not service or not hosts:
        raise _bad(url, "Sentinel", "write redis+sentinel://host:26379,host:26379/service/0")
    try:
        return SentinelAddress(
            hosts=tuple(_host(part) for part in hosts.split(",")),
            service=unquote(service),
            db=int(db or options.get("db", "0")),
            tls=scheme.lower().startswith("rediss"),
            username=unquote(username) or None,
            password=unquote(password) or None,
            sentinel_username=options.get("sentinel_username"),
            sentinel_password=options.get("sentinel_password"),
        )
    except ValueError as error:
        raise _bad(url, "Sentinel", str(error)) from None


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is not a host")
    return parts.hostname, parts.port or 26379


def _checked(url: str, source: str) -> str:
    scheme = url.split("://", 1)[0].lower() if "://" in url else ""
    if scheme not in _SCHEMES:
        accepted = ", ".join(f"{one}://" for one in _SCHEMES)
        raise _bad(url, source, f"it must start with one of {accepted}")
    if is_sentinel(url):
        sentinel_address(url)
    return url


def _bad(url: str, source: str, reason: str) -> InvalidSetting:
    return InvalidSetting(f"{source}: {masked_url(url)!r} is not a Redis URL: {reason}")
