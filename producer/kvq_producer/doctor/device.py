"""What computes: MLX's device and memory, the BLAS below it, and the models it may load."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from kvq.units import format_bytes
from kvq_producer.doctor.finding import Result, broken, fine, note, warning
from kvq_producer.doctor.machine import Machine

_PROBE = """
import json
import mlx.core as mx
mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
facts = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
print(json.dumps({"device": str(mx.default_device()), "facts": facts}))
"""
_OPENBLAS_MEND = "apt-get install libopenblas0-pthread; `kvq worker` and `kvq run` use it then"


def check_mlx(machine: Machine) -> Result:
    """MLX computes something, in another process."""
    try:
        ran = machine.python(_PROBE)
    except (OSError, subprocess.TimeoutExpired):
        return broken(
            "MLX does not answer within a minute", "restart the machine; reinstall mlx if it stays"
        )
    lines = ran.stdout.splitlines()
    if ran.returncode != 0 or not lines:
        said = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        return broken(f"MLX does not work: {said[:200]}", "pip install --upgrade 'kvq[worker]'")
    found = json.loads(lines[-1])
    facts = found["facts"]
    named = facts.get("device_name") or facts.get("architecture") or "unnamed"
    memory = facts.get("memory_size") or facts.get("total_memory") or _system_memory()
    return fine(f"MLX computes on {found['device']} ({named}, {format_bytes(int(memory))})")


def check_blas(machine: Machine) -> Result | None:
    """On Linux's CPU, the BLAS that makes float32 many times faster."""
    if not machine.platform.startswith("linux") or not machine.installed("mlx-cpu"):
        return None
    from kvq_worker.environment import openblas

    found = openblas()
    preloaded = "blas" in machine.environment.get("LD_PRELOAD", "")
    if preloaded:
        return fine("OpenBLAS is preloaded")
    if found is None:
        return warning("no OpenBLAS: MLX is some thirty times slower here", _OPENBLAS_MEND)
    return note(
        f"OpenBLAS is here, and `kvq worker` preloads it; a plain `rq worker` does not ({found})",
        f"export LD_PRELOAD={found}",
    )


def check_models(machine: Machine) -> Result:
    """KVQ_MODELS: folders that are named in full exist, and something is named at all."""
    patterns = machine.settings.models
    if patterns == ("*",):
        return note(
            "KVQ_MODELS is not set: this worker loads any model that a job names",
            "set KVQ_MODELS to the models that it is for",
        )
    literal = [one for one in patterns if one.startswith(("/", "~")) and not _is_glob(one)]
    missing = [one for one in literal if not (Path(one).expanduser() / "config.json").is_file()]
    if missing:
        return warning(
            f"KVQ_MODELS names {missing[0]}, which is no model folder here",
            "put the model there, or correct KVQ_MODELS",
        )
    return fine(f"models: {', '.join(patterns)}")


def check_rq_variables(machine: Machine) -> Result | None:
    """RQ_* variables, which make a plain `rq worker` kvq's own; all of them or none."""
    from kvq_worker.environment import RQ_CLASSES

    set_here = {name: machine.environment.get(name) for name in RQ_CLASSES}
    wrong = [name for name, value in set_here.items() if value not in (None, RQ_CLASSES[name])]
    if wrong:
        return broken(
            f"{wrong[0]} is {set_here[wrong[0]]}, not {RQ_CLASSES[wrong[0]]}: jobs would run in "
            "a worker that forks, loads the model for each of them, or runs any function",
            "unset it and start with `kvq worker`, or take what `kvq worker --print-environment` "
            "prints",
        )
    missing = [name for name, value in set_here.items() if value is None]
    if 0 < len(missing) < len(set_here):
        return broken(
            f"some RQ_* variables are set, but not {', '.join(missing)}",
            'eval "$(kvq worker --print-environment)"',
        )
    if missing:
        return fine("start workers with `kvq worker`; it sets what RQ needs")
    return fine("a plain `rq worker` here is kvq's own")


def _is_glob(name: str) -> bool:
    return any(c in name for c in "*?[")


def _system_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
