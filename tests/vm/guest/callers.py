"""torpor between containerd and runc under another kernel.

In the machine: `python -m tests.vm.guest.callers ARCHIVE N_SLEEPS`; ARCHIVE: the busybox test image.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from tests.support import oci
from tests.support.containerd import Containerd, Handler, runc_options
from tests.support.containers import until
from tests.support.torpor import Torpor
from tests.vm.guest.counter import ROOT, TIMEOUT_S

NAMESPACE = "test"
# as kubelet asks for it: containers live in scopes that systemd makes
SYSTEMD = ("--runc-systemd-cgroup", "--cgroup", "system.slice:test:{id}")

# Not often: here each number costs a good part of a tenth of a second of the processor.
COUNT = 'trap "exit 42" TERM; i=0; while :; do i=$((i+1)); echo $i >/data/last; echo tick $i; sleep 0.3; done'


class Caller:
    """containerd with torpor as its runtime, and one busybox image."""

    def __init__(self, archive: Path) -> None:
        self.torpor = Torpor(ROOT / "torpor")
        self.daemon = Containerd(ROOT / "c", NAMESPACE, {"torpor": Handler(binary=self.torpor.runtime)})
        self.ctr("images", "import", archive)

    def ctr(self, *words: str | Path) -> str:
        return self.daemon.ctr(*words, namespace=NAMESPACE).stdout

    def run(self, container_id: str, *options: str) -> None:
        self.ctr(
            *(
                "run",
                "--detach",
                "--snapshotter",
                "overlayfs",
                "--log-uri",
                f"file://{log_path(container_id)}",
            ),
            *runc_options(self.torpor.runtime, self.daemon),
            *(option.format(id=container_id) for option in options),
            oci.reference("busybox"),
            container_id,
            *("/bin/sh", "-c", COUNT),
        )

    def put_to_sleep(self, container_id: str, name: str) -> int:
        """Checkpoint into the store and remove the container; its last number."""
        until_number(container_id, 5)
        folder, archive = ROOT / name, ROOT / f"{name}.tar"
        self.ctr("task", "checkpoint", "--image-path", folder, container_id)
        self.ctr("task", "kill", "--signal", "SIGKILL", container_id)
        self.until_status(container_id, "STOPPED")
        last = numbers(container_id)[-1]
        self.delete(container_id)
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, arcname="checkpoint")
        self.torpor.import_archive(archive, name)
        return last

    def delete(self, container_id: str) -> str:
        """Delete an ended container; what `ctr` says of it: an exit status that is not 0."""
        said = self.daemon.ctr("task", "delete", container_id, namespace=NAMESPACE).stderr
        self.ctr("container", "delete", container_id)
        return said

    def cgroup(self, container_id: str) -> str:
        """Its cgroup in the one hierarchy that there is."""
        return Path(f"/proc/{self.pid(container_id)}/cgroup").read_text().strip().removeprefix("0::")

    def pid(self, container_id: str) -> int:
        rows = [line.split() for line in self.ctr("task", "ls").splitlines()]
        return next(int(row[1]) for row in rows if row[0] == container_id)

    def until_status(self, container_id: str, wanted: str) -> None:
        def there() -> bool:
            rows = [line.split() for line in self.ctr("task", "ls").splitlines()]
            return any(row[0] == container_id and row[2] == wanted for row in rows)

        until(there, timeout_s=TIMEOUT_S, what=f"{container_id} is {wanted}")


def log_path(container_id: str) -> Path:
    return ROOT / f"{container_id}.log"


def numbers(container_id: str) -> list[int]:
    path = log_path(container_id)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("tick ") and line.endswith("\n")]


def until_number(container_id: str, least: int) -> None:
    def reached() -> bool:
        return any(number >= least for number in numbers(container_id))

    until(reached, timeout_s=TIMEOUT_S, what=f"{container_id} counts to {least}")


def restore_at_create(archive: Path, n_sleeps: int) -> None:
    """A counter sleeps in a plain cgroup and wakes up in a scope of systemd's, in another container.

    n_sleeps: how often; from the second time on it is a restored container that sleeps.
    """
    caller = Caller(archive)
    caller.run("c0")
    assert caller.cgroup("c0") == f"/{NAMESPACE}/c0"
    for n in range(1, n_sleeps + 1):
        after_dump = caller.put_to_sleep(f"c{n - 1}", f"image{n}")
        caller.run(f"c{n}", *SYSTEMD, "--annotation", f"torpor.dev/restore-from=image{n}")
        until_number(f"c{n}", after_dump + 3)
        counted = numbers(f"c{n}")
        assert 1 < counted[0] <= after_dump + 1, (counted[0], after_dump)
        assert counted == list(range(counted[0], counted[0] + len(counted))), "it misses no number"
        assert caller.cgroup(f"c{n}") == f"/system.slice/test-c{n}.scope"
        # It is empty between its truncation and its next number.
        note = until(Path(f"/proc/{caller.pid(f'c{n}')}/root/data/last").read_text, what="it notes a number")
        assert int(note) > after_dump, "it writes into a root filesystem of its own"
    last = f"c{n_sleeps}"
    caller.ctr("task", "pause", last)
    caller.until_status(last, "PAUSED")
    caller.ctr("task", "resume", last)
    until_number(last, numbers(last)[-1] + 3)
    caller.ctr("task", "kill", "--signal", "SIGTERM", last)
    caller.until_status(last, "STOPPED")
    said = caller.delete(last)
    assert "exit code 42" in said, f"the counter's own trap gives 42, ctr says: {said}"
    caller.daemon.close()


if __name__ == "__main__":
    restore_at_create(Path(sys.argv[1]), int(sys.argv[2]))
