"""What a Mac does by itself: sleep, refuse forks, and keep memory from the GPU."""

from __future__ import annotations

import re

from kvq.units import format_bytes
from kvq_producer.doctor.finding import Result, fine, note, warning
from kvq_producer.doctor.machine import Machine

_FORK_FLAG = "OBJC_DISABLE_INITIALIZE_FORK_SAFETY"
_SETTING = re.compile(r"^\s*(?P<name>[a-z][a-z ]*?)\s+(?P<value>\d+)\b")
#: What a machine that works unattended has, by pmset's names.
WANTED_POWER = {"sleep": 0, "disksleep": 0, "autorestart": 1, "womp": 1, "powernap": 0}
#: Of these, what stops a worker outright.
_STOPS = ("sleep",)


def check_fork_safety(machine: Machine) -> Result | None:
    """The variable that once let a forking worker live on macOS."""
    if machine.platform != "darwin":
        return None
    if machine.environment.get(_FORK_FLAG):
        return note(
            f"{_FORK_FLAG} is set; kvq's worker never forks, and from macOS 15.4 on it saves no "
            "worker that does",
            f"unset {_FORK_FLAG}",
        )
    return fine("kvq's worker never forks, so it needs no fork-safety flag")


def check_sleep(machine: Machine) -> Result | None:
    """pmset's settings."""
    if machine.platform != "darwin":
        return None
    said = machine.run("pmset", "-g")
    if said is None:
        return note("pmset does not say whether this Mac sleeps", "pmset -g")
    found = power_settings(said)
    wrong = {
        name: value
        for name, value in WANTED_POWER.items()
        if name in found and found[name] != value
    }
    if not wrong:
        return fine("this Mac does not sleep, and starts again after a power cut")
    shown = ", ".join(f"{name} {found[name]}" for name in wrong)
    command = " ".join(f"{name} {value}" for name, value in wrong.items())
    mend = f"sudo pmset -a {command}"
    if any(name in wrong for name in _STOPS):
        return warning(f"this Mac goes to sleep ({shown}), and its worker with it", mend)
    return note(f"power settings: {shown}", mend)


def check_wired_memory(machine: Machine) -> Result | None:
    """How much memory the GPU may hold, where that was set, and whether the models fit in it."""
    if machine.platform != "darwin":
        return None
    said = machine.run("sysctl", "-n", "iogpu.wired_limit_mb")
    if said is None or not said.strip().isdecimal():
        return note("the GPU's memory limit is not known", "sysctl iogpu.wired_limit_mb")
    limit = int(said) << 20
    models = machine.settings.model_memory
    if limit == 0:
        return fine("the GPU's memory limit is macOS's own (about three quarters of all)")
    if models is not None and models > limit:
        return warning(
            f"KVQ_MODEL_MEMORY is {format_bytes(models)}, more than the GPU may hold "
            f"({format_bytes(limit)})",
            "lower KVQ_MODEL_MEMORY, or raise iogpu.wired_limit_mb",
        )
    return fine(f"the GPU may hold {format_bytes(limit)}")


def power_settings(said: str) -> dict[str, int]:
    """Names and values in what `pmset -g` prints."""
    found = (_SETTING.match(line) for line in said.splitlines())
    return {one["name"].strip(): int(one["value"]) for one in found if one is not None}
