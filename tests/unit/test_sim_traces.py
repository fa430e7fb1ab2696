"""Loaders of traces: what they read, which way round, and what they refuse."""

from __future__ import annotations

import io
import json
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.errors import SimError
from sim.maths.laws import Weibull
from sim.models.spot import SpotJob, run
from sim.policies.spot import Greedy, UniformProgress
from sim.traces import capacity, faults, membership, priced, requests, synthetic
from sim.traces.inspect import inspect
from tests.support.traces import trace


def event(node: str, time: float, kind: str, cause: str = "GPU") -> dict[str, Any]:
    return {
        "node_id": node,
        "event_time": time,
        "event_type": f"fault_{kind}",
        "fault_type": {"Class": cause},
    }


def written(tmp_path: Path, document: Any, name: str = "trace.json") -> Path:
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def windows(
    polarity: str = "1 = AVAILABLE", starts: tuple[int, ...] = (3, 4), zone: Any = (1, 1, 0, 1)
) -> Any:
    meta = {"gap_seconds": 600, "polarity": polarity, "start_indexes": list(starts), "window_ticks": 3}
    return {"meta": meta, "zones": {"a": {"first_tick": 3, "data": list(zone)}}}


def test_faults_are_paired_and_a_node_with_two_counts_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            event("a", 1, "start"), event("a", 2, "start"), event("b", 2, "start", "NIC"),
            event("a", 3, "end"), event("a", 5, "end"), event("b", 10, "end"),
        ],
    )  # fmt: skip
    found = faults.load(path)
    assert [(fault.node, fault.start_d, fault.end_d) for fault in found] == [
        ("a", 1, 3), ("a", 2, 5), ("b", 2, 10),
    ]  # fmt: skip
    assert faults.faulty(found) == faults.Faulty((4 + 8) / 10, 2)
    assert faults.gaps_d(found) == [1]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({}, "not a list"),
        ([], "no faults"),
        ([{"node_id": "a"}], "event 0: it lacks 'event_time'"),
        ([event("a", 10**400, "start")], "event 0: a number in it is too large"),
        ([event("a", 1e308, "start")], "event 0 is at 1e[+]308 days"),
        ([event("a", 1, "end")], "has not begun"),
        ([event("a", 1, "start")], "1 faults have no end"),
        ([event("a", 2, "start"), event("a", 1, "end")], "sort the events"),
        ([event("a", 1, "stop")], "fault_start or fault_end"),
        ([event("a", math.nan, "start"), event("a", math.nan, "end")], "event 0 is at nan days"),
        ([event("a", 1, "start"), event("a", math.inf, "end")], "event 1 is at inf days"),
        ([event("a", -1, "start"), event("a", 1, "end")], "event 0 is at -1.0 days"),
        ("[", "not JSON"),
        ("  ", "it is empty"),
    ],
)
def test_a_bad_fault_trace_is_refused(tmp_path: Path, document: Any, why: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(SimError, match=why) as caught:
        faults.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (("7", "1"), {"1": 1, "7": 7}),
        (("1", "gpu-a"), {"1": 0, "gpu-a": 1}),
        (("1", "01"), {"01": 0, "1": 1}),
        (("1", "\u00b2"), {"1": 0, "\u00b2": 1}),
    ],
)
def test_each_node_of_a_fault_trace_is_one_of_its_own(
    names: tuple[str, ...], numbers: dict[str, int]
) -> None:
    assert faults.numbered([faults.Fault(name, 0, 1, "GPU") for name in names]) == numbers


def test_a_weibull_fit_finds_the_law_that_was_drawn_from() -> None:
    for shape in (0.5, 1.0, 3.0):
        law = Weibull(shape, 100)
        fit = faults.fit_weibull([float(time) for time in law.sample(np.random.default_rng(2), 20_000)])
        assert fit.shape == pytest.approx(shape, rel=0.03)
        assert fit.scale == pytest.approx(law.scale, rel=0.03)
    with pytest.raises(SimError, match="two or more different"):
        faults.fit_weibull([1.0, 1.0])


def test_a_zone_reads_the_same_whichever_way_round_its_file_is(tmp_path: Path) -> None:
    upright = capacity.load_windows(written(tmp_path, windows()))
    turned = capacity.load_windows(written(tmp_path, windows("1 = preempted", zone=(0, 0, 1, 0))))
    assert upright.zones == turned.zones
    (zone,) = upright.zones
    assert zone.availability == 0.75
    assert zone.window(4, 3) == [1, 0, 1]


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (windows("available"), "must begin with 1 = AVAILABLE or 1 = PREEMPTED"),
        (windows(starts=(5,)), "reaches out of zone a"),
        (windows(starts=(2,)), "reaches out of zone a"),
        (windows(starts=()), "start_indexes is not a list with values"),
        (windows(zone=(1, 2, 0, 1)), "zone a holds 2"),
        (windows(zone=(1, True, 0, 1)), "zone a holds True"),
        (windows(zone=()), "zone a is not a list with values"),
        ({"meta": {}, "zones": {}}, "it lacks 'polarity'"),
        ([{"event_type": "fault_start"}], "it is not an object with meta and zones of capacity"),
    ],
)
def test_bad_windows_are_refused(tmp_path: Path, document: Any, why: str) -> None:
    with pytest.raises(SimError, match=why):
        capacity.load_windows(written(tmp_path, document))


