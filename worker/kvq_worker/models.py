"""The models that stay in memory between jobs. MLX is imported when the first one is loaded."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from kvq.errors import MissingExtra, ModelNotAllowed
from kvq.settings import Settings
from kvq.store.store import Store

if TYPE_CHECKING:
    from kvq.model.loading import LoadedModel
    from kvq.prefill import Prefiller, PrefillOutcome

#: Share of the machine's memory for models, unless KVQ_MODEL_MEMORY says otherwise.
_SHARE = 0.6


class _Key(NamedTuple):
    model: str
    adapter: str | None
    #: Name, size and time of every file, so that a model replaced on disk is loaded anew.
    files: tuple[tuple[str, int, int], ...]


class Models:
    """Loaded models, the least recently used dropped first. Use it on one thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit = settings.model_memory or int(_memory() * _SHARE)
        self._loaded: OrderedDict[_Key, LoadedModel] = OrderedDict()
        self._prefillers: dict[tuple[_Key, Path], Prefiller] = {}
        self._ready = False

    def check_allowed(self, model: str, adapter: str | None = None) -> None:
        """Raise ModelNotAllowed unless KVQ_MODELS admits the model, and the adapter if any."""
        for name in (model, adapter):
            if name is not None and not allowed(name, self._settings.models):
                raise ModelNotAllowed(
                    f"{name!r} is not among the models of this worker: "
                    f"KVQ_MODELS is {','.join(self._settings.models)}"
                )

    def run(
        self,
        store: Store,
        model: str,
        adapter: str | None,
        *,
        on_chunk: Callable[[int, int], None],
        **request: Any,
    ) -> PrefillOutcome:
        """Prefill a `request` (fields of PrefillRequest) with `model`, loaded if it is not yet.

        Raises what Prefiller.run does, ModelNotAllowed, ModelNotFound, MissingExtra.
        """
        self.check_allowed(model, adapter)
        self._prepare()
        from kvq.prefill import PrefillRequest

        prefiller = self._prefiller(store, model, adapter)
        return prefiller.run(PrefillRequest(**request), on_chunk=on_chunk)

    def _prefiller(self, store: Store, model: str, adapter: str | None) -> Prefiller:
        from kvq.model.folder import resolve
        from kvq.model.loading import load
        from kvq.prefill import Prefiller

        key = _Key(model, adapter, _files(resolve(model)) + _files(adapter))
        if key not in self._loaded:
            self._make_room(key)
            self._loaded[key] = load(model, adapter)
        self._loaded.move_to_end(key)
        place = (key, store.path)
        if place not in self._prefillers:
            self._prefillers[place] = Prefiller(store, self._loaded[key], step=self._settings.step)
        return self._prefillers[place]

    def drop_all(self) -> None:
        """Forget every model, for when memory ran out."""
        self._loaded.clear()
        self._prefillers.clear()
        self.give_back()

    def give_back(self) -> None:
        """Return to the system what MLX keeps for reuse."""
        if self._ready:
            import mlx.core as mx

            gc.collect()
            mx.clear_cache()

    def _prepare(self) -> None:
        if self._ready:
            return
        try:
            import mlx.core as mx
            import mlx_lm  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "mlx_lm", "worker") from error
        mx.set_cache_limit(self._settings.cache_memory)
        # Garbage is collected after each job: what was imported, most of all objects, is none.
        gc.collect()
        gc.freeze()
        self._ready = True

    def _make_room(self, key: _Key) -> None:
        needed = sum(size for name, size, _ in key.files if name.endswith(".safetensors"))
        stale = [one for one in self._loaded if one[:2] == key[:2]]
        held = sum(one.nbytes for one in self._loaded.values())
        for one in (*stale, *self._loaded):
            if one in self._loaded and (one in stale or held + needed > self._limit):
                held -= self._loaded.pop(one).nbytes
        gone = [place for place in self._prefillers if place[0] not in self._loaded]
        for place in gone:
            del self._prefillers[place]
        self.give_back()


def allowed(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the globs admits `name`; a path that climbs (`..`) is admitted by none."""
    if ".." in PurePath(name).parts:
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _files(folder: str | Path | None) -> tuple[tuple[str, int, int], ...]:
    if folder is None or not Path(folder).is_dir():
        return ()
    facts = [(entry.name, entry.stat()) for entry in os.scandir(folder) if entry.is_file()]
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
