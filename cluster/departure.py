"""The source's half of a migration, which is also where it is decided.

The container is dumped and kept frozen by its engine while its image travels and is restored on the target.
Then the verdict is written, durably, and only after that anybody is let go. Whoever dies before leaves a
source that runs on, or one that stays frozen until the target can be asked again; nobody ever runs twice.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from cluster import away, cargo, limits, settle, wiring
from cluster.arrival import TRANSLATIONS
from cluster.beforehand import Beforehand
from cluster.channel import Channel, Lost, Refused
from cluster.company import company
from cluster.here import NEEDED, Here
from cluster.messages import Abort, Answer, Commit, Expect, Prepare, Question, Reserve
from cluster.records import OVER, VERDICT, VIA, WISH, Arrival, Departure, Record, begin_departure, new_name
from cluster.transport import check_date, connect
from engines.api import EngineError, Phase, PhaseInfo, printable
from netmig import identity as identities
from netmig.conntrack import Translations
from shim import bundle, pod, prospects, timing
from shim.checkpoint import Source, Wanted, choose_engine, take
from shim.cli.node import Found
from shim.errors import ShimError
from shim.images import layout
from shim.images.layout import Reference, check_name
from shim.images.manifest import FileDigest, Manifest

_AGAIN_S = 0.3
_FOLLOW_S = 10.0


@dataclass(kw_only=True)
class Report:
    """What a migration did. phases_ms: prepare, pre-dump, dump, transfer, restore, switch, release;
    downtime_ms: from the freeze until the target said that the container runs. image_bytes: of the whole
    image; frozen_bytes: what of it was sent while nobody ran.
    """

    migration: str
    container_id: str
    source: str
    target: str
    trial: bool = False
    phases_ms: dict[str, float] = field(default_factory=dict[str, float])
    downtime_ms: float = 0.0
    image_bytes: int = 0
    frozen_bytes: int = 0
    warnings: list[str] = field(default_factory=list[str])


class InDoubt(ShimError):
    """The source is frozen and may not decide alone."""


Tell = Callable[[str], None]


def migrate(here: Here, found: Found, peer: str, *, name: str = "", trial: bool, tell: Tell) -> Report:
    """Move a running container to another node.

    name: of the image that the pod names which its caller makes there, "" for a container that has no caller.
    trial: only ask whether that would do. tell: called with what goes on, in words.
    Raises ShimError, EngineError, NetworkError; then the container runs on here, unless the message says that
    the migration is in doubt.
    """
    container_id = found.state.container_id
    words = f"could not migrate container '{container_id}' to '{peer}'"
    leaving = _Leaving(here, found, peer, name, words, tell)
    try:
        return leaving.run(trial=trial)
    except Refused as error:
        raise ShimError(f"{words}: node '{peer}' says: {error}") from error
    except Lost as error:
        check_date(here.config)
        raise ShimError(f"{words}: {error}; is its agent running?") from error
    except OSError as error:
        raise ShimError(f"{words}: {settle.told(error)}") from error


class _Leaving:
    def __init__(self, here: Here, found: Found, peer: str, name: str, words: str, tell: Tell) -> None:
        self.here, self.found, self.peer, self.words, self.tell = here, found, peer, words, tell
        self.name = name
        self.node = found.node
        self.container_id = found.state.container_id
        self.record = Record(here.config.departures, new_name())
        self._image_path = self.record.path / "image"
        self.report = Report(
            migration=self.record.migration,
            container_id=self.container_id,
            source=here.config.node,
            target=peer,
        )
        directory = self.node.directory(found.root, self.container_id)
        self.source = Source(
            container_id=self.container_id,
            root=found.root,
            directory=directory,
            bundle_path=found.state.bundle_path,
            settings=here.settings("criu", found.root, directory),
        )
        self.channel: Channel | None = None
        self.frozen_at = self.dumped_at = self.deadline = 0.0
        self._beside = ThreadPoolExecutor(2, thread_name_prefix="beside")
        self._dumped = threading.Event()
        self._memory: Future[dict[str, FileDigest]] | None = None
        self._before = Beforehand(here, found, self.source, self.record)
        self._translations: Future[tuple[Translations, tuple[str, ...]]] | None = None
        self._leads = False  # whether the other node sees, and translates, what it will send

    def run(self, *, trial: bool) -> Report:
        """All of it."""
        self.report.trial = trial
        with self._timed("prepare"):
            plan, spec_data = self._plan()
        with self.record.begun():
            try:
                with self._said():
                    begin_departure(self.record, plan)
                with self._timed("prepare"):
                    self._prepare(plan, spec_data, trial=trial)
                if not trial:
                    self._copy_beforehand(plan.engine)
                    self._move()
            except BaseException as error:
                if not (isinstance(error, Exception) and self.record.read(VERDICT) == "commit"):
                    self._fail(error)
                    raise
            if trial:
                self._call_off()
                return self.report
            self._follow()
        return self.report

    # --- before the freeze -----------------------------------------------------------------------------

    def _plan(self) -> tuple[Departure, bytes]:
        """Look at the container. Raises ShimError for one that cannot be migrated."""
        if self.peer == self.here.config.node:
            raise ShimError(f"{self.words}: that is this node; name another one with --to")
        status = self.found.state.status
        if status != "running":
            raise ShimError(f"{self.words}: it is {status}; only a running container migrates")
        spec = bundle.read_spec(self.source.bundle_path)
        self.report.warnings += cargo.left_behind(self.source.bundle_path, spec, changed=bool(self.name))
        spec_data = limits.as_it_is(self.source.bundle_path, self.found.root, self.container_id)
        who = pod.identify(spec.get("annotations") or {})
        self._check_caller(who)
        if spec.get("process", {}).get("terminal"):
            raise ShimError(
                f"{self.words}: it has a terminal, whose other end stays here; run it without one"
            )
        netns = bundle.namespace_path(spec, "network")
        if netns is None:
            raise ShimError(
                f"{self.words}: its network namespace has no path of its own; give it one that CNI has filled"
            )
        if netns.exists() and netns.samefile("/proc/self/ns/net"):
            raise ShimError(
                f"{self.words}: it has the node's own network, which stays; give it a network namespace of "
                "its own that CNI has filled"
            )
        if others := company(self.found.root, self.container_id, netns):
            raise ShimError(
                f"{self.words}: {', '.join(others)} would stay here without the network that it shares; end "
                "those first, a pod of several containers does not migrate"
            )
        engine = choose_engine(self.source, self.node.config, spec, None)
        if lacking := sorted(NEEDED - engine.capabilities):
            raise ShimError(f"{self.words}: engine {engine.name} lacks {', '.join(lacking)}; use criu")
        identity = wiring.identity_of(netns)
        came = self._came()
        if came is not None and came.away:
            identity = wiring.bridged(identity, identities.decode(came.identity))
        self.report.warnings += (*identity.warnings, *wiring.translations(identity)[1])
        if came is None or not came.away:
            self.here.config.check_leases()
            self.report.warnings += self.here.config.unprotected
        leased_to = came.owner if came is not None else ""  # not that which keeps them while it is away
        owners = [self.here.config.reserver().owner(one.ip) for one in identities.global_addresses(identity)]
        return Departure(
            migration=self.record.migration,
            container_id=self.container_id,
            root=self.found.root,
            directory=str(self.source.directory),
            bundle=str(self.source.bundle_path),
            peer=self.peer,
            engine=engine.name,
            netns=str(netns),
            identity=identities.encode(identity),
            owner=leased_to or next((one.container_id for one in owners if one), self.container_id),
            routed=bool(self.here.config.via),
            returning=came is not None and came.away,
            guest=str(Reference(namespace=who.namespace, name=check_name(self.name))) if self.name else "",
        ), spec_data

    def _came(self) -> Arrival | None:
        """How the container came here, if it did. Raises ShimError if it may not go on from here."""
        home, arrivals = self.source.bundle_path.parent, self.here.config.arrivals
        if home.parent != arrivals or not (record := Record(arrivals, home.name)).exists():
            return None
        came = record.plan(Arrival)
        if came.away and came.peer != self.peer:
            raise ShimError(
                f"{self.words}: it is away from its home, which alone sends on what comes for it; migrate it "
                f"to '{came.peer}' first"
            )
        return came

    def _check_caller(self, who: pod.Pod) -> None:
        """Raises ShimError for a container whose caller would not know what has become of it."""
        if who.caller not in {"", "containerd"} or who.sandbox:
            raise ShimError(
                f"{self.words}: {who.caller} made it and would not know it on another node; checkpoint it, "
                "move the image, and have a new one made there with the annotation torpor.dev/restore-from"
            )
        if who.caller and not self.name:
            raise ShimError(
                f"{self.words}: it is part of a pod, which its caller there makes on the other node; name "
                "with --as what that pod names with the annotation torpor.dev/restore-from"
            )
        if who.caller and self.here.config.via:
            raise ShimError(
                f"{self.words}: its node's pod network is routed, and a pod that its caller makes elsewhere "
                "has an address of that node's network; checkpoint it, move the image, and have a new one "
                "made there with the annotation torpor.dev/restore-from"
            )
        if self.name and not who.caller:
            raise ShimError(f"{self.words}: it is part of no pod; leave --as out")

    def _prepare(self, plan: Departure, spec_data: bytes, *, trial: bool) -> None:
        """Let the target make room, and send it what does not change any more."""
        self.tell(f"asking node '{self.peer}'")
        memory_bytes = self._before.measure()
        with self._said():
            self.here.check_room(memory_bytes)
        self.channel = connect(self.here.config, self.peer)
        answer = self.channel.ask(
            Reserve(
                migration=plan.migration,
                container_id=plan.container_id,
                engine=plan.engine,
                spec=spec_data,
                identity=plan.identity,
                owner=plan.owner,
                host=prospects.stable(self.node.config),
                memory_bytes=memory_bytes,
                trial=trial,
                guest=plan.guest,
                routed=plan.routed,
                returning=plan.returning,
                container_name=pod.identify(json.loads(spec_data).get("annotations") or {}).container_name,
            ),
            Answer,
        )
        self.report.warnings += map(printable, answer.warnings)
        self._check_via(plan, answer.via)
        self._leads = plan.routed or answer.leads
        if plan.guest and not trial:
            self.tell(
                f"waiting for its pod on node '{self.peer}', with the annotations torpor.dev/restore-from: "
                f"{self.name} and torpor.dev/network: keep"
            )
            self.channel.ask(Expect(), Answer)
        elif not trial:
            self.tell("sending the root file system")
            cargo.send_base(self.channel, cargo.root_of(self.source.bundle_path), self.record.path)
            self.channel.ask(Question(migration=plan.migration), Answer)  # or it would be refused when frozen

    def _check_via(self, plan: Departure, via: tuple[str, ...]) -> None:
        """On routed networks, note by what addresses the target is reached. Raises ShimError."""
        if not plan.routed or plan.returning:
            return
        if (wrong := away.no_way(via)) is not None:
            raise ShimError(
                f"{self.words}: node '{self.peer}' names {wrong!a} as an address of its own, which is no IP "
                "address; correct `via` in its agent.toml"
            )
        if family := away.missing(identities.decode(plan.identity), via):
            raise ShimError(
                f"{self.words}: it has an {family} address, and node '{self.peer}' names none of its own by "
                "which it is reached; add that to `via` in its agent.toml"
            )
        self.record.write(VIA, " ".join(via))

    def _copy_beforehand(self, engine: str) -> None:
        if self._before.can(engine):
            self.tell("copying the memory beforehand")
            with self._timed("pre-dump"):
                self.report.warnings += self._before.copy(self._channel(), engine)

    def _channel(self) -> Channel:
        if self.channel is None:
            raise Lost(f"could not reach node '{self.peer}'")
        return self.channel

    # --- frozen ----------------------------------------------------------------------------------------

    def _move(self) -> None:
        self.tell("freezing and dumping")
        plan = self.record.plan(Departure)
        with self._said():
            self.here.check_runs(plan.engine, plan.root, plan.container_id)
        view = cargo.root_of(self.source.bundle_path)
        self._image_path.mkdir(mode=0o700)
        wanted = Wanted(
            image_path=self._image_path / layout.CHECKPOINT,
            extras_path=self._image_path,
            leave_running=False,
            keep_tcp=True,
            rootfs="overlay" if view.kind == "overlay" else "full-copy",
            use="move",
            engine=plan.engine,
            on_phase=self._on_phase,
            verdict_path=self.record.path / VERDICT,
            parent_path=self._before.path,
        )
        self.deadline = time.monotonic() + self.node.config.checkpoint_timeout_s
        try:
            _, timings = take(self.source, self.node.config, wanted, self._decide)
        finally:
            self._dumped.set()
        timing.record(self.node.config.store_path, timings)

    def _on_phase(self, phase: Phase, info: PhaseInfo) -> None:
        del info
        now = time.monotonic()
        if phase == "frozen":
            self.frozen_at = now
            self._memory = self._beside.submit(
                cargo.send_memory, self._channel(), self._image_path, self._dumped, self._before.sent
            )
            identity = identities.decode(self.record.plan(Departure).identity)
            # A node with many connections takes a while to list some.
            self._translations = self._beside.submit(wiring.translations, identity)
        elif phase == "dumped":
            self.dumped_at = now
            self._before.put_under(self._image_path / layout.CHECKPOINT)
            self._dumped.set()
            self.report.phases_ms["dump"] = (now - self.frozen_at) * 1000
            self.tell("sending the memory")

    def _decide(self, manifest: Manifest) -> None:
        """The image is complete and the source frozen: send it, have it restored, and decide."""
        if self._memory is None or self._translations is None:
            raise ShimError(f"{self.words}: its engine did not tell when it was dumped; use criu")
        memory = self._memory.result()
        self.report.image_bytes = cargo.send_rest(self._channel(), self._image_path, manifest, memory)
        self.report.frozen_bytes = self.report.image_bytes - self._before.n_bytes
        self.report.phases_ms["transfer"] = (time.monotonic() - self.dumped_at) * 1000
        translations = self._translations.result()[0]
        if translations and self._leads:  # else this node may go on translating
            (self.record.path / TRANSLATIONS).write_bytes(msgspec.json.encode(translations))
        # From here on the target may be told to run by an operator who cannot ask us.
        self.record.write(VERDICT, "hold")
        if time.monotonic() > self.deadline:
            # The engine's guardian undoes a call that takes longer: it may have done so before it saw `hold`.
            self.record.write(VERDICT, "abort")
            raise ShimError(
                f"{self.words}: dumping and sending it took longer than checkpoint_timeout_s "
                f"({self.node.config.checkpoint_timeout_s:g} s); allow more in config.toml"
            )
        with self._timed("restore"):
            self._have_prepared(translations)
        with self._timed("switch"):
            self.record.write(VERDICT, "commit")
            plan = self.record.plan(Departure)
            wiring.unplug(identities.decode(plan.identity))
            # Before it runs: what its peers answer to its first words must not end here.
            settle.forget_translations(self.record)
            settle.lead_away(self.here, self.record, plan)
            with contextlib.suppress(Lost):  # it is decided, and will be followed
                self._channel().send(Commit(migration=self.record.migration))
        settle.switch(self.here, self.record, plan)  # the rest, beside what the target does

    def _have_prepared(self, translations: Translations) -> None:
        """Wait until the target holds the restored container; raises ShimError once it is called off."""
        self.tell("restoring there")
        try:
            self._channel().ask(Prepare(translations=translations), Answer)
        except Refused as error:
            self.record.write(VERDICT, "abort")
            raise ShimError(f"{self.words}: node '{self.peer}' says: {error}") from error
        except Lost:
            self._wait()

    def _wait(self) -> None:
        """The link is down and the source may not decide alone: until the target answers, or an operator
        does.
        """
        told = False
        while True:
            wish = self.record.read(WISH)
            if wish == "target":
                return
            standing = ""
            if wish != "source":
                with contextlib.suppress(Lost, Refused):
                    channel = connect(self.here.config, self.peer)
                    standing = channel.ask(Question(migration=self.record.migration), Answer).standing
                    self._channel().close()
                    self.channel = channel
            if standing in ("prepared", "running"):
                return
            if wish == "source" or standing == "unknown":
                self.record.write(VERDICT, "abort")
                why = "an operator decided for the source" if wish else f"node '{self.peer}' has lost it"
                raise ShimError(f"{self.words}: {why}; it runs on here")
            if not told:
                self.tell(
                    f"node '{self.peer}' cannot be reached: the container is frozen on both nodes until it "
                    f"can, or until `torpor migrate --resolve source|target {self.record.migration}`"
                )
                told = True
            time.sleep(_AGAIN_S)

    # --- afterwards ------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """It is decided: hear that it runs, and clean up."""
        answer: Answer | None = None
        with contextlib.suppress(Lost, Refused):
            answer = self._channel().answer(Answer)
            self.report.downtime_ms = (time.monotonic() - self.frozen_at) * 1000
        if self.channel is not None:
            self.channel.close()
        if answer is not None:
            self.report.phases_ms |= answer.times_ms
            self.report.warnings += map(printable, answer.warnings)
        self.tell("cleaning up")
        deadline = time.monotonic() + _FOLLOW_S
        while not self._settled():
            if time.monotonic() > deadline:
                raise InDoubt(
                    f"container '{self.container_id}' has left for node '{self.peer}', which does not say "
                    "that it runs; the agents settle it once they meet again (torpor migrate --list)"
                )
            time.sleep(_AGAIN_S)
        self.report.downtime_ms = self.report.downtime_ms or (time.monotonic() - self.frozen_at) * 1000

    def _settled(self) -> bool:
        """Whether nothing of it is left here, or nothing that would concern the container."""
        try:
            return settle.departure(self.here, self.record)
        except settle.Failures as error:
            if self.record.read(OVER) in ("", "lost"):
                raise
            self.report.warnings.append(
                f"something of it is left here, which the agent tries to remove again: {settle.told(error)}"
            )
            return True

    def _fail(self, error: BaseException) -> None:
        """Nothing of it is left here, if that is ours to decide; the channel's end tells the target."""
        verdict = self.record.read(VERDICT)
        if verdict == "hold" and self._call_off():
            self.record.write(VERDICT, "abort")
            with contextlib.suppress(EngineError):
                settle.resume(self.here, self.record.plan(Departure))
            self.record.remove()
            return
        if verdict == "hold":
            raise InDoubt(
                f"{self.words}: it is in doubt ({error}); it stays frozen here until node '{self.peer}' can "
                f"be asked, or until `torpor migrate --resolve source|target {self.record.migration}`"
            ) from error
        if verdict == "commit":
            raise InDoubt(
                f"container '{self.container_id}' is leaving for node '{self.peer}' ({error}); the agents "
                "bring that to its end"
            ) from error
        if self._call_off() or verdict != "abort":
            self.record.remove()

    def _call_off(self) -> bool:
        """Tell the target that nothing comes of it; whether it has heard."""
        heard = False
        if self.channel is not None:
            self._beside.shutdown()  # nobody may be using the channel when its number is given to another one
            self.channel.close()
            self.channel = None
            with contextlib.suppress(ShimError):
                abort = Abort(migration=self.record.migration, final=False)
                heard = settle.tell(self.here, self.peer, abort) == "unknown"
        if self.report.trial:
            self.record.remove()
        return heard

    @contextlib.contextmanager
    def _said(self) -> Generator[None]:
        """What stands against it in the body is said with what it stands against."""
        try:
            yield
        except ShimError as error:
            raise ShimError(f"{self.words}: {error}") from error

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            took_ms = (time.monotonic() - begun) * 1000
            self.report.phases_ms[phase] = self.report.phases_ms.get(phase, 0.0) + took_ms