def test_counts_are_turned_only_where_one_can_mean_preempted(tmp_path: Path) -> None:
    path = written(tmp_path, {"metadata": {"gap_seconds": 300}, "data": [1, 0, 1]})
    assert capacity.load_counts(path).counts == [1, 0, 1]
    assert capacity.load_counts(path, "preempted").counts == [0, 1, 0]
    many = written(tmp_path, {"metadata": {"gap_seconds": 300}, "data": [16, 0]}, "many.json")
    assert capacity.load_counts(many) == capacity.Counts(300, [16, 0])
    with pytest.raises(SimError, match=r"holds 1000.*; it must hold whole numbers, 0 to 1000000000"):
        capacity.load_counts(
            written(tmp_path, {"metadata": {"gap_seconds": 300}, "data": [10**400]}, "huge.json")
        )
    with pytest.raises(SimError, match="holds 16"):
        capacity.load_counts(many, "preempted")
    for tick in (0, -5, None, "300", math.inf, math.nan, 10**400):
        with pytest.raises(SimError, match="gap_seconds"):
            capacity.load_counts(written(tmp_path, {"metadata": {"gap_seconds": tick}, "data": [1]}))


def priced_zone(**changes: Any) -> dict[str, Any]:
    meta = {"gap_seconds": 600, "price_info": {"on_demand_price": 80}}
    return {"metadata": meta, "data": [0, 1, 0], "prices": [20, 20, 20]} | changes


def packed(tmp_path: Path, text: str, name: str = "top/zone-a/full.json") -> Path:
    path = tmp_path / "zones.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for inside in (name, "top/zone-a/0.json", "top/README.md"):
            member = tarfile.TarInfo(inside)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_zones_with_prices_are_turned(tmp_path: Path) -> None:
    zones = priced.load(packed(tmp_path, json.dumps(priced_zone())))
    assert zones == {"zone-a": priced.PricedZone("zone-a", 600, [1, 0, 1], 20, 80)}


@pytest.mark.parametrize(
    ("zone", "why"),
    [
        (priced_zone(prices=[20, 21, 20]), "zone zone-a must have one spot price"),
        (priced_zone(prices=[]), "zone zone-a must have one spot price"),
        (priced_zone(data=[0, 2]), "must be 0 and 1"),
        (priced_zone(data=[]), "must be 0 and 1"),
        (priced_zone(prices=[math.nan] * 3), "must be numbers above 0"),
        (priced_zone(metadata={"gap_seconds": 600}), "zone zone-a: it lacks 'price_info'"),
        ([], "zone zone-a: list indices must be"),
        (priced_zone(prices=[10**400] * 3), "zone zone-a: a number in it is too large"),
    ],
)
def test_bad_zones_with_prices_are_refused(tmp_path: Path, zone: Any, why: str) -> None:
    with pytest.raises(SimError, match=why):
        priced.load(packed(tmp_path, json.dumps(zone)))


def test_an_archive_without_zones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SimError, match=r"holds no full\.json"):
        priced.load(packed(tmp_path, "{}", "top/zone-a/1.json"))
    with pytest.raises(SimError, match="not JSON"):
        priced.load(packed(tmp_path, "{"))
    with pytest.raises(SimError, match="not a tar archive"):
        priced.load(written(tmp_path, "text", "zones.tar.gz"))
    with pytest.raises(SimError, match="No such file"):
        priced.load(tmp_path / "none.tar.gz")


def test_nodes_join_and_leave(tmp_path: Path) -> None:
    rows = "0,add,a\n0,add,b\n3600000,remove,a\n7200000,remove,b\n"
    found = membership.summary(membership.load(written(tmp_path, rows, "nodes.csv")))
    assert found == membership.Summary(2.0, 1.5, 2, 2, 2 / 3)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("0,add", "row 1 is not"),
        ("zero,add,a", "row 1 is not"),
        (",,", "it is empty"),
        (f"0,add,{'a' * 200_000}", "it is not CSV: field larger"),
        ("nan,add,a", "row 1 is not"),
        ("0,add,a\n5,drop,a", "row 2 says 'drop'"),
        ("0,remove,a", "remove a, which is not there"),
        ("0,add,a\n1,add,a", "add a, which is there already"),
        ("5,add,a\n1,add,b", "row 2 is earlier"),
    ],
)
def test_bad_membership_is_refused(tmp_path: Path, rows: str, why: str) -> None:
    with pytest.raises(SimError, match=why):
        membership.load(written(tmp_path, rows, "nodes.csv"))


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_requests_are_seconds_after_the_first(tmp_path: Path) -> None:
    rows = HEADER + "".join(f"2023-11-16 23:59:5{second}.5000001,10,{second}\n" for second in (7, 8, 9))
    found = requests.load(written(tmp_path, rows, "requests.csv"))
    assert [request.time_s for request in found] == [0, 1, 2]
    assert requests.summary(found) == requests.Summary(3, 1.0, 0.0, 10, 8)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("a,b,c\n", "first row is not"),
        (HEADER + "now,1,2\n", "row 2 is not a time"),
        (HEADER + "2023-11-16 23:59:57,-1,2\n", "row 2 is not a time"),
        (HEADER + f"2023-11-16 23:59:57,{10**400},2\n", "row 2 is not a time"),
        (HEADER + "2023-11-16 00:00:01,1,2\n2023-11-16 00:00:00,1,2\n", "row 3 is earlier"),
        (HEADER + "2023-11-16 00:00:01,1,2\n", "fewer than three"),
    ],
)
def test_bad_requests_are_refused(tmp_path: Path, rows: str, why: str) -> None:
    with pytest.raises(SimError, match=why):
        requests.load(written(tmp_path, rows, "requests.csv"))


