"""What the engine does while CRIU waits at a stage of a dump or a restore."""

from __future__ import annotations

import time
from pathlib import Path

from engines.api import (
    CheckpointRequest,
    DumpFailed,
    EngineTimeout,
    InvalidRequest,
    PhaseInfo,
    RestoreFailed,
    RestoreRequest,
)
from engines.criu import calls, cgroups, extras, tree, views, wire
from engines.criu.journal import Journal
from engines.criu.network import raise_loopback, set_sysctls
from engines.criu.outlook import Outlook
from engines.criu.phases import Stage
from engines.criu.runtime import Bundle, Container

_FREEZE_S = 1.0
_VFORK_S = 0.002


class DumpStages:
    """Answers CRIU at the stages of a dump.

    quiet: a pre-dump, which has no phases; outlook: what was foreseen.
    """

    def __init__(
        self,
        request: CheckpointRequest,
        journal: Journal,
        container: Container,
        freezer: cgroups.Freezer | None,
        *,
        quiet: bool,
        outlook: Outlook,
    ) -> None:
        self._request = request
        self._journal = journal
        self._pid = container.pid
        self._freezer = freezer
        theirs = Path(f"/proc/{container.pid}/ns/net")
        self._netns_path = None if theirs.readlink() == Path("/proc/self/ns/net").readlink() else theirs
        self._on_phase = None if quiet else request.on_phase
        self._outlook = outlook
        self._told = False
        self.frozen_since = 0.0  # on the monotonic clock; 0 if it was not us who froze
        self.sizes: dict[str, int] = {}

    def stage(self, stage: Stage) -> None:
        """CRIU waits at a stage."""
        if stage.action == "pre-dump":
            self._freeze()
        elif stage.action == "network-lock":
            self._frozen()
        elif stage.action == "post-dump":
            self._frozen()
            # If CRIU dies while it waits here its tasks must not run: their image may, elsewhere.
            if self._journal.verdict_path and self._freezer and not self._freezer.freeze(timeout_s=_FREEZE_S):
                raise DumpFailed(
                    f"could not checkpoint container '{self._request.container_id}': it could not be frozen "
                    f"within {_FREEZE_S:g} s for as long as its verdict is open; try again"
                )
            self._dumped()

    def _freeze(self) -> None:
        """Freeze before CRIU does, which looks again only every 100 ms. If this fails, it does it itself."""
        if self._freezer is None:
            return
        if not self._journal.was_frozen:
            since = time.monotonic()
            while True:
                if not self._freezer.freeze(timeout_s=_FREEZE_S):
                    self._freezer.thaw()
                    return
                if time.monotonic() > since + _FREEZE_S or not self._any_in_vfork():
                    break
                # CRIU cannot seize a task that waits for a vforked child: try a moment later.
                self._freezer.thaw()
                time.sleep(_VFORK_S)
            self.frozen_since = since
        if self._netns_path is None:
            # In the host's network namespace CRIU has no later stage before it copies. It seizes the tasks
            # before it thaws them, so they do not run in between.
            self._frozen()

    def _any_in_vfork(self) -> bool:
        return any(cgroups.in_vfork(pid) for pid in cgroups.tasks(self._journal.groups))

    def criu_ended(self) -> bool:
        """CRIU is gone; whether it went well. If it was killed, its tasks run, with sockets in repair mode.

        So freeze them. A dump that went well left them as they were before, frozen by us: then this changes
        nothing.
        """
        if self._freezer:
            self._freezer.freeze(timeout_s=_FREEZE_S)
        well = calls.went_well(self._journal.work_path / "dump.log")
        if not well:
            extras.mend_terminals(self._outlook.terminals)
        return well

    def _frozen(self) -> None:
        if self._on_phase and not self._told:
            self._told = True
            self._on_phase("frozen", PhaseInfo(pid=self._pid, netns_path=self._netns_path, lock_table=None))

    def _dumped(self) -> None:
        extras.note(self._request.image_path, self._pid, self._journal.groups, self._outlook.timers)
        # Now: whoever is told that the image is complete may move it to its place.
        self.sizes = sizes_of(self._request.image_path)
        if self._on_phase:
            table = wire.lock_table(self._request.image_path) if self._netns_path else None
            info = PhaseInfo(pid=self._pid, netns_path=self._netns_path, lock_table=table)
            self._on_phase("dumped", info)
        if self._journal.verdict_path and self._journal.verdict() != "commit":
            raise InvalidRequest(
                f"could not checkpoint container '{self._request.container_id}': its verdict in "
                f"{self._journal.verdict_path} is not commit; write that before the callback returns"
            )
        if not self._request.leave_running:
            # From here on CRIU may kill the source: then the image is all there is, and must stay.
            self._journal.release_network = self._request.release_network
            self._journal.tasks = cgroups.tasks(self._journal.groups)
            self._journal.committed = True
            _note(self._journal)


