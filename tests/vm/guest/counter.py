"""A counting container, made of busybox alone, and what can be told of it from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.containers import Runc, make_spec, status, until

ROOT = Path("/root/test")
TIMEOUT_S = 90.0  # emulation is slow, and the machine beneath it may be busy
APPLETS = ("sh", "cat", "head", "sleep", "tr")

# Four megabytes that never change, and a number that does. The number is kept in memory only; the file
# tells it. Not often: here each number costs a good part of a tenth of a second of the processor.
COUNT = """\
ballast=$(head -c 4194304 /dev/zero | tr '\\0' x)
i=0
while :; do i=$((i + 1)); echo $i > /data/new; mv /data/new /data/count; sleep 0.2; done
"""


def fill_rootfs(path: Path) -> None:
    """A root of busybox and a writable /data."""
    for name in ("bin", "data", "dev", "proc", "sys", "tmp"):
        (path / name).mkdir(parents=True)
    (path / "data").chmod(0o777)
    shutil.copy("/usr/bin/busybox", path / "bin/busybox")
    for applet in (*APPLETS, "mv"):
        (path / "bin" / applet).symlink_to("busybox")


class Counter:
    """One root, used by one container after the other; a bundle and a cgroup for each."""

    def __init__(self) -> None:
        self.runc = Runc(ROOT / "runc")
        self.rootfs = ROOT / "rootfs"
        fill_rootfs(self.rootfs)

    def bundle(self, container_id: str, *, uid: int = 0) -> Path:
        path = ROOT / "bundles" / container_id
        path.mkdir(parents=True)
        spec = make_spec(["/bin/sh", "-c", COUNT], rootfs=str(self.rootfs), cgroup=f"/test/{container_id}")
        if uid:
            spec["process"]["user"] = {"uid": uid, "gid": uid}
            del spec["process"]["capabilities"]
        (path / "config.json").write_text(json.dumps(spec))
        return path

    def start(self, container_id: str, *, uid: int = 0) -> Path:
        """Start it, wait until it counts; its bundle."""
        bundle = self.bundle(container_id, uid=uid)
        # with /dev/null as its standard streams: nobody need hand pipes to the restore
        null = subprocess.DEVNULL
        run = [
            self.runc.program,
            "--root",
            self.runc.root,
            "run",
            "--detach",
            "--bundle",
            bundle,
            container_id,
        ]
        subprocess.run(run, stdin=null, stdout=null, stderr=null, check=True)
        self.until_above(3)
        return bundle

    def count(self) -> int:
        try:
            return int((self.rootfs / "data/count").read_text())
        except FileNotFoundError:
            return 0

    def until_above(self, number: int) -> None:
        until(lambda: self.count() > number, timeout_s=TIMEOUT_S, what=f"the count rises above {number}")

    def until_gone(self, pid: int) -> None:
        until(lambda: status(pid, "State")[:1] in ("", "Z"), timeout_s=TIMEOUT_S, what=f"process {pid} ends")


def cgroup(container_id: str) -> Path:
    """The container's group in the one hierarchy that there is."""
    return Path("/sys/fs/cgroup/test", container_id)


def frozen(container_id: str) -> bool:
    return "frozen 1" in (cgroup(container_id) / "cgroup.events").read_text()
