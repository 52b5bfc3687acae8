"""Prefilling prompts into a store. Needs MLX; the worker imports it inside its job."""

from __future__ import annotations

from kvq.prefill.prefiller import Prefiller
from kvq.prefill.request import PrefillOutcome, PrefillRequest

__all__ = ["PrefillOutcome", "PrefillRequest", "Prefiller"]
