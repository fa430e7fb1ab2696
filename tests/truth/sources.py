"""The containers that are dumped, each with a state that a restore may fail for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.containers import bind, live
from tests.truth.scenario import Source, counting

PLAIN = Source(name="plain", args=live("--fill", "1", "--children", "2"))


# --- what is open --------------------------------------------------------------------------------------

FILES = Source(
    name="files",
    args=counting(
        "import os",
        "log = open('/data/log', 'w')",
        "log.write('x' * 100)",
        "log.flush()",
        "more = open('/data/more', 'a')",
        "more.write('y' * 100)",
        "more.flush()",
        "gone = open('/data/gone', 'w+')",
        "gone.write('kept')",
        "gone.flush()",
        "os.unlink('/data/gone')",
        each=("gone.seek(0)", "assert gone.read() == 'kept'"),
    ),
)


def library(path: Path, answer: int) -> None:
    """A shared library that gives this answer; of the same size whatever it is."""
    text = f"int answer(void) {{ return {answer}; }}"
    words = ["gcc", "-shared", "-fPIC", "-Wl,--build-id", "-x", "c", "-", "-o", path]
    subprocess.run(words, input=text, text=True, check=True)


def _with_library(_: dict[str, Any], path: Path) -> None:
    library(path / "rootfs/data/answer.so", 41)


LIBRARY = Source(
    name="library",
    args=counting(
        "import ctypes",
        "library = ctypes.CDLL('/data/answer.so')",
        each=("assert library.answer() == 41",),
    ),
    edit=_with_library,
)
MAPPED = Source(
    name="mapped",
    args=counting(
        "import mmap",
        "file = open('/data/map', 'w+b')",
        "file.write(b'm' * 8192)",
        "file.flush()",
        "memory = mmap.mmap(file.fileno(), 8192)",
        "file.close()",
        each=("assert memory[8000] == 109",),
    ),
)
WORKING_DIRECTORY = Source(
    name="cwd", args=counting("import os", "os.mkdir('/data/here')", "os.chdir('/data/here')")
)
DIRECTORY = Source(
    name="directory",
    args=counting("import os", "os.mkdir('/data/here')", "there = os.open('/data/here', os.O_RDONLY)"),
)
FIFO = Source(
    name="fifo",
    args=counting("import os", "os.mkfifo('/data/fifo')", "end = os.open('/data/fifo', os.O_RDWR)"),
)
UNIX_SOCKET = Source(
    name="unix",
    args=counting(
        "import os, socket",
        "os.mkdir('/data/run')",
        "listener = socket.socket(socket.AF_UNIX)",
        "listener.bind('/data/run/sock')",
        "listener.listen()",
    ),
)
# Names that are no UTF-8, and that hold what a line of settings or of a listing cannot.
ODD = b'\xff\n #"\\='
ODD_NAMES = Source(
    name="odd",
    args=counting(
        "import ctypes, fcntl, mmap, os, socket",
        "libc = ctypes.CDLL(None)",
        "libc.prctl(15, b'\\xff\\n)', 0, 0, 0)",
        f"base = b'/data/' + {ODD!r}",
        "os.mkdir(base)",
        "os.chdir(base)",
        f"log = open({ODD!r} + b'log', 'w')",
        "fcntl.flock(log, fcntl.LOCK_EX)",
        "memory = os.open(b'map', os.O_RDWR | os.O_CREAT)",
        "os.truncate(memory, 4096)",
        "memory = mmap.mmap(memory, 4096)",
        f"os.mkfifo({ODD!r} + b'fifo')",
        f"end = os.open({ODD!r} + b'fifo', os.O_RDWR)",
        "listener = socket.socket(socket.AF_UNIX)",
        f"listener.bind(base + b'/' + {ODD!r})",
        "listener.listen()",
        "gone = open(b'gone\\xfe', 'w+')",
        "os.unlink(b'gone\\xfe')",
        "watch = libc.inotify_init1(0)",
        "assert libc.inotify_add_watch(watch, base, 0x100) > 0",
        each=("assert os.fstat(log.fileno()).st_nlink and memory[0] == 0",),
    ),
)
LOCK = Source(
    name="lock",
    args=counting("import fcntl", "file = open('/vol/lock', 'a')", "fcntl.flock(file, fcntl.LOCK_EX)"),
    edit=lambda spec, path: with_volume(spec, path),
)
WATCH = Source(
    name="watch",
    args=counting(
        "import ctypes, os",
        "os.mkdir('/data/here')",
        "libc = ctypes.CDLL(None)",
        "watch = libc.inotify_init1(0)",
        "assert libc.inotify_add_watch(watch, b'/data/here', 0x100) > 0",
    ),
)


def _device(spec: dict[str, Any], _: Path) -> None:
    spec["linux"]["devices"] = [
        {"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11, "fileMode": 0o644}
    ]
    spec["linux"]["resources"] = {
        "devices": [{"allow": True, "type": "c", "major": 1, "minor": 11, "access": "rwm"}]
    }


def _tunnel(spec: dict[str, Any], _: Path) -> None:
    spec["linux"]["devices"] = [
        {"path": "/dev/net/tun", "type": "c", "major": 10, "minor": 200, "fileMode": 0o666}
    ]
    spec["linux"]["resources"] = {
        "devices": [{"allow": True, "type": "c", "major": 10, "minor": 200, "access": "rwm"}]
    }
    grant(spec, "CAP_NET_ADMIN")


TUNNEL = Source(
    name="tunnel",
    args=counting(
        "import fcntl, os, struct",
        "tunnel = os.open('/dev/net/tun', os.O_RDWR)",
        "fcntl.ioctl(tunnel, 0x400454CA, struct.pack('16sH22x', b't0', 0x1001))",
    ),
    edit=_tunnel,
    plain=True,
)
DEVICE = Source(
    name="device",
    args=counting("import os", "log = os.open('/dev/kmsg', os.O_WRONLY)"),
    edit=_device,
)
TERMINAL = Source(name="terminal", args=live("--fill", "1"), terminal=True)


# --- mounts --------------------------------------------------------------------------------------------


def with_volume(spec: dict[str, Any], path: Path) -> None:
    """Give a container a volume that it may write to."""
    (path / "volume").mkdir()
    spec["mounts"].append(bind(path / "volume", "/vol", writable=True))


VOLUME = Source(
    name="volume",
    args=counting("file = open('/vol/state', 'w')", "file.write('s' * 10)", "file.flush()"),
    edit=with_volume,
)


def _file(spec: dict[str, Any], path: Path) -> None:
    (path / "hosts").write_text("127.0.0.1 localhost\n")
    spec["mounts"].append(bind(path / "hosts", "/etc/hosts"))


BOUND_FILE = Source(name="bound-file", args=live("--fill", "1"), edit=_file)


def tmpfs(path: str) -> dict[str, Any]:
    """A tmpfs for a spec."""
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]}


TMPFS = Source(
    name="tmpfs",
    args=counting(
        "file = open('/scratch/state', 'w+')",
        "file.write('s' * 10)",
        "file.flush()",
        each=("assert open('/scratch/state').read() == 's' * 10",),
    ),
    edit=lambda spec, _: spec["mounts"].append(tmpfs("/scratch")),
)


def grant(spec: dict[str, Any], *capabilities: str) -> None:
    """Give a container capabilities."""
    for name, kept in spec["process"]["capabilities"].items():
        spec["process"]["capabilities"][name] = [*kept, *capabilities]


MOUNTED_INSIDE = Source(
    name="inside",
    args=counting(
        "import ctypes, os",
        "os.mkdir('/data/inside')",
        "assert ctypes.CDLL(None).mount(b'tmpfs', b'/data/inside', b'tmpfs', 0, None) == 0",
    ),
    edit=lambda spec, _: grant(spec, "CAP_SYS_ADMIN"),
)
CGROUPS = Source(
    name="cgroups",
    args=live("--fill", "1"),
    edit=lambda spec, _: spec["mounts"].append(
        {
            "destination": "/sys/fs/cgroup",
            "type": "cgroup",
            "source": "cgroup",
            "options": ["nosuid", "noexec", "nodev", "relatime", "ro"],
        }
    ),
)
CGROUPS_WRITABLE = Source(
    name="cgroups-writable",
    args=counting(
        "import os", each=("os.mkdir('/sys/fs/cgroup/pids/x'); os.rmdir('/sys/fs/cgroup/pids/x')",)
    ),
    edit=lambda spec, _: spec["mounts"].append(
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "rw"]}
    ),
)
CGROUPS_OPEN = Source(
    name="cgroups-open",
    args=counting(
        "import os",
        "file = open('/sys/fs/cgroup/pids/tasks')",
        each=("assert os.path.samestat(os.fstat(file.fileno()), os.stat('/sys/fs/cgroup/pids/tasks'))",),
    ),
    edit=CGROUPS_WRITABLE.edit,
    plain=True,
)


# --- network -------------------------------------------------------------------------------------------

JOINED = Source(name="joined", args=live("--port", "7000"), network="joined")
BOUND = Source(
    name="bound",
    args=counting("import socket", "listener = socket.create_server(('10.77.0.2', 7000))"),
    network="joined",
)
DATAGRAMS = Source(
    name="datagrams",
    args=counting(
        "import socket",
        "port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "port.bind(('10.77.0.2', 7000))",
    ),
    network="joined",
)
TALKING = Source(name="talking", args=live("--port", "7000"), network="joined", client=True, once=True)
LOOPBACK = Source(
    name="loopback",
    args=counting("import socket", "listener = socket.create_server(('127.0.0.1', 7000))"),
)
HOST_NETWORK = Source(name="host-network", args=live("--fill", "1"), network="host")


# --- gVisor --------------------------------------------------------------------------------------------

SANDBOX = Source(name="sandbox", args=live("--fill", "1"), engine="gvisor")


def _file_of_the_root(_: dict[str, Any], path: Path) -> None:
    (path / "rootfs/data/table").write_text("t" * 100)


SANDBOX_FILE = Source(
    name="sandbox-file",
    args=counting("file = open('/data/table')", each=("file.seek(0)", "assert len(file.read()) == 100")),
    edit=_file_of_the_root,
    engine="gvisor",
)
SANDBOX_LIBRARY = Source(name="sandbox-library", args=LIBRARY.args, edit=_with_library, engine="gvisor")


def _directory_of_the_root(_: dict[str, Any], path: Path) -> None:
    (path / "rootfs/data/here").mkdir()


SANDBOX_DIRECTORY = Source(
    name="sandbox-directory",
    args=counting("import os", "os.chdir('/data/here')", each=("assert os.getcwd() == '/data/here'",)),
    edit=_directory_of_the_root,
    engine="gvisor",
)
SANDBOX_CHANGES = Source(
    name="sandbox-changes",
    args=counting(
        *("file = open('/data/table', 'r+')", "file.write('n' * 100)", "file.flush()"),
        each=("file.seek(0)", "assert file.read() == 'n' * 100"),
    ),
    edit=_file_of_the_root,
    engine="gvisor",
)
SANDBOX_DELETED = Source(
    name="sandbox-deleted",
    args=counting(
        *("import os", "file = open('/data/table')", "os.unlink('/data/table')"),
        each=("file.seek(0)", "assert len(file.read()) == 100"),
    ),
    edit=_file_of_the_root,
    engine="gvisor",
)
SANDBOX_VOLUME = Source(name="sandbox-volume", args=VOLUME.args, edit=with_volume, engine="gvisor")


# --- ids, memory ---------------------------------------------------------------------------------------


def drop_namespace(spec: dict[str, Any], kind: str) -> None:
    """The host's namespace in place of the container's own."""
    namespaces = spec["linux"]["namespaces"]
    spec["linux"]["namespaces"] = [entry for entry in namespaces if entry["type"] != kind]


HOST_PIDS = Source(
    name="host-pids",
    args=live("--fill", "1"),
    edit=lambda spec, _: drop_namespace(spec, "pid"),
    once=True,
)
HOST_PIDS_ALIVE = Source(
    name="host-pids-alive",
    args=live("--fill", "1"),
    edit=lambda spec, _: drop_namespace(spec, "pid"),
    lives_on=True,
)


def _named_image(spec: dict[str, Any], _: Path) -> None:
    spec["annotations"] |= crio_image("example.org/app@sha256:" + "1" * 64)


def crio_image(reference: str) -> dict[str, str]:
    """Annotations by which CRI-O names a container's image."""
    mark = "io.kubernetes.cri-o."
    return {f"{mark}ContainerType": "container", f"{mark}ImageRef": reference}


