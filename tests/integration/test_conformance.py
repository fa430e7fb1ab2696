"""Every workload through CRIU and gVisor: what cannot work is refused beforehand, everything else comes back.

One round trip for each workload; every course, and the heavy ones, under TORPOR_SOAK=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.conformance import COURSES, Outcome, Plan, Result, run, run_course
from engines.workloads.catalogue import WORKLOADS, Workload, find
from shim.cli.conformance import cache_path
from shim.conformance import report
from shim.conformance.dialect import of_engine
from shim.conformance.place import RuntimePlace
from shim.toolchain.find import find_tools
from tests.support import soak
from tests.support.containers import CHECKOUT, PREFIX, mounts_under

# What CRIU cannot do by nature, or not on every node. Everything else must come back.
REFUSED = {
    *("packet-pipe", "mqueue", "event-semaphore", "mounts-overlay", "namespace-net", "namespace-uts"),
    *("namespace-ipc", "namespace-pid", "namespace-user", "namespace-time", "namespace-cgroup", "io-uring"),
    *("userfaultfd", "secret-memory", "perf-event", "vsock", "mptcp", "ping", "tun", "outside-socket"),
    *("outside-file", "host-ipc", "traced"),
}
REFUSED_BY_GVISOR = {"tun", "volume-deleted"}
DEPENDS = {
    "user": "needs CAP_SYS_RESOURCE",
    "stopped": "works with cgroup v2",
}


def maker(engine: str = "criu") -> Callable[[], RuntimePlace]:
    tools = find_tools(PREFIX)
    dialect = of_engine(engine, tools)
    return lambda: RuntimePlace(engine, dialect, tools, cache_path())


def wanted(workload: Workload) -> set[Result]:
    if workload.name in DEPENDS:
        return {"pass", "refused"}
    return {"refused"} if workload.name in REFUSED else {"pass"}


@pytest.mark.engine
@pytest.mark.parametrize(
    "workload", [w for w in WORKLOADS if not w.heavy], ids=lambda workload: workload.name
)
def test_round_trip(workload: Workload):
    outcome = run_course(maker(), workload, "round-trip")
    if outcome.result == "absent":
        pytest.skip(f"this node cannot supply it: {outcome.reason}")
    assert outcome.result in wanted(workload), outcome.reason
    if outcome.result == "refused":
        assert "; " in outcome.reason, "a refusal says what to do"


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.skipif(
    not soak.SOAK, reason="the whole product, with the heavy workloads, takes minutes: TORPOR_SOAK=1"
)
@pytest.mark.parametrize("course", COURSES)
def test_every_course(request: pytest.FixtureRequest, course: str):
    outcomes = [run_course(maker(), workload, course) for workload in WORKLOADS]
    assert not [outcome for outcome in outcomes if outcome.result == "fail"]
    soak.tell_workloads(request, "criu", [outcome.result for outcome in outcomes])


@pytest.mark.engine
def test_a_place_leaves_nothing():
    place = maker()()
    workload = find("family")
    assert workload
    with place:
        container_id = place.begin(workload)
        assert place.pid(container_id)
        where = str(place.image_root.parent)
        assert mounts_under(where)
    assert not mounts_under(where)
    assert not Path(where).exists()


@pytest.mark.engine
def test_the_command_tells_people_and_machines(tmp_path: Path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"schema": 1, "skip": {"tcp": "this host has no loopback device"}}))
    words = ["--workload", "counter", "--workload", "mqueue", "--workload", "tcp", "--course", "round-trip"]
    words += ["--profile", str(profile), "--report", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "shim.cli.main", "conformance", "--engine", "criu", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, "TORPOR_PREFIX": str(PREFIX)},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    results = {name: entry["result"] for name, entry in document["workloads"].items()}
    assert results == {"counter": "pass", "mqueue": "refused", "tcp": "skipped"}
    assert document == json.loads((tmp_path / "conformance.json").read_text())
    page = (tmp_path / "conformance.html").read_text()
    assert "message queue" in page
    assert "http" not in page.replace("conformance.html", ""), "the page needs nothing from elsewhere"


@pytest.mark.engine
def test_an_engine_that_cannot_work_here_says_so_instead_of_failing_everywhere(tmp_path: Path):
    broken = tmp_path / "bin" / "runsc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no sandbox today >&2; exit 1\n")
    broken.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "shim.cli.main", "conformance", "--engine", "gvisor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, "TORPOR_PREFIX": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "could not try engine 'gvisor': runsc does not run a sandbox: no sandbox today; " in done.stderr


@pytest.mark.engine
@pytest.mark.soak
def test_gvisor_keeps_what_its_sandbox_has(request: pytest.FixtureRequest):
    words = ["--engine", "gvisor", "--json"]
    if not soak.SOAK:  # every second one: a sandbox takes a second to start, and all of them a minute
        words += ["--course", "round-trip", "--no-contract"]
        words += [f"--workload={one.name}" for one in [one for one in WORKLOADS if not one.heavy][::2]]
    done = subprocess.run(
        [sys.executable, "-m", "shim.cli.main", "conformance", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env={**os.environ, "TORPOR_PREFIX": str(PREFIX)},
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    failed = [entry for entry in document["outcomes"] if entry["result"] == "fail"]
    assert done.returncode == (1 if failed else 0), done.stderr
    for entry in failed:
        # This runsc may bring closed descriptors back to what polls, of which the checkpoint warns.
        assert entry["subject"] in {"nginx", "node"}, entry
        again = run_course(maker("gvisor"), find(entry["subject"]) or WORKLOADS[0], entry["course"])
        assert (again.subject, again.result) == (entry["subject"], "pass"), (entry, again.reason)
    refused = {name for name, entry in document["workloads"].items() if entry["result"] == "refused"}
    assert refused <= REFUSED_BY_GVISOR
    assert document["share"]["percent"] >= 80
    results = [entry["result"] for entry in document["outcomes"] if entry["subject"] != "contract"]
    soak.tell_workloads(request, "gvisor", results)


def test_a_failure_is_the_verdict_and_is_escaped(tmp_path: Path):
    outcomes = [
        Outcome(subject="counter", course="round-trip", result="pass"),
        Outcome(subject="counter", course="twice", result="fail", reason="<b>lost</b>"),
        Outcome(subject="redis", course="round-trip", result="absent", reason="no redis"),
    ]
    content = report.document("criu", {"torpor": "1"}, outcomes, 1.0)
    assert content["workloads"]["counter"] == {"result": "fail", "reason": "twice: <b>lost</b>"}
    assert content["share"] == {"passed": 0, "of": 1, "percent": 0.0}
    _, page = report.write(tmp_path, content, outcomes)
    assert "&lt;b&gt;lost" in page.read_text()


def test_what_a_profile_skips_is_not_run():
    counter = find("counter")
    assert counter

    def never() -> RuntimePlace:
        raise AssertionError("a container was made")

    plan = Plan(workloads=[counter], contract=False, skip={"counter": "not here"})
    outcomes = list(run(never, plan))
    assert len(outcomes) == plan.size() == len(COURSES)
    assert {(outcome.result, outcome.reason) for outcome in outcomes} == {("skipped", "not here")}
