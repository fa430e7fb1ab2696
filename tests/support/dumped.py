"""Images that CRIU really wrote, of containers with more than a plain spec grants."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from engines.api import Finding, Needs
from engines.criu.inspect import inspect
from shim import admission
from tests.support.admission import manifest
from tests.support.containers import PREFIX, Lab, Output, until

PYCRIU = PREFIX / "python"
# In the background: a shell that has just begun a program waits in vfork, where CRIU cannot seize it.
SHELL = ["/bin/sh", "-c", "sleep 10000 & echo ready; wait"]
Edit = Callable[[dict[str, Any]], object]


def nothing(_: dict[str, Any]) -> None:
    """The plain spec."""


class Dumped:
    """One image, the spec it was dumped with, and that spec less what the test added."""

    def __init__(self, place: Lab, name: str, args: Sequence[str], edit: Edit) -> None:
        bundle = place.bundle(name, args)
        path = bundle / "config.json"
        self.plain: dict[str, Any] = json.loads(path.read_text())
        self.spec = copy.deepcopy(self.plain)
        edit(self.spec)
        configuration = bundle / "criu.conf"
        configuration.write_text("network-lock nftables\nmanage-cgroups=ignore\nfile-locks\nghost-limit 8M\n")
        written = {**self.spec, "annotations": {"org.criu.config": str(configuration)}}
        path.write_text(json.dumps(written))
        self.image_path = place.path / "images" / name
        container = place.new_id(name)
        output: Output = place.runc.run(bundle, container)
        until(lambda: "ready" in output.text, what=f"{name} is ready: {output.text}")
        arguments = ("--image-path", self.image_path, "--work-path", place.path / "work" / name)
        (place.path / "work" / name).mkdir(parents=True)
        place.runc("checkpoint", *arguments, "--leave-running", container)
        place.runc.delete(container)
        self.rootfs_path = bundle / "rootfs"
        self.needs = inspect(self.image_path, PYCRIU)

    def check(self, spec: dict[str, Any], needs: Needs | None = None) -> tuple[Finding, ...]:
        """What admission finds in this image, or in needs in its place."""
        kept = manifest(self.spec)
        return admission.check(spec, needs or self.needs, kept, rootfs_path=self.rootfs_path)

    def passes_itself_but_not_under(self, spec: dict[str, Any], rule: str) -> list[str]:
        """Messages of the refusals under `spec`, all of which must be of this rule."""
        assert [finding for finding in self.check(self.spec) if finding.severity == "refuse"] == []
        refused = [finding for finding in self.check(spec) if finding.severity == "refuse"]
        assert {finding.rule for finding in refused} == {rule}
        return [finding.message for finding in refused]


def dumped(place: Lab, name: str, edit: Edit = nothing, args: Sequence[str] = SHELL) -> Dumped:
    """Start a container that says `ready`, and dump it."""
    return Dumped(place, name, args, edit)


def python(*lines: str) -> list[str]:
    """A program that does something, says that it is ready and waits."""
    text = "\n".join((*lines, "print('ready', flush=True)", "import time", "while True: time.sleep(1)"))
    return ["python", "-IS", "-c", text]
