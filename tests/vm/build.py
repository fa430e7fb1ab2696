"""Builds the machine that the tests of this folder run in: Debian 13's kernel and a small Debian 13 root.

    python -m tests.vm.build [FOLDER]

Packages come from the system's own Debian mirror and are checked with Debian's keyring. They are only
unpacked, never configured: a dozen programs and a kernel need no package manager. The result lies in
FOLDER/<key>, where the key is made of this file, the agent and the package list, and is built again when
one of them changes. Needs root, mmdebstrap and mke2fs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import lzma
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from shim.toolchain.apt import system_mirror

SUITE = "trixie"
ROOT_BYTES = 1536 << 20  # of the sparse file; about 300 MiB of it are used
PACKAGES = (
    "linux-image-cloud-amd64",
    # what makes a Debian root
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "findutils", "grep", "libc-bin", "sed"),
    *("kmod", "mount", "procps", "util-linux"),
    *("gzip", "tar"),  # CRIU packs the contents of a tmpfs with them
    "busybox-static",  # the initial root, and the containers of the tests
    "iproute2",
    "libstdc++6",  # of gRPC, with which the tests speak to containerd
    "nftables",
    "python3",  # the agent's; torpor runs with the host's interpreter
    "systemd",
)
NEEDLESS = tuple(f"/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info"))

INITIAL_INIT = """\
#!/bin/busybox sh
busybox() { /bin/busybox "$@"; }
busybox mount -t devtmpfs dev /dev
busybox insmod /virtio_blk.ko
n=0
until [ -b /dev/vda ]; do
    n=$((n + 1)); [ $n -gt 2000 ] && echo "there is no /dev/vda" && busybox poweroff -f
    busybox usleep 5000
done
busybox mount -t ext4 /dev/vda /new
busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /usr/lib/systemd/systemd
"""

# No udev runs: modules that nothing asks for by name are loaded here.
START_UP = """\
#!/bin/sh
ip link set lo up
modprobe -a overlay veth bridge tun nf_tables virtio_net inet_diag tcp_diag udp_diag raw_diag unix_diag \
    netlink_diag af_packet_diag
"""

# The only unit that is asked for: systemd starts what it needs for it, and no more.
AGENT_UNIT = "torpor-agent.service"
AGENT_UNIT_TEXT = """\
[Unit]
DefaultDependencies=no
[Service]
ExecStartPre=/vm/start-up
ExecStart=/vm/agent.py
KillMode=process
"""


class BuildFailed(Exception):
    """The machine could not be built; the message names the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A built machine. Its files are read-only: a disk that changes under a saved state corrupts it."""

    path: Path
    key: str

    @property
    def kernel_path(self) -> Path:
        return self.path / "vmlinuz"

    @property
    def initrd_path(self) -> Path:
        return self.path / "initrd"

    @property
    def disk_path(self) -> Path:
        return self.path / "root.ext4"


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file: two test runs of one checkout build only once."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def ensure(folder: Path) -> Image:
    """Find or build the image of today's key under `folder`; older ones are removed.

    Raises BuildFailed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = Image(path=folder / _key(), key=_key())
    with locked(folder / "lock"):
        if not image.path.exists():
            for pattern in ("?" * len(image.key), "building-*"):  # of other keys, of a build that was killed
                for old in folder.glob(pattern):
                    shutil.rmtree(old)
            with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as staging:
                _build(Path(staging), folder / "build.log")
                done = Path(staging) / "done"
                done.chmod(0o755)
                done.rename(image.path)
    return image


def _key() -> str:
    here = Path(__file__)
    digest = hashlib.sha256(here.read_bytes() + here.with_name("agent.py").read_bytes())
    return digest.hexdigest()[:16]


def _build(staging: Path, log_path: Path) -> None:
    root, done = staging / "root", staging / "done"
    done.mkdir()
    with log_path.open("wb") as log:

        def run(*command: str | Path) -> None:
            try:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
            except (OSError, subprocess.CalledProcessError) as problem:
                message = f"could not build the test machine: {problem} (log: {log_path})"
                raise BuildFailed(message) from problem

        run(
            *("mmdebstrap", "--mode=root", "--variant=extract", f"--include={','.join(PACKAGES)}"),
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in NEEDLESS),
            *(SUITE, root, system_mirror()),
        )
        kernel = next((root / "boot").glob("vmlinuz-*"))
        modules = root / "usr/lib/modules" / kernel.name.removeprefix("vmlinuz-")
        run("chroot", root, "depmod", "-a", modules.name)
        run("chroot", root, "ldconfig")
        _write_initrd(done / "initrd", root, modules)
        kernel.rename(done / "vmlinuz")
        _furnish(root)
        disk = done / "root.ext4"
        size = f"{ROOT_BYTES >> 10}k"
        run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", root, disk, size)
    for path in done.iterdir():
        path.chmod(0o444)


def _write_initrd(path: Path, root: Path, modules: Path) -> None:
    """A newc archive of busybox and the one driver that is a module and that the root disk needs."""
    driver = modules / "kernel/drivers/block/virtio_blk.ko.xz"
    entries: list[tuple[str, int, bytes, int]] = [
        *((name, stat.S_IFDIR | 0o755, b"", 0) for name in ("bin", "dev", "new")),
        ("dev/console", stat.S_IFCHR | 0o600, b"", os.makedev(5, 1)),  # the kernel opens it before init
        ("bin/busybox", stat.S_IFREG | 0o755, (root / "usr/bin/busybox").read_bytes(), 0),
        ("virtio_blk.ko", stat.S_IFREG | 0o644, lzma.decompress(driver.read_bytes()), 0),
        ("init", stat.S_IFREG | 0o755, INITIAL_INIT.encode(), 0),
        ("TRAILER!!!", 0, b"", 0),
    ]
    with path.open("wb") as archive:
        for number, (name, mode, data, device) in enumerate(entries, start=1):
            encoded = name.encode() + b"\0"
            # inode, mode, uid, gid, links, mtime, size, the file system's device (2), the node's own (2),
            # length of the name, checksum
            fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0)
            fields += (os.major(device), os.minor(device), len(encoded), 0)
            head = b"070701" + b"".join(b"%08X" % value for value in fields) + encoded
            archive.write(head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))


def _furnish(root: Path) -> None:
    """Write what the packages' maintainer scripts would have written, and our own start."""
    shutil.copy(root / "usr/share/base-passwd/passwd.master", root / "etc/passwd")
    shutil.copy(root / "usr/share/base-passwd/group.master", root / "etc/group")
    (root / "etc/hostname").write_text("vm\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost vm\n")
    for folder in ("proc", "sys", "dev", "run", "tmp", "root", "payload", "vm"):
        (root / folder).mkdir(exist_ok=True)
    (root / "etc/machine-id").write_text(f"{0x70:032x}\n")
    (root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (root / "etc/systemd/system" / AGENT_UNIT).write_text(AGENT_UNIT_TEXT)
    (root / "vm/start-up").write_text(START_UP)
    shutil.copy(Path(__file__).with_name("agent.py"), root / "vm/agent.py")
    for program in (root / "vm").iterdir():
        program.chmod(0o755)


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1] if len(sys.argv) > 1 else "build/vm")).path)
