"""A worker whose prefiller computes nothing: it takes its time, and leaves a file for each chunk.

The file `<store>/standin/<key>/<end>` stands for the finished blocks up to token `end`; another run
goes on after the last of them. A line in `<store>/standin/log` tells of each chunk computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvq.errors import StoreUnavailable, UnsupportedModel
from kvq.settings import Settings
from kvq.store.keys import pack
from kvq.store.store import Store
from kvq_worker.models import Models
from kvq_worker.worker import ResidentWorker

CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str | None
    tokens: int
    reused_tokens: int
    prefilled_tokens: int
    space: str = "s" * 40
    codec: str = "raw"
    bytes: int = 1
    bytes_written: int = 1
    lossy_prefix_tokens: int = 0
    quality: None = None
    prefill_seconds: float = 0.0
    seconds: float = 0.0


class StandInModels(Models):
    """The model's name says what happens: `slow` takes STANDIN_CHUNK seconds a chunk, `hang` hangs.

    Other names: `broken` fails as this machine, `wrong` as the prompt, `full` as the store, `die`
    ends the process.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._seconds = float(os.environ.get("STANDIN_CHUNK", "0.1"))

    def run(  # type: ignore[override]
        self,
        store: Store,
        model: str,
        adapter: str | None,
        *,
        on_chunk: Callable[[int, int], None],
        **request: Any,
    ) -> Outcome:
        self.check_allowed(model, adapter)
        ids = request["token_ids"]
        folder = store.path / "standin" / blake2b(pack(ids), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        start = max((int(path.name) for path in folder.iterdir()), default=0)
        on_chunk(start, len(ids))
        if model == "broken":
            raise OSError("the machine failed")
        if model == "wrong":
            raise UnsupportedModel("this model is unknown")
        if model == "full":
            raise StoreUnavailable("no space left")
        if model == "die":
            os._exit(9)
        for end in range(start, len(ids), CHUNK):
            upto = min(end + CHUNK, len(ids))
            time.sleep(self._seconds if model == "slow" else 0)
            while model == "hang":
                (store.path / "standin" / "hanging").touch()
                _sleep_without_signals(60)
            _log(store.path, f"{os.getpid()} {folder.name} {end} {upto}")
            (folder / str(upto)).touch()
            on_chunk(upto, len(ids))
        if request["name"] is not None:
            caches = store.path / "caches"
            caches.mkdir(exist_ok=True)
            (caches / f"{request['name']}.json").write_text(str(len(ids)))
        return Outcome(
            name=request["name"],
            tokens=len(ids),
            reused_tokens=start,
            prefilled_tokens=len(ids) - start,
        )


class StandInWorker(ResidentWorker):
    """ResidentWorker without MLX. Its clock is STANDIN_CLOCK seconds ahead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        _shift_clock(int(os.environ.get("STANDIN_CLOCK", "0")))
        super().__init__(*args, **options)
        self.models = StandInModels(self.settings)


def _shift_clock(seconds: int) -> None:
    from rq import executions, registry

    right = registry.current_timestamp
    for module in (executions, registry):
        module.current_timestamp = lambda: right() + seconds


def _log(store: Path, line: str) -> None:
    handle = os.open(store / "standin" / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def _sleep_without_signals(seconds: float) -> None:
    """Sleep in one C call that no signal interrupts, as an evaluation in MLX is."""
    import ctypes

    libc = ctypes.CDLL(None)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        libc.usleep(200_000)
