"""Python, packages and their versions, and pairs of them that do not go together."""

from __future__ import annotations

import importlib.metadata
import operator
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvq_producer.doctor.finding import Result, broken, fine, warning
from kvq_producer.doctor.machine import Machine, Role

#: The extra that each role installs.
EXTRAS = {
    Role.PRODUCER: "producer",
    Role.WORKER: "worker",
    Role.OPERATOR: "producer",
    Role.APP: "mlx",
}
_LEAST_PYTHON = (3, 11)
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?(?P<bounds>[^;]*)(;(?P<when>.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
#: Parts of MLX that must have its own version, because they are built together.
_MLX_PARTS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A package that an extra brings, and the bounds of its version as they are written."""

    package: str
    bounds: str

    def admits(self, version: str) -> bool:
        """Whether that version is within the bounds."""
        have = numbers(version)
        return all(_OPERATORS[sign](*_padded(have, numbers(bound)))
                   for sign, bound in _BOUND.findall(self.bounds))  # fmt: skip


def needed(extra: str, platform: str, lines: Iterable[str] | None = None) -> list[Needed]:
    """What kvq with `extra` needs on that platform, as its own metadata says."""
    found = []
    for line in lines if lines is not None else importlib.metadata.requires("kvq") or ():
        parts = _REQUIREMENT.match(line)
        assert parts is not None
        when = parts["when"] or ""
        extras = re.findall(r"extra == ['\"]([^'\"]+)", when)
        platforms = re.findall(r"sys_platform == ['\"]([^'\"]+)", when)
        if (not extras or extra in extras) and (not platforms or platform in platforms):
            found.append(Needed(package=parts["name"], bounds=parts["bounds"].strip()))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """`3.1.0rc2` as (3, 1, 0)."""
    leading = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def check_python(machine: Machine) -> Result:
    """Python's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _LEAST_PYTHON:
        return broken(f"Python {version}; kvq needs 3.11", "install Python 3.11 or newer")
    return fine(f"Python {version}, kvq {machine.installed('kvq') or 'not installed'}")


def check_packages(machine: Machine) -> Result:
    """Every package that the role needs, within its bounds."""
    extra, wrong = EXTRAS[machine.role], []
    if machine.role is Role.WORKER and machine.installed("mlx-cuda-13"):
        extra = "worker-cuda"
    for one in needed(extra, machine.platform):
        version = machine.installed(one.package)
        if version is None:
            wrong.append(f"{one.package} is missing")
        elif not one.admits(version):
            wrong.append(f"{one.package} {version} is not {one.bounds}")
    if wrong:
        return broken("; ".join(wrong), f"pip install --upgrade 'kvq[{extra}]'")
    return fine(f"all packages of kvq[{extra}] are there")


def check_pairs(machine: Machine) -> Result:
    """Packages that break each other."""
    parts = {name: version for name in _MLX_PARTS if (version := machine.installed(name))}
    cuda = [name for name in parts if "cuda" in name]
    if "mlx-cpu" in parts and cuda:
        return broken(
            f"mlx-cpu and {cuda[0]} are both installed and overwrite each other's files",
            f"pip uninstall -y mlx mlx-cpu {cuda[0]}, then install kvq[worker] or kvq[worker-cuda]",
        )
    mlx = machine.installed("mlx")
    for name, version in parts.items():
        if mlx is not None and version != mlx:
            return broken(
                f"mlx {mlx} with {name} {version}: they are built together",
                f"pip install --force-reinstall mlx=={mlx} {name}=={mlx}",
            )
    exporter = machine.installed("rq-exporter")
    if exporter is not None and numbers(exporter) < (4,):
        return warning(
            f"rq-exporter {exporter} asks for RQ below 3 and may pull it in",
            "uninstall it: `kvq metrics` serves what it does",
        )
    return fine("no packages that break each other")


def _padded(
    one: tuple[int, ...], other: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    longest = max(len(one), len(other))
    return (one + (0,) * (longest - len(one)), other + (0,) * (longest - len(other)))