NAMED_IMAGE = Source(name="named-image", args=live("--fill", "1"), edit=_named_image)
OF_OLD_CRIU = Source(name="of-old-criu", args=live("--fill", "1"), tools="criu-4.1")
ALIVE = Source(name="alive", args=live("--fill", "1"), lives_on=True)
LARGE = Source(name="large", args=live("--fill", "64"))
_DIES = "os.fork() or os._exit(0)"
DEAD = Source(name="dead", args=counting("import os", *[_DIES] * 4))
DEAD_HOST_PIDS = Source(
    name="dead-host-pids", args=counting("import os", _DIES), edit=HOST_PIDS.edit, once=True
)
LEADERLESS = Source(
    name="leaderless",
    args=counting(
        "import os, time",
        "for _ in range(4):",
        "    pid = os.fork()",
        "    if not pid:",
        "        os.setsid()",
        "        os.fork() or time.sleep(999)",
        "        os._exit(0)",
        "    os.waitpid(pid, 0)",
    ),
)
FAMILY = Source(name="family", args=live("--children", "8"))


def _mapped(spec: dict[str, Any], path: Path) -> None:
    """A user namespace; its root cannot reach a Python in a home directory, so it takes the system's."""
    unreachable = {sys.base_prefix} - {"/usr"}
    spec["mounts"] = [entry for entry in spec["mounts"] if entry["destination"] not in unreachable]
    spec["process"]["args"][0] = "/usr/bin/python3"
    map_ids(spec, path)


