"""A place for scenarios: containers that are really dumped, and new ones that really get their images.

The restore goes to the engine itself, past everything by which torpor would have refused it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from compat import verdict
from compat.profile import Profile
from compat.rules.case import Origin
from engines import registry
from engines.api import (
    CheckpointEngine,
    CheckpointRequest,
    EngineError,
    EngineSettings,
    Finding,
    Judge,
    Needs,
    RestoreRequest,
)
from engines.forecasts import Forecaster
from shim import admission, bundle, prospects, restore
from shim.config import Config
from shim.conformance.streams import Output, borrowed
from shim.errors import ShimError
from shim.images.apply import apply
from shim.images.manifest import Manifest
from shim.launcher import RUNSC_ARGS
from shim.toolchain.find import search_path
from tests.support.admission import manifest as manifest_of
from tests.support.containers import (
    PREFIX,
    SEARCH_PATH,
    Lab,
    Network,
    Runc,
    make_bundle,
    status,
    thaw,
    tool,
    until,
)
from tests.truth import asked, gpus, tools
from tests.truth.scenario import Happened, NotDumped, Prediction, Scenario, Source
from tests.truth.tools import Release

RESTORE_S = 30.0  # after that a restore hangs
RUNS_S = 20.0
PR_SET_CHILD_SUBREAPER = 36
N_TICKS = 15  # that a container must count after it woke up


_NOTHING = Prediction(answer="yes")


@dataclass(frozen=True, kw_only=True)
class Dumped:
    """A source's image. spec: what it was dumped with; rootfs_path: as it was then; ticks: how far it was;
    foreseen: of the dump.
    """

    source: Source
    spec: dict[str, Any]
    rootfs_path: Path
    image_path: Path
    needs: Needs
    manifest: Manifest
    ticks: int
    network: Network | None
    foreseen: Prediction = _NOTHING


@dataclass(kw_only=True)
class World:
    """What a new container gets. A scenario changes one thing of it.

    host: the node of the dump. afar: torpor is asked on another node, with this one's profile. unpack: the
    changes of the image, which are to be unpacked into the root file system before the restore.
    """

    place: Place
    dumped: Dumped
    container_id: str
    spec: dict[str, Any]
    bundle_path: Path
    image_path: Path
    host: Profile | None
    tcp: Literal["keep", "close"] = "close"
    tools: Release = ""
    afar: bool = False
    unpack: Path | None = None
    runtime_args: tuple[str, ...] = ()
    closers: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    @property
    def rootfs(self) -> Path:
        """The new container's root file system, a copy of the old one's."""
        return self.bundle_path / "rootfs"

    def own_image(self) -> Path:
        """A copy of the image, to be damaged."""
        self.image_path = self.bundle_path / "image"
        command = ["cp", "-a", self.dumped.image_path, self.image_path]
        subprocess.run(command, check=True)
        return self.image_path

    def network(self, address: str = "10.77.0.2") -> Network:
        """Another network namespace for the new container, with this address."""
        made = Network(
            f"tt{self.place.lab.tag}{len(self.place.dumps)}{self.container_id[-3:]}", pod_address=address
        )
        self.closers.append(made.close)
        self.join(made.pod_path)
        return made

    def join(self, path: Path) -> None:
        """Give the new container this network namespace."""
        for entry in self.spec["linux"]["namespaces"]:
            if entry["type"] == "network":
                entry["path"] = str(path)

    def beside(self, *words: str | Path) -> subprocess.Popen[str]:
        """A process that runs beside the new container; it has said a line when this returns."""
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert process.stdout
        assert process.stdout.readline(), words

        def end() -> None:
            process.kill()
            process.communicate()

        self.closers.append(end)
        return process


def _foresee(engine: CheckpointEngine, container_id: str, path: Path) -> tuple[Finding, ...]:
    return engine.foresee(container_id, path).findings if isinstance(engine, Forecaster) else ()


def _cause(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
    return next((line for line in lines if "Error (" in line), "the dump failed")


@contextlib.contextmanager
def _parent() -> Generator[None]:
    """Containers that are started meanwhile become children of this process, which can bury them."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Place:
    """The containers of one run, in a directory of their own. patience: how much longer all may take."""

    def __init__(self, lab: Lab, *, patience: float = 1.0) -> None:
        self.lab = lab
        self._patience = patience
        self.dumps: dict[str, Dumped] = {}
        self._config = Config(
            runtime_path=tool("runc"),
            state_path=lab.path / "torpor",
            store_path=lab.path / "store",
            tools_path=PREFIX,
        )
        self._config.state_path.mkdir()

    @cached_property
    def _runsc(self) -> Runc:
        program = self.lab.path / "runsc-as-set-up"
        program.write_text(f'#!/bin/sh\nexec {tool("runsc")} {RUNSC_ARGS} "$@"\n')
        program.chmod(0o755)
        return Runc(self.lab.path / "runsc", program)

    def runtime(self, source: Source) -> Runc:
        """The runtime of a source's containers."""
        return self._runsc if source.engine == "gvisor" else self.lab.runc

    def engine(
        self, container_id: str, source: Source, release: Release = "", args: tuple[str, ...] = ()
    ) -> CheckpointEngine:
        """The engine of a container, with these tools. args: other ones for runsc."""
        programs = tools.prefix(release) / "bin"
        if source.engine == "gvisor":
            return registry.create(
                "gvisor",
                EngineSettings(
                    runtime_path=programs / "runsc",
                    root_path=self._runsc.root,
                    state_path=self.lab.path / "state" / container_id,
                    search_path=f"{programs}:{SEARCH_PATH}",
                    runtime_args=args or tuple(RUNSC_ARGS.split()),
                ),
            )
        settings = EngineSettings(
            runtime_path=programs / "runc",
            root_path=self.lab.runc.root,
            state_path=self.lab.path / "state" / container_id,
            search_path=search_path(programs.parent),
            python_path=PREFIX / "python",
        )
        if source.engine == "criu-cuda":
            return gpus.engine(settings, source)
        return registry.create("criu", settings)

    def config(self, release: Release) -> Config:
        """A node with these tools."""
        return replace_fields(self._config, tools_path=tools.prefix(release))

    # --- dumps -----------------------------------------------------------------------------------------

    def dumped(self, source: Source) -> Dumped:
        """The image of a source; it is made once, unless every scenario needs its own."""
        found = self.dumps.get(source.name)
        if found is None or source.once:
            found = self.dumps[source.name] = self._dump(source)
        return found

    def _dump(self, source: Source) -> Dumped:
        container_id = self.lab.new_id(source.name)
        network = self.lab.network(f"s{len(self.lab.ids)}") if source.network == "joined" else None
        path = make_bundle(
            self.lab.path / "bundles" / container_id,
            source.args,
            netns_path=network.pod_path if network else None,
            terminal=source.terminal,
            cgroup=f"/tt-{self.lab.tag}/{container_id}",
        )
        spec = json.loads((path / "config.json").read_text())
        if source.network == "host":
            namespaces = spec["linux"]["namespaces"]
            spec["linux"]["namespaces"] = [entry for entry in namespaces if entry["type"] != "network"]
        source.edit(spec, path)
        criu = {"org.criu.config": str(path / "criu.conf")} if source.plain else {}
        (path / "criu.conf").write_text("network-lock nftables\nlink-remap\n")
        written = {**spec, "annotations": {**spec["annotations"], **criu}}
        (path / "config.json").write_text(json.dumps(written))
        runtime = self.runtime(source)
        with contextlib.nullcontext() if source.engine == "gvisor" else _parent():
            output = self._run(runtime, container_id, path, terminal=source.terminal)
        until(
            lambda: output.text.count("tick") > 2,
            timeout_s=RUNS_S * self._patience,
            what=f"{source.name} counts: {output.text[-500:]}",
        )
        if source.client:
            assert network
            self.lab.client(network, 7000)
        pid = runtime.pid(container_id)
        image_path = self.lab.path / "images" / container_id
        image_path.parent.mkdir(exist_ok=True)
        engine = self.engine(container_id, source, source.tools)
        foreseen = _NOTHING
        if source.plain:
            foreseen = Prediction.of(_foresee(engine, container_id, path), 0)
            options = ("--image-path", image_path, "--work-path", path, "--manage-cgroups-mode", "ignore")
            if runtime("checkpoint", *options, container_id, check=False).returncode:
                raise NotDumped(foreseen, _cause(path / "dump.log"))
        else:
            engine.checkpoint(
                CheckpointRequest(
                    container_id=container_id,
                    bundle_path=path,
                    image_path=image_path,
                    timeout_s=RESTORE_S * self._patience,
                    leave_running=source.lives_on,
                    release_network=not source.client,
                )
            )
        ticks = output.text.count("tick")
        if not source.lives_on:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # as its caller would: a zombie keeps its process id
            runtime.delete(container_id)
        kept = replace_fields(manifest_of(spec), host=prospects.stable(self.config(source.tools)))
        return Dumped(
            source=source,
            foreseen=foreseen,
            spec=spec,
            rootfs_path=path / "rootfs",
            image_path=image_path,
            needs=engine.inspect(image_path),
            manifest=kept,
            ticks=ticks,
            network=network,
        )

    def _run(self, runtime: Runc, container_id: str, path: Path, *, terminal: bool) -> Output:
        output = Output(self.lab.path / f"tty-{len(self.lab.ids)}" if terminal else None)
        words: list[str | Path] = [runtime.program, "--root", runtime.root, "run", "--detach"]
        words += ["--bundle", path]
        if output.console_path:
            words += ["--console-socket", output.console_path]
        with borrowed(output):
            subprocess.run([*words, container_id], check=True, env={**os.environ, "PATH": SEARCH_PATH})
        return output

    # --- scenarios -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def world(self, scenario: Scenario) -> Generator[World]:
        """What a scenario's container gets: all that the old one had, and the scenario's change."""
        dumped = self.dumped(scenario.source)
        container_id = self.lab.new_id("w")
        path = self.lab.path / "bundles" / container_id
        path.mkdir(parents=True)
        subprocess.run(["cp", "-a", dumped.rootfs_path, path / "rootfs"], check=True)
        spec = copy.deepcopy(dumped.spec)
        spec["root"]["path"] = str(path / "rootfs")
        spec["linux"]["cgroupsPath"] = f"/tt-{self.lab.tag}/{container_id}"
        world = World(
            place=self,
            dumped=dumped,
            container_id=container_id,
            spec=spec,
            bundle_path=path,
            image_path=dumped.image_path,
            host=dumped.manifest.host,
        )
        try:
            scenario.change(world)
            (path / "config.json").write_text(json.dumps(world.spec))
            yield world
        finally:
            thaw(self.lab.tag)
            self.runtime(scenario.source).delete(world.container_id)
            for closer in reversed(world.closers):
                closer()

    def predict(self, world: World) -> Prediction:
        """What torpor says, before anything is touched; and what it said before the dump."""
        return world.dumped.foreseen.beside(self._predict(world))

    def _predict(self, world: World) -> Prediction:
        dumped = world.dumped
        engine = self._engine_of(world)
        began = time.monotonic()
        try:
            needs = dumped.needs
            if world.image_path != dumped.image_path:
                needs = engine.inspect(world.image_path)
            spec = bundle.read_spec(world.bundle_path)
            config, host = self.config(world.tools), world.host
            origin = Origin(
                dump_spec=dumped.spec,
                rootfs_bytes=world.unpack.stat().st_size if world.unpack else 0,
                image_ref=prospects.image_ref(dumped.spec),
                leave_running=dumped.source.lives_on,
                use="clone",
            )
            if world.afar:
                node = prospects.now(config, world.rootfs)
                node = gpus.told(node) if needs.gpus else node
                findings = verdict.judge_for(needs, node, dump_host=host, origin=origin)
                return Prediction.of(findings, time.monotonic() - began)
            findings = restore.admit(
                config,
                spec,
                needs,
                replace_fields(dumped.manifest, host=host),
                bundle_path=world.bundle_path,
                what="truth",
                tcp=world.tcp,
                origin=origin,
            )
            if isinstance(engine, Judge):
                admission.refuse(engine.judge(world.image_path), what="truth")
            findings += verdict.judge_files(needs, spec, world.rootfs)
        except (EngineError, ShimError) as error:
            return Prediction.refused(str(error), time.monotonic() - began)
        return Prediction.of(findings, time.monotonic() - began)

    def _engine_of(self, world: World) -> CheckpointEngine:
        return self.engine(world.container_id, world.dumped.source, world.tools, world.runtime_args)

    def force(self, world: World) -> Happened:
        """Restore, whatever torpor thinks of it, and see what becomes of it."""
        terminal = bool(world.spec["process"].get("terminal"))
        output = Output(world.bundle_path / "tty" if terminal else None)
        engine = self._engine_of(world)
        request = RestoreRequest(
            container_id=world.container_id,
            bundle_path=world.bundle_path,
            image_path=world.image_path,
            timeout_s=RESTORE_S * self._patience,
            tcp=world.tcp,
            console_socket_path=output.console_path,
        )
        try:
            if world.unpack:
                with world.unpack.open("rb") as diff:
                    apply(world.rootfs, diff, b"[]", whiteouts="deleted.files")
            with borrowed(output):
                pid = engine.restore(request).pid
        except EngineError as error:
            return Happened(restored=False, how="error", message=str(error))
        return self._look(world, pid, output)

    def _look(self, world: World, pid: int, output: Output) -> Happened:
        deadline = time.monotonic() + RUNS_S * self._patience
        while output.text.count("tick") < N_TICKS:
            if status(pid, "State")[:1] in ("", "Z", "X"):
                return Happened(restored=False, how="died", message=output.text[-300:])
            if time.monotonic() > deadline:
                return Happened(restored=False, how="stands still", message=output.text[-300:])
            time.sleep(0.02)
        if world.dumped.source.engine == "gvisor":
            return Happened(restored=True, how="runs")  # nobody sees into a sandbox from outside
        cause = asked.differs(pid, world.spec, world.dumped.spec)
        return Happened(restored=not cause, how="other" if cause else "runs", message=cause)
