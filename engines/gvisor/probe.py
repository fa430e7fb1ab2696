"""What a node allows: a sandbox is started, instead of comparing versions.

Builds of runsc with a Go compiler that it does not know run `echo` and panic at the first pipe, so the smoke
test uses pipes, a fork and a file.
"""

from __future__ import annotations

import os
import subprocess
import tempfile

from engines.api import EngineSettings, Finding

_CHECK_S = 15.0  # the kvm platform hangs where it does not work
_SMOKE = "x=$(cat /etc/passwd | wc -l); (id; echo lines $x) | cat"


def probe(settings: EngineSettings) -> tuple[Finding, ...]:
    """Findings about this node; never raises."""
    if not os.access(settings.runtime_path, os.X_OK):
        return (
            _finding(
                "gvisor.runtime",
                f"there is no runsc at {settings.runtime_path}",
                "install runsc and name it in the configuration",
            ),
        )
    if os.geteuid() != 0:
        return (_finding("gvisor.root", "not root: runsc cannot restore then", "run it as root"),)
    with tempfile.TemporaryDirectory(prefix="torpor-gvisor-") as root:
        argv = [str(settings.runtime_path), *settings.runtime_args, "--root", root, "do", "sh", "-c", _SMOKE]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_CHECK_S,
                check=False,
                env={**os.environ, "PATH": settings.search_path},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return (_finding("gvisor.smoke", f"runsc does not run a sandbox: {error}", _REMEDY),)
    if done.returncode or "lines " not in done.stdout:
        line = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[
            0
        ]
        return (_finding("gvisor.smoke", f"runsc does not run a sandbox: {line[:300]}", _REMEDY),)
    return (Finding(rule="gvisor.smoke", severity="ok", message="runsc ran a sandbox"),)


_REMEDY = "install a build of runsc that works here, or choose another --platform in RUNSC_ARGS"


def _finding(rule: str, message: str, remedy: str) -> Finding:
    return Finding(rule=rule, severity="refuse", message=message, remedy=remedy)
