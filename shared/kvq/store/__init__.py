"""The store on disk: keys, files, spaces, manifests, matching. Imports neither MLX nor Redis."""

from __future__ import annotations

from kvq.store.manifest import Manifest
from kvq.store.match import Match
from kvq.store.reason import End, Reason
from kvq.store.space import Space
from kvq.store.store import Store

__all__ = ["End", "Manifest", "Match", "Reason", "Space", "Store"]
