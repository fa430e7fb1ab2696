"""One containerd, one torpor, for the whole session; every test must leave the machine as it was."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.containerd import Containerd, Handler
from tests.support.containers import tool
from tests.support.cri import Cri
from tests.support.gvisor import launcher_with_network
from tests.support.podman import Podman
from tests.support.torpor import Torpor

CALLERS = frozenset({"daemon", "cri", "podman"})


@pytest.fixture(scope="session")
def tag() -> Iterator[str]:
    """The word that everything of this session carries."""
    word = f"torpor-{secrets.token_hex(4)}"
    os.environ[leaks.TAG_VARIABLE] = word
    yield word
    del os.environ[leaks.TAG_VARIABLE]


@pytest.fixture(scope="session")
def place(tag: str) -> Iterator[Path]:
    """A short directory for the session: unix sockets lie in it."""
    if os.geteuid() != 0:
        pytest.skip("runtime callers need root")
    path = Path("/tmp") / tag
    path.mkdir(mode=0o711)
    yield path
    leaks.unmount(tag)
    leaks.remove_cgroups(tag)
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def torpor(place: Path) -> Torpor:
    """The installation of torpor that the callers use."""
    return Torpor(place / "torpor")


@pytest.fixture(scope="session")
def daemon(place: Path, tag: str, torpor: Torpor) -> Iterator[Containerd]:
    """containerd with runc, torpor, torpor with an allow-list that is too wide, and gVisor in two set-ups."""
    wide = ("torpor.dev/*", "org.criu.*", "restore.criu.org/*")
    handlers = {
        "runc": Handler(binary=tool("runc")),
        "torpor": Handler(binary=torpor.runtime),
        "torpor-wide": Handler(binary=torpor.runtime, annotations=wide),
        "torpor-runsc": Handler(binary=torpor.runtime_runsc),
        "torpor-runsc-net": Handler(binary=launcher_with_network(place / "net", torpor)),
    }
    daemon = Containerd(place / "c", tag, handlers)
    daemon.image("pause")
    yield daemon
    daemon.close()


@pytest.fixture(scope="session")
def cri_session(daemon: Containerd, place: Path, tag: str) -> Iterator[Cri]:
    client = Cri(daemon.socket, place / "kubelet", tag)
    yield client
    client.close()


@pytest.fixture
def cri(cri_session: Cri) -> Iterator[Cri]:
    """A CRI client whose pods are removed after the test."""
    yield cri_session
    cri_session.close_pods()


@pytest.fixture
def podman(place: Path, tag: str, torpor: Torpor) -> Iterator[Podman]:
    """Podman with storage of its own, through torpor."""
    client = Podman(place / f"p-{secrets.token_hex(2)}", tag, torpor.runtime)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that uses a runtime caller must leave no process, mount, cgroup, lock, state or staging."""
    if CALLERS.isdisjoint(request.fixturenames):
        yield
        return
    word: str = request.getfixturevalue("tag")
    torpor: Torpor = request.getfixturevalue("torpor")
    if "podman" not in request.fixturenames:
        request.getfixturevalue("daemon")
    watch = leaks.Watch(
        word,
        gone=[f"{torpor.state_path}/containers/*/*", f"{torpor.store_path}/staging/*"],
    )
    yield
    # The caller's own fixture was set up after this one, so it has removed its containers by now.
    torpor.remove_images()
    left = watch.leaks()
    assert not left, "left behind:\n" + "\n".join(left)
