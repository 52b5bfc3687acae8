"""Checking a store: every digest, every link from block to block, every promise of a manifest."""

from __future__ import annotations

from kvq.store.verify.checker import verify
from kvq.store.verify.report import Finding, Severity, VerifyReport

__all__ = ["Finding", "Severity", "VerifyReport", "verify"]
