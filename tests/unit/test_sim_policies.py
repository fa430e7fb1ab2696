"""Policies by name: each does what it says, any can be pickled, and others' packages are found."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.errors import SimError
from sim.maths import theory
from sim.policies import registry
from sim.policies.base import (
    Action,
    Checkpoint,
    Event,
    KeepReplica,
    Level,
    Migrate,
    Preempt,
    Recompute,
    Requeue,
    RestoreCache,
    SaveFromReplica,
    Service,
    SetInterval,
    SetLevels,
    SetMode,
    Start,
    State,
    Stop,
    UseSpare,
)  # fmt: skip

CHECKOUT = Path(__file__).resolve().parents[2]

LEVELS = (Level("local", 10.0, 1 / 7200), Level("remote", 120.0, 1 / 72000))
KNOWN = State(
    work_s=1e6, stall_s=30.0, async_stall_s=5.0, persist_s=120.0, increment=0.1, mtbf_s=11_135.08,
    restart_s=300.0, migrate_s=20.0, levels=LEVELS, spares=2, replica_s=2.0, step_s=8.0, cache_restore_s=2e-5,
    cache_compute_s=1e-4,
)  # fmt: skip
REQUIRED: dict[str, dict[str, Any]] = {
    "periodic": {"interval": 600},
    "adaptive": {"guess_stall": 30, "guess_mtbf": 3600},
    "predicted": {"recall": 0.85},
}
NOTICE = Event("notice", cause="maintenance", lead_s=120.0)
SPOT = Event("notice", cause="spot", lead_s=120.0)
PREDICTION = Event("prediction", lead_s=120.0)
DALY = SetInterval(theory.daly_higher(30.0, 11_135.08))


def made(name: str, **options: Any) -> Any:
    return registry.make(name, {**REQUIRED.get(name, {}), **options})


def test_every_policy_that_studies_compare_is_there() -> None:
    names = registry.names()
    assert names[0] == "none" and len(names) == len(set(names)) >= 31
    for name in names:
        described = registry.describe(name)
        assert described.summary.endswith("."), name
        assert described.work, name
        assert made(name).name == name
        assert {parameter.name for parameter in described.parameters if parameter.required} == set(
            REQUIRED.get(name, {})
        )


@pytest.mark.parametrize("name", registry.names())
def test_a_policy_can_be_sent_to_another_machine(name: str) -> None:
    policy = made(name)
    actions = policy.on_event(KNOWN, Event("start"))
    copy = pickle.loads(pickle.dumps(policy))  # our own
    assert type(copy) is type(policy)
    assert copy.on_event(KNOWN, Event("start")) == actions


def test_policies_load_without_numpy_and_simpy() -> None:
    code = (
        "import sys; sys.modules.update(numpy=None, simpy=None)\n"
        "from sim.policies import registry\n"
        "print(len([registry.describe(name) for name in registry.names()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 31


@pytest.mark.parametrize(
    ("name", "options", "event", "wanted"),
    [
        ("none", {}, Event("start"), [SetInterval(None)]),
        ("periodic", {}, Event("start"), [SetInterval(600.0)]),
        ("asynchronous", {}, Event("start"), [
            SetMode(asynchronous=True), SetInterval(theory.exact_interval(5.0, 11_135.08))]),
        ("asynchronous", {"interval": 160}, Event("start"), [SetMode(asynchronous=True), SetInterval(160.0)]),
        # One is written at a time, and each takes 120 s.
        ("asynchronous", {"interval": 60}, Event("start"), [SetMode(asynchronous=True), SetInterval(120.0)]),
        ("incremental", {"full_every": 10}, Event("start"), [
            SetMode(full_every=10), SetInterval(theory.exact_interval(30.0 * 0.19, 11_135.08))]),
        ("multilevel", {}, Event("start"), [
            SetLevels((("local", 1), ("remote", 11))), SetInterval(theory.young(10.0, 7200.0))]),
        ("multilevel", {"interval": 300, "remote_every": 4}, Event("start"), [
            SetLevels((("local", 1), ("remote", 4))), SetInterval(300.0)]),
        ("in-memory", {"interval": 60, "remote": 3600}, Event("start"), [
            KeepReplica(2), SetLevels((("memory", 1), ("remote", 60))), SetInterval(60.0)]),
        ("event", {}, Event("start"), [DALY]),
        ("event", {"interval": 900}, Event("start"), [SetInterval(900.0)]),
        ("event", {"base": "none"}, Event("start"), [SetInterval(None)]),
        ("event", {"base": {"name": "periodic", "interval": 5}}, Event("start"), [SetInterval(5.0)]),
        ("event", {}, NOTICE, [Checkpoint(delay_s=86.0)]),
        ("event", {"on": ["spot"]}, NOTICE, []),
        ("event", {"on": ["spot"]}, SPOT, [Checkpoint(delay_s=86.0)]),
        ("event", {"on": ["prediction"]}, PREDICTION, [Checkpoint(delay_s=86.0)]),
        ("event", {}, Event("notice", cause="spot", lead_s=30.5), [Checkpoint(delay_s=0.0)]),
        ("event", {}, Event("notice", cause="spot", lead_s=29.0), []),
        ("predicted", {}, PREDICTION, [Checkpoint(delay_s=86.0)]),
        ("predicted", {}, Event("start"), [
            SetInterval(theory.prediction_period(30.0, 11_135.08, 0.85) - 30.0)]),
        ("just-in-time", {}, Event("start"), [SetInterval(None)]),
        ("just-in-time", {}, Event("failure", replica=True), [SaveFromReplica()]),
        ("just-in-time", {}, Event("failure"), []),
        ("hot-spares", {}, Event("failure"), [UseSpare()]),
        ("migrate", {}, NOTICE, [Migrate()]),
        ("migrate", {}, Event("notice", cause="maintenance", lead_s=10.0), []),
        ("requeue", {}, NOTICE, [Checkpoint(delay_s=86.0), Requeue()]),
        ("requeue", {}, Event("failure"), [Requeue()]),
        ("preemption", {}, Event("preempt"), [Preempt("checkpoint")]),
        ("preemption", {"how": "kill"}, Event("preempt"), [Preempt("kill")]),
        ("kv-restore", {}, Event("resume", tokens=100), [RestoreCache()]),
        ("kv-recompute", {}, Event("resume", tokens=100), [Recompute()]),
        ("kv-cheaper", {}, Event("resume", tokens=100), [RestoreCache()]),
        ("kv-cheaper", {"overhead": 1}, Event("resume", tokens=100), [Recompute()]),
        ("kv-cheaper", {"overhead": 1}, Event("resume", tokens=100_000), [RestoreCache(1.0)]),
        ("warm-start", {"idle": 60}, Event("idle"), []),
    ],
)  # fmt: skip
def test_what_a_policy_does(name: str, options: dict[str, Any], event: Event, wanted: list[Action]) -> None:
    actions = made(name, **options).on_event(KNOWN, event)
    assert len(actions) == len(wanted)
    for action, other in zip(actions, wanted, strict=True):
        if isinstance(action, SetInterval) and isinstance(other, SetInterval) and other.work_s:
            assert action.work_s == pytest.approx(other.work_s, rel=1e-12)
        else:
            assert action == other


def test_a_service_grows_with_what_waits_and_keeps_its_least() -> None:
    service = Service(running=1, starting=1, waiting=17, least=1, most=4, warm_s=10.0, cold_s=200.0)
    state = State(service=service)
    assert made("warm-start").on_event(state, Event("arrival")) == [Start("warm", 2)]
    assert made("cold-start").on_event(state, Event("arrival")) == [Start("cold", 2)]
    assert made("warm-start", per_replica=17).on_event(state, Event("arrival")) == []
    assert made("warm-start", idle=60).on_event(state, Event("idle")) == [Stop(60.0)]
    service.warm_s = None
    assert made("warm-start").on_event(state, Event("arrival")) == [Start("cold", 2)]
    service.running, service.starting, service.waiting = 0, 0, 0
    assert made("cold-start").on_event(state, Event("failure")) == [Start("cold", 1)]
    service.most = 0
    assert made("cold-start").on_event(state, Event("failure")) == []


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("periodik", {}, "policy 'periodik': there is none of that name; did you mean 'periodic'?"),
        ("qqq", {}, "there is none of that name; there are none, periodic"),
        ("periodic", {}, "could not make policy 'periodic': it needs 'interval'; give it"),
        ("periodic", {"intervl": 3}, "it has no option 'intervl'; did you mean 'interval'?"),
        ("none", {"interval": 3}, "it has no option 'interval'; it has none"),
        ("periodic", {"interval": "5m"}, "interval is '5m'; it must be a number of seconds"),
        ("periodic", {"interval": True}, "interval is True; it must be a number of seconds"),
        ("periodic", {"interval": -1}, "interval is -1.0 s; it must be above 0"),
        ("incremental", {"full_every": 2.5}, "full_every is 2.5; it must be a whole number"),
        ("incremental", {"full_every": 0}, "full_every is 0; it must be above 0"),
        ("in-memory", {"copies": 1}, "copies is 1; it must be 2 or more"),
        ("multilevel", {"interval": 0}, "interval is 0; it must be above 0"),
        ("event", {"on": ["maintenence"]}, "on is ['maintenence']; it must be a list of maintenance, spot"),
        ("event", {"base": 3}, "base is 3; it must be the name of a policy, or its name and options"),
        ("event", {"base": "daly", "interval": 3}, "it has both a base and an interval; give one of them"),
        ("event", {"base": {"name": "periodic"}}, "could not make policy 'periodic': it needs 'interval'"),
        ("preemption", {"how": "shoot"}, "how is 'shoot'; it must be kill or checkpoint or none"),
        ("predicted", {"recall": 1}, "recall is 1; it must be 0 or more and below 1"),
        ("up-availability", {"probe": 0}, "probe is 0; it must be above 0"),
        ("warm-start", {"idle": 0}, "idle is 0; it must be above 0"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_is_one_sentence(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SimError) as error:
        registry.make(name, options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("daly", "could not use policy 'daly': the cost of a checkpoint is not known; give a study storage"),
        ("asynchronous", "that is written later is not known; give a study costs.async_stall"),
        ("incremental", "the cost of a checkpoint is not known"),
        ("multilevel", "no level heals a failure; give storage and failures"),
        ("in-memory", "the stall of a copy into another machine's memory is not known"),
        ("predicted", "the cost of a checkpoint is not known"),
    ],
)
def test_a_policy_says_what_it_has_not_been_told(name: str, said: str) -> None:
    with pytest.raises(SimError) as error:
        made(name).on_event(State(), Event("start"))
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["up-failover", "up-availability", "skynomad"])
def test_a_policy_over_regions_needs_some(name: str) -> None:
    with pytest.raises(SimError, match="it needs regions to choose from; give some"):
        made(name).on_event(State(tick_s=600.0, deadline_s=1e6), Event("tick"))


def test_times_are_read_with_their_units() -> None:
    assert registry.make("periodic", {"interval": "15m"}, lambda text: 60.0 * float(text[:-1])).on_event(
        KNOWN, Event("start")
    ) == [SetInterval(900.0)]
    assert registry.make("multilevel", {"interval": "auto"}).on_event(KNOWN, Event("start"))


def test_a_policy_is_made_from_what_was_recommended(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"policy": {"name": "periodic", "options": {"interval_s": 797.5}}}))
    policy = registry.from_policy_json(file)
    assert policy.on_event(State(), Event("start")) == [SetInterval(797.5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[]", "it names no policy"),
        ('{"policy": {}}', "it names no policy"),
        ('{"policy": {"name": "nothing"}}', "could not make policy 'nothing'"),
    ],
)
def test_a_recommendation_that_is_none_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    with pytest.raises(SimError) as error:
        registry.from_policy_json(file)
    assert said in str(error.value)
    with pytest.raises(SimError, match=r"could not read policy file .*; check the path"):
        registry.from_policy_json(tmp_path / "none.json")


def example() -> str:
    """The policy that the documentation teaches."""
    text = (CHECKOUT / "docs/policies.md").read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with a policy in it, and one that does not load."""
    (tmp_path / "halves.py").write_text(example())
    info = tmp_path / "halves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: halves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torpor.policies]\nhalves = halves:Halves\nbroken = halves:Nothing\ndaly = halves:Halves\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "halves", raising=False)
    return tmp_path


@pytest.mark.usefixtures("others")
def test_a_policy_of_somebody_else_is_used_by_its_name() -> None:
    assert {"halves", "broken"} < set(registry.names())
    described = registry.describe("halves")
    assert [parameter.name for parameter in described.parameters] == ["interval", "share"]
    assert described.work == ()
    policy = registry.make("halves", {"interval": 1000})
    assert policy.on_event(State(), Event("start")) == [SetInterval(1000.0)]
    assert policy.on_event(State(), Event("failure")) == [SetInterval(500.0)]
    assert policy.on_event(State(), Event("restart")) == []


@pytest.mark.usefixtures("others")
def test_a_policy_of_somebody_else_takes_no_name_of_ours_and_fails_in_a_sentence() -> None:
    assert registry.make("daly").on_event(KNOWN, Event("start")) == [DALY]
    assert registry.names().count("daly") == 1
    with pytest.raises(SimError, match=r"halves:Nothing does not load .*; repair or remove its package"):
        registry.make("broken")
