"""All checks, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvq.errors import KvqError
from kvq_producer.doctor import (
    behaviour,
    device,
    folder,
    macos,
    packages,
    rights,
    server,
)
from kvq_producer.doctor.finding import Finding, Result, State, broken, fine
from kvq_producer.doctor.machine import Machine, Role

_ALL = frozenset(Role)
_QUEUE = _ALL - {Role.APP}
_WORKER = frozenset({Role.WORKER})
_MLX = frozenset({Role.WORKER, Role.APP})


class Check(NamedTuple):
    """A check, the roles that it is for, and whether it needs a Redis that answers."""

    name: str
    roles: frozenset[Role]
    function: Callable[[Machine], Result | None]
    needs_redis: bool = False


def check_settings(machine: Machine) -> Result:
    """Every KVQ_* variable can be read."""
    try:
        count = sum(name.startswith("KVQ_") for name in machine.environment)
        assert machine.settings is not None
    except KvqError as error:
        return broken(str(error), "correct the variable")
    return fine(f"{count} KVQ_* variables are set" if count else "all settings are the defaults")


CHECKS = (
    Check("settings", _ALL, check_settings),
    Check("python", _ALL, packages.check_python),
    Check("packages", _ALL, packages.check_packages),
    Check("pairs", _ALL, packages.check_pairs),
    Check("mlx", _MLX, device.check_mlx),
    Check("blas", _MLX, device.check_blas),
    Check("models", _WORKER, device.check_models),
    Check("rq-variables", _WORKER, device.check_rq_variables),
    Check("redis", _QUEUE, server.check_reach),
    Check("redis-version", _QUEUE, server.check_version, True),
    Check("redis-persistence", _QUEUE, server.check_persistence, True),
    Check("redis-eviction", _QUEUE, server.check_eviction, True),
    Check("redis-rights", _QUEUE, rights.check_rights, True),
    Check("redis-clock", _QUEUE, server.check_clock, True),
    Check("workers", _QUEUE, server.check_workers, True),
    Check("store", _ALL, folder.check_store),
    Check("store-mount", _ALL, folder.check_mount),
    Check("store-identity", _QUEUE, folder.check_identity, True),
    Check("store-access", _ALL, folder.check_access),
    Check("store-space", _ALL, folder.check_space),
    Check("store-rename", _ALL, behaviour.check_rename),
    Check("store-fsync", _ALL, behaviour.check_fsync),
    Check("store-names", _ALL, behaviour.check_names),
    Check("store-clock", _ALL, behaviour.check_file_times),
    Check("store-modes", _ALL, behaviour.check_modes),
    Check("store-privacy", _ALL, folder.check_privacy),
    Check("temporary-space", frozenset({Role.PRODUCER}), folder.check_spool),
    Check("fork-safety", _WORKER, macos.check_fork_safety),
    Check("sleep", _WORKER, macos.check_sleep),
    Check("gpu-memory", _MLX, macos.check_wired_memory),
)


def examine(machine: Machine) -> Iterator[Finding]:
    """What each check for the machine's role finds; those that do not apply say nothing.

    Without sound settings nothing else is checked. A check that fails itself is a finding too.
    """
    for check in CHECKS:
        if machine.role not in check.roles or (check.needs_redis and machine.redis is None):
            continue
        try:
            result = check.function(machine)
        except Exception as error:
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            result = broken(f"this could not be checked: {said}", "see the message")
        if result is not None:
            yield Finding(
                check=check.name, state=result.state, message=result.message, mend=result.mend
            )
        if check.name == "settings" and not machine.sound:
            return


def worst(findings: list[Finding]) -> State:
    """The worst state among `findings`."""
    order = list(State)
    return max((one.state for one in findings), key=order.index, default=State.OK)
