"""Finds the file that serves a verb, and tells its errors as callers read them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from engines.api import EngineError
from shim import log
from shim.argv import Call
from shim.config import DEFAULT_STATE, load
from shim.errors import ShimError, Undecided
from shim.signals import end_once
from shim.verbs.context import Context

VERBS = {
    "checkpoint": "shim.verbs.checkpoint",
    "create": "shim.verbs.create",
    "delete": "shim.verbs.delete",
    "exec": "shim.verbs.held",
    "features": "shim.verbs.features",
    "kill": "shim.verbs.kill",
    "pause": "shim.verbs.held",
    "restore": "shim.verbs.restore",
    "resume": "shim.verbs.held",
    "start": "shim.verbs.start",
    "state": "shim.verbs.state",
}

ALWAYS = frozenset({"delete", "features", "kill", "state"})
"""Served by the real runtime if torpor cannot: containers must stop however broken torpor is.

But not one that torpor keeps for a good reason.
"""


class Verb(Protocol):
    """What each verb's file offers."""

    def serve(self, context: Context) -> int | None:
        """Serve the call; the exit status, or None to hand the call over to the real runtime."""
        ...


def serve(call: Call, settings: Mapping[str, str]) -> int | None:
    """Serve a call that is torpor's.

    settings: the hot settings of runtime.conf. Returns the exit status, or None if the real runtime must do
    it after all. Whatever goes wrong is told as runc tells it, and the status is 1.
    """
    try:
        context = Context(call=call, settings=settings, config=load(settings))
        end_once()
        verb: Verb = import_module(VERBS[call.verb])  # type: ignore[assignment]
        return verb.serve(context)
    except Undecided as error:
        log.runtime_error(str(error), log_path=call.log, log_format=call.log_format)
        return 1
    except (ShimError, EngineError) as error:
        message = str(error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        message = f"could not {call.verb} container '{' '.join(call.args)}': {error.strerror or error}{where}"
    except KeyboardInterrupt:
        message = f"could not {call.verb} container '{' '.join(call.args)}': interrupted, and undone"
    except Exception as error:
        from pathlib import Path

        message = log.internal_error(error, Path(settings.get("STATE") or DEFAULT_STATE))
    if call.verb in ALWAYS:
        return None
    log.runtime_error(message, log_path=call.log, log_format=call.log_format)
    return 255 if call.verb == "exec" else 1
