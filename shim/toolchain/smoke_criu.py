"""Dumps and restores a process that holds a TCP connection. Run by smoke.py as a program of its own.

Arguments: criu, folder to work in. It runs as the first process of new pid, mount and network namespaces.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

DEADLINE_S = 30
PROOF = "torpor-smoke-ok"


def loopback_up() -> None:
    """Set the loopback device up: a new network namespace has it down, and `ip` may not be there."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh14x", b"lo", 0))
        fcntl.ioctl(sock, get_flags, request)
        flags = struct.unpack_from("h", request, 16)[0]
        struct.pack_into("h", request, 16, flags | up)
        fcntl.ioctl(sock, set_flags, request)


def count_over_tcp(path: Path) -> None:
    """Send a growing number over a TCP connection to oneself and write down what arrives, for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    number = 0
    while True:
        client.sendall(struct.pack("!I", number))
        arrived = struct.unpack("!I", server.recv(4, socket.MSG_WAITALL))[0]
        new = path.with_suffix(".new")
        new.write_text(str(arrived))
        new.rename(path)
        number += 1
        time.sleep(0.01)


def read(path: Path) -> int:
    """The last number that arrived, -1 if none did."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return -1


def wait_beyond(path: Path, number: int) -> int:
    """Wait until a higher number has arrived. Exits the program if none does."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        now = read(path)
        if now > number:
            return now
        time.sleep(0.01)
    sys.exit(f"the process stands still at {number}")


def start(path: Path) -> int:
    """Start the counting process in a session of its own, without descriptors of ours."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, 256)
    count_over_tcp(path)
    return 0


def call_criu(criu: str, folder: Path, verb: str, *options: str) -> None:
    """Run criu. Exits the program with the last error of its log if it fails."""
    images = folder / "images"
    log = images / f"{verb}.log"
    places = ["--images-dir", images, "--log-file", log]
    done = subprocess.run(
        [criu, verb, *places, "--tcp-established", "--network-lock", "nftables", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line.strip() for line in lines if "Error (" in line]
        sys.exit(f"criu {verb} failed: {errors[-1] if errors else done.stderr.decode(errors='replace')}")


def main(criu: str, folder: Path) -> None:
    """Count, dump, see that it is gone, restore, see that it counts on from where it was."""
    loopback_up()
    (folder / "images").mkdir(mode=0o700)
    path = folder / "number"
    pid = start(path)
    wait_beyond(path, 3)
    call_criu(criu, folder, "dump", "--tree", str(pid))
    os.waitpid(pid, 0)
    before = read(path)
    call_criu(criu, folder, "restore", "--restore-detached")
    wait_beyond(path, before)
    os.kill(pid, signal.SIGKILL)
    sys.stdout.write(PROOF + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
