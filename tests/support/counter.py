"""The smallest container whose memory can be told from outside: it counts."""

from __future__ import annotations

from tests.support.containerd import Containerd
from tests.support.cri import Container, Pod
from tests.support.torpor import Torpor

# Counts aloud every 50 ms and notes the counts in its root filesystem; answers SIGTERM with exit code 42.
# It appends them: whoever reads a file that is cut and written anew finds it empty now and then.
COUNTER = (
    "/bin/sh",
    "-c",
    'trap "exit 42" TERM; i=0; while :; do i=$((i+1)); echo $i >>/data/count; echo tick $i; sleep 0.05; done',
)
# It runs on until it is asleep: no more than this in the minute that a checkpoint may take.
UNTIL_ASLEEP = 1200


def put_to_sleep(container: Container, torpor: Torpor, name: str, *, namespace: str = "default") -> int:
    """Checkpoint a running container through CRI and import the archive as `name`.

    Returns the last number that it had printed before: a restored counter goes on above it.
    """
    archive = container.pod.path / f"{name}.tar"
    last = container.until_number(5)
    container.checkpoint(archive)
    torpor.import_archive(archive, name, namespace=namespace)
    return last


def wakes(container: Container, last: int) -> list[int]:
    """The numbers of a restored counter: they begin above `last` and miss none."""
    container.until_number(last + 8)
    numbers = container.numbers()
    assert last <= numbers[0] <= last + UNTIL_ASLEEP, numbers[:3]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return numbers


def crowd(pod: Pod, daemon: Containerd, size: int) -> None:
    """Take so many pids of a shared pid namespace, one after the other: the shell forks nothing else."""
    script = f"n=0; while [ $n -lt {size} ]; do sleep 3600 & n=$((n + 1)); done; echo ready 1; wait"
    container = pod.run("crowd", ["/bin/sh", "-c", script], image=daemon.image("busybox"))
    container.until_number(1, word="ready")


def threads(pod: Pod, daemon: Containerd, size: int) -> None:
    """Take as many numbers of a shared pid namespace with the threads of one process."""
    program = (
        "import threading, time\n"
        f"for _ in range({size}): threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        "print('ready 1', flush=True)\ntime.sleep(3600)"
    )
    container = pod.run("crowd", ["/usr/bin/python3", "-IS", "-c", program], image=daemon.image("python"))
    container.until_number(1, word="ready")