class RestoreStages:
    """Answers CRIU at the stages of a restore.

    bundle: of the new container. noted: what the image has beside CRIU's own.
    """

    def __init__(
        self, request: RestoreRequest, journal: Journal, bundle: Bundle, noted: extras.Extras | None
    ) -> None:
        self._request = request
        self._bundle = bundle
        self._noted = noted
        self._journal = journal

    def stage(self, stage: Stage) -> None:
        """CRIU waits at a stage. At `pre-restore` it has no child yet but is in the container's cgroups."""
        if stage.action == "pre-restore":
            # Whoever undoes this may be in other cgroups than we are: what is ours too is left out now. runc
            # joins no hierarchy that it does not know, and there CRIU is in our own.
            self._journal.groups = cgroups.strictly_own(cgroups.of_process(stage.script_pid))
            _note(self._journal)
        elif stage.action == "setup-namespaces" and not self._journal.netns:
            theirs = Path(f"/proc/{stage.init_pid}/ns/net")
            if theirs.readlink() != Path("/proc/self/ns/net").readlink():
                self._settle(theirs)
        elif stage.action == "post-restore":
            self._show_cgroups(stage.init_pid)
            self._put_right(stage.init_pid)
            self._restored(stage)

    def _show_cgroups(self, init: int) -> None:
        try:
            places, apart = self._bundle.cgroup_views, self._bundle.cgroup_apart
            views.mend(tree.of(init), places, self._journal.groups, apart=apart)
        except OSError as error:
            raise RestoreFailed(
                f"could not restore container '{self._request.container_id}': its control groups cannot be "
                f"shown to it: {error.filename}: {error.strerror}; take the checkpoint of a container "
                "without a mount on /sys/fs/cgroup",
                after="stopped",
            ) from error

    def _put_right(self, init: int) -> None:
        try:
            if self._noted:
                extras.apply(self._noted, init, self._journal.groups)
        except OSError as error:
            raise RestoreFailed(
                f"could not restore container '{self._request.container_id}': what {extras.NAME} of its "
                f"image notes cannot be put right: {error}; look at the limits of its control group, or dump "
                "again",
                after="stopped",
            ) from error

    def _settle(self, netns_path: Path) -> None:
        raise_loopback(netns_path)
        try:
            set_sysctls(netns_path, self._bundle.sysctls)
        except OSError as error:
            raise InvalidRequest(
                f"could not restore container '{self._request.container_id}': {error.filename} of its new "
                f"network namespace cannot be set as the spec says: {error.strerror}; correct that sysctl",
                after="stopped",
            ) from error

    def _restored(self, stage: Stage) -> None:
        if self._request.on_phase:
            netns = Path(self._journal.netns or f"/proc/{stage.init_pid}/ns/net")
            info = PhaseInfo(
                pid=stage.init_pid, netns_path=netns, lock_table=wire.lock_table(self._request.image_path)
            )
            self._request.on_phase("restored", info)

    def criu_ended(self) -> bool:
        """CRIU is gone; whether it went well. If it was killed, it left held tasks running: freeze them."""
        freezer = cgroups.freezer(cgroups.strictly_own(self._journal.groups))
        if self._request.held and freezer:
            freezer.freeze(timeout_s=_FREEZE_S)
        return calls.went_well(self._journal.work_path / "restore.log")


def _note(journal: Journal) -> None:
    """Write down what was learnt. Raises EngineTimeout if the guardian has undone the call meanwhile."""
    if not journal.update():
        raise EngineTimeout(
            f"could not {journal.operation} container '{journal.container_id}': the deadline passed long "
            "ago, and the call was undone; give it more time"
        )


def sizes_of(image_path: Path) -> dict[str, int]:
    """File names and sizes (bytes) of an image."""
    return {entry.name: entry.stat().st_size for entry in image_path.iterdir()}
