"""Images of gVisor, and a sandbox that is set up differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shim.launcher import RUNSC_ARGS
from tests.truth import sources
from tests.truth.files import at, grow
from tests.truth.mounts import drop, grown, other_content
from tests.truth.place import World
from tests.truth.rights import process
from tests.truth.scenario import Scenario, Source, as_it_is


def _set_up(option: str) -> Callable[[World], object]:
    """runsc has another option."""
    name = option.partition("=")[0]

    def change(world: World) -> None:
        kept = [word for word in RUNSC_ARGS.split() if not word.startswith(name)]
        world.runtime_args = (*kept, option)

    return change


def _no_source(world: World) -> None:
    world.spec["mounts"][-1]["source"] = str(world.bundle_path / "nowhere")


def _lost(world: World) -> None:
    for path in world.own_image().glob("checkpoint.img"):
        path.unlink()


def _of(name: str, source: Source, change: Callable[[World], object] = as_it_is) -> Scenario:
    return Scenario(kind="gvisor", name=name, source=source, change=change)


SCENARIOS = (
    _of("a sandbox as it was", sources.SANDBOX),
    _of("a sandbox, another program and environment", sources.SANDBOX, process(args=["true"], env=[])),
    _of("a sandbox on another platform", sources.SANDBOX, _set_up("--platform=ptrace")),
    _of("a sandbox without an overlay", sources.SANDBOX, _set_up("--overlay2=none")),
    _of("a sandbox with the host's network", sources.SANDBOX, _set_up("--network=host")),
    _of("a sandbox's image without its state", sources.SANDBOX, _lost),
    _of("a sandbox whose file is there", sources.SANDBOX_FILE),
    _of("a sandbox whose file is missing", sources.SANDBOX_FILE, at("data/table", Path.unlink)),
    _of("a sandbox whose file has grown", sources.SANDBOX_FILE, at("data/table", grow)),
    _of("a sandbox whose changed file is there", sources.SANDBOX_CHANGES),
    _of("a sandbox whose changed file is missing", sources.SANDBOX_CHANGES, at("data/table", Path.unlink)),
    _of("a sandbox whose open file it has deleted", sources.SANDBOX_DELETED),
    _of(
        "a sandbox whose open file it has deleted, missing below",
        sources.SANDBOX_DELETED,
        at("data/table", Path.unlink),
    ),
    _of("a sandbox whose working directory is there", sources.SANDBOX_DIRECTORY),
    _of(
        "a sandbox whose working directory is missing", sources.SANDBOX_DIRECTORY, at("data/here", Path.rmdir)
    ),
    _of("a sandbox whose library is there", sources.SANDBOX_LIBRARY),
    _of("a sandbox whose library is missing", sources.SANDBOX_LIBRARY, at("data/answer.so", Path.unlink)),
    _of(
        "a sandbox whose library is another build",
        sources.SANDBOX_LIBRARY,
        at("data/answer.so", lambda path: sources.library(path, 42)),
    ),
    _of("a sandbox's volume as it was", sources.SANDBOX_VOLUME),
    _of("a sandbox's volume without the open file", sources.SANDBOX_VOLUME, other_content),
    _of("a sandbox's volume in which the open file has grown", sources.SANDBOX_VOLUME, grown),
    _of("a sandbox's volume that the new spec lacks", sources.SANDBOX_VOLUME, drop("/vol")),
    _of("a sandbox's volume whose source is missing", sources.SANDBOX_VOLUME, _no_source),
)
