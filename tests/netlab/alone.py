"""The peer that torpor's moves are measured beside: runc and CRIU alone, on the same pod."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.netlab.nodes import Node
from tests.support.containers import SEARCH_PATH, Output, tool

_IMAGE_FLAGS = ("--tcp-established", "--file-locks")


def dump_and_restore(node: Node, container_id: str, bundle: Path) -> tuple[dict[str, float], Output]:
    """`runc checkpoint` and `runc restore` where the container is; ms of each, and its new output."""
    base = node.path / "alone"
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    config = base / "criu.conf"
    config.write_text("network-lock nftables\n")  # as torpor has it: iptables may not be there
    words = [str(tool("runc")), "--root", str(node.runc.root)]
    where = ("--image-path", str(base / "image"), "--work-path", str(base))
    environment = {**os.environ, "PATH": SEARCH_PATH, "CRIU_CONFIG_FILE": str(config)}
    output = Output()

    def run(*argv: str) -> None:
        stream = output.write_fd
        done = subprocess.run(
            [*words, *argv],
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )
        assert done.returncode == 0, output.text

    begun = time.monotonic()
    run("checkpoint", *_IMAGE_FLAGS, *where, container_id)
    dumped = time.monotonic()
    run("restore", "--detach", *_IMAGE_FLAGS, *where, "--bundle", str(bundle), container_id)
    restored = time.monotonic()
    output.handed_over()
    return {"dump": (dumped - begun) * 1000, "restore": (restored - dumped) * 1000}, output