def map_ids(spec: dict[str, Any], path: Path) -> None:
    """Give a container a user namespace, and its root file system to that one's root."""
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"]["uidMappings"] = spec["linux"]["gidMappings"] = mapping
    subprocess.run(["chown", "-R", "100000:100000", path / "rootfs"], check=True)
    for part in (path, path.parent):
        part.chmod(0o711)


def _mapped_groups(spec: dict[str, Any], path: Path) -> None:
    _mapped(spec, path)
    CGROUPS.edit(spec, path)


CGROUPS_MAPPED = Source(name="cgroups-mapped", args=live("--fill", "1"), edit=_mapped_groups)
USER_NAMESPACE = Source(name="user-namespace", args=live("--fill", "1"), edit=_mapped)


def _closed(spec: dict[str, Any], path: Path) -> None:
    _mapped(spec, path)
    (path / "closed").mkdir(mode=0o700)
    (path / "closed/volume").mkdir(mode=0o755)
    spec["mounts"].append(bind(path / "closed/volume", "/vol"))


CLOSED_VOLUME = Source(name="closed-volume", args=live("--fill", "1"), edit=_closed)


def filtered(spec: dict[str, Any], *_: object) -> None:
    """A seccomp filter that refuses a call nobody makes."""
    spec["linux"]["seccomp"] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [{"names": ["acct"], "action": "SCMP_ACT_ERRNO"}],
    }


SECCOMP = Source(name="seccomp", args=live("--fill", "1"), edit=filtered)
