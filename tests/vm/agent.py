#!/usr/bin/python3 -SE
"""The guest's side: does what the host asks for over a virtio-serial port.

A message, either way, is two 32-bit little-endian lengths, a JSON head and a raw body. The host sends one
request and waits for its answer, so nothing here needs a thread. Only the standard library: this runs with
the guest's own Python, before anything of the host is mounted.
"""

import ctypes
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PORT_NAME = "torpor.vm"
RNDRESEEDCRNG = 0x5207
MS_BIND = 4096
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def open_port() -> int:
    for entry in Path("/sys/class/virtio-ports").iterdir():
        if (entry / "name").read_text().strip() == PORT_NAME:
            return os.open(f"/dev/{entry.name}", os.O_RDWR | os.O_CLOEXEC)
    sys.exit(f"no virtio port is called {PORT_NAME}")


def receive(port_fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(port_fd, min(size - len(data), 1 << 20))
        if not chunk:  # the host's side is not connected: this is no end of file
            time.sleep(0.01)
        data += chunk
    return bytes(data)


def send(port_fd: int, head: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(head).encode()
    rest = memoryview(struct.pack("<II", len(text), len(body)) + text + body)
    while rest:
        rest = rest[os.write(port_fd, rest[: 1 << 20]) :]


def do_run(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Run a command. Its output goes through files: a daemon that it leaves behind holds no pipe open."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(body)
        stdin.seek(0)
        child = subprocess.Popen(
            head["command"],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=head.get("cwd", "/root"),
            env={"PATH": SEARCH_PATH, "HOME": "/root", "LANG": "C.UTF-8", **head.get("env", {})},
            start_new_session=True,
        )
        timed_out = False
        try:
            child.wait(head["timeout_s"])
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    answer = {"status": child.returncode, "timed_out": timed_out, "n_out_bytes": len(texts[0])}
    return answer, b"".join(texts)


def do_put(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    path = Path(head["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    path.chmod(head["mode"])
    return {}, b""


def do_get(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    return {}, Path(head["path"]).read_bytes()


def do_wake(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Become a machine of its own: a clone has the clock and the random numbers of the save."""
    time.clock_settime(time.CLOCK_REALTIME, head["time_s"])
    with open("/dev/urandom", "wb", buffering=0) as urandom:
        urandom.write(body)
        fcntl.ioctl(urandom, RNDRESEEDCRNG)
    return {}, b""


def do_mount(head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Mount the second disk, then each of its paths where it belongs, but not over what is there already.

    By system call: a dozen mount programs would take three seconds here.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str, flags: int) -> None:
        if libc.mount(source.encode(), target.encode(), kind.encode(), flags, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {source} on {target}")

    disk = Path("/payload")
    mount("/dev/vdb", str(disk), "ext4", 0)
    for path in map(Path, (disk / "paths").read_text().splitlines()):
        if not path.exists():
            source = disk / path.relative_to("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if source.is_dir() else path.touch()
            mount(str(source), str(path), "", MS_BIND)
    return {}, b""


ACTIONS = {"mount": do_mount, "run": do_run, "put": do_put, "get": do_get, "wake": do_wake}


def main() -> None:
    port_fd = open_port()
    ctypes.CDLL(None)  # load what is loaded once before the machine is saved
    send(port_fd, {"ready": True})
    while True:
        n_head, n_body = struct.unpack("<II", receive(port_fd, 8))
        head = json.loads(receive(port_fd, n_head))
        body = receive(port_fd, n_body)
        try:
            answer, out = ACTIONS[head["action"]](head, body)
        except Exception as problem:
            answer, out = {"error": repr(problem)}, b""
        send(port_fd, answer, out)


if __name__ == "__main__":
    main()
