"""What an engine may offer besides: say what stands against a checkpoint, without touching anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from engines.api import EngineError, Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a checkpoint would run into. memory_bytes: what the container has to be kept, about."""

    findings: tuple[Finding, ...]
    memory_bytes: int = 0


@runtime_checkable
class Forecaster(Protocol):
    """An engine that foresees."""

    def foresee(self, container_id: str, bundle_path: Path, /) -> Forecast:
        """Look at a container that runs or is paused; it is not frozen. Raises InvalidRequest."""
        ...


def refusal(rule: str, error: EngineError, words: str) -> Finding:
    """What a checkpoint would be refused with, as a finding. words: how the error's message begins."""
    cause, _, remedy = str(error).removeprefix(f"{words}: ").rpartition("; ")
    return Finding(rule=rule, severity="refuse", message=cause or remedy, remedy=remedy if cause else "")