def test_inspect_says_of_a_path_without_a_file_what_it_is(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SimError, match=f"{why}.*; check the path"):
            inspect(path)


def test_inspect_finds_the_kind_by_content(tmp_path: Path) -> None:
    documents = {
        "node faults": synthetic.fault_events(40, 100, 0.01, 2, seed=1),
        "spot zones": windows(),
        "machines over time": {"metadata": {"gap_seconds": 300}, "data": synthetic.zone(500, 20, 5, seed=1)},
    }
    for kind, document in documents.items():
        assert inspect(written(tmp_path, document))[0][1].startswith(kind)
    assert dict(inspect(written(tmp_path, "0,add,a\n9,remove,a\n", "t.csv")))["kind"].startswith(
        "nodes that join"
    )
    facts = dict(inspect(packed(tmp_path, json.dumps(priced_zone()))))
    assert facts["kind"].startswith("spot zones with prices")
    assert facts["zone-a"].startswith("available 0.6667 of 3 ticks of 600 s; 2 with capacity")
    assert facts["zone-a"].endswith("spot $20/h, on demand $80/h")
    facts = dict(inspect(written(tmp_path, documents["machines over time"]), "preempted"))
    assert "1 = preempted" in facts["polarity"]


@pytest.mark.parametrize(("name", "text"), [("t.json", "{}"), ("t.csv", "x,y\n"), ("t.txt", "x")])
def test_inspect_of_something_else_says_what_it_knows(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(SimError, match="it is none of: node faults"):
        inspect(written(tmp_path, text, name))


def test_inspect_of_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(SimError, match="No such file"):
        inspect(tmp_path / "none.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SimError, match="not text"):
        inspect(binary)


def test_made_up_faults_have_the_figures_asked_for(tmp_path: Path) -> None:
    found = faults.load(written(tmp_path, synthetic.fault_events(400, 2000, 0.004, 3, seed=4)))
    # Little's law: rate of each node, cut by the time it is in repair.
    expected = 400 * 3 / (3 + 1 / 0.004)
    assert faults.faulty(found).mean == pytest.approx(expected, rel=0.1)
    assert faults.fit_weibull(faults.gaps_d(found)).shape == pytest.approx(1, abs=0.05)


def test_made_up_zones_have_the_availability_asked_for() -> None:
    zone = synthetic.zone(100_000, 30, 10, seed=9)
    assert sum(zone) / len(zone) == pytest.approx(0.75, abs=0.02)
    assert zone == synthetic.zone(100_000, 30, 10, seed=9)


def test_the_published_spot_windows_give_the_published_costs() -> None:
    found = capacity.load_windows(trace("spot/cbl_aws_2022-10-26.json"))
    job = SpotJob(tick_s=found.tick_s)
    # A tenth of them, for time; all are rows of `torpor sim validate`.
    costs = {
        policy.name: [
            run(policy, job, zone.window(start, found.window_ticks)).cost
            for zone in found.zones
            for start in found.starts[::10]
        ]
        for policy in (UniformProgress(), Greedy())
    }
    means = {name: sum(of) / len(of) for name, of in costs.items()}
    assert 95 < means["uniform-progress"] < means["greedy"] < 125
    assert not math.isclose(means["uniform-progress"], means["greedy"], rel_tol=0.05)


def test_the_real_fault_trace_is_no_poisson_process() -> None:
    found = faults.load(trace("infinitehbd/fault_trace.json"))
    assert (len(found), len({fault.node for fault in found})) == (584, 231)
    assert faults.fit_weibull(faults.gaps_d(found)).shape == pytest.approx(0.62, abs=0.005)


def test_the_real_membership_and_request_traces_have_their_published_figures() -> None:
    nodes = membership.summary(membership.load(trace("bamboo/p3-trace.csv")))
    assert (nodes.removals, round(nodes.mean_nodes, 2)) == (167, 24.03)
    code = requests.summary(requests.load(trace("azure_llm/AzureLLMInferenceTrace_code.csv")))
    assert (code.requests, round(code.mean_context)) == (8819, 2048)
