"""Studies that cannot be used: each gets one sentence with the path of the key and what to do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.errors import SimError
from sim.studies import study
from sim.traces import synthetic

Tree = dict[str, Any]


def good() -> Tree:
    return {
        "schema": 1,
        "study": {"name": "good", "horizon": "54d", "replications": {"min": 2, "max": 4}},
        "cluster": {"nodes": 64, "spares": 2, "racks": 8},
        "failures": [{"kind": "exponential", "rate_per_1000_node_days": 4}],
        "repair": "20h",
        "job": {"nodes": 64, "work": "48d", "state": "4TB"},
        "costs": {"restart": "5m", "stall": "30s"},
        "policies": [{"name": "periodic", "interval": "15m"}],
    }


def put(*path: str | int) -> Callable[[object], Callable[[Tree], None]]:
    def with_value(value: object) -> Callable[[Tree], None]:
        def change(tree: Any) -> None:
            for part in path[:-1]:
                tree = tree[part]
            tree[path[-1]] = value

        return change

    return with_value


def drop(*path: str) -> Callable[[Tree], None]:
    def change(tree: Any) -> None:
        for part in path[:-1]:
            tree = tree[part]
        del tree[path[-1]]

    return change


def both(first: Callable[[Tree], None], second: Callable[[Tree], None]) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        first(tree)
        second(tree)

    return change


SPOT = {"work": "48h", "deadline": "60h", "restart": "12m", "tick": "10m", "spot_price": "$1/h",
        "on_demand_price": "$3/h"}  # fmt: skip
REGION = {"name": "a", "mean_up": "5h", "mean_down": "1h"}
SERVICE = {"requests": {"rate": "2/s"}, "most": 4}


def instead(**work: object) -> Callable[[Tree], None]:
    """Other work in the place of the job."""

    def change(tree: Tree) -> None:
        del tree["job"]
        tree.update(work)
        tree["policies"] = ["none"]

    return change


BAD: dict[str, tuple[Callable[[Tree], None], str]] = {
    "another schema": (put("schema")(2), "schema is 2; it must be 1"),
    "no schema": (drop("schema"), "schema is None; it must be 1"),
    "no policies": (put("policies")([]), "policies is missing or empty; give"),
    "a policy that is a number": (put("policies")([3]), r"policies\[0\] is 3; it must be a name"),
    "an unknown policy": (put("policies")(["dally"]), r"policies\[0\].name .*'dally'.*did you mean 'daly'"),
    "an unknown option": (
        put("policies", 0, "intervall")("5m"),
        r"policies\[0\].*'intervall'; did you mean 'interval'",
    ),
    "a missing option": (put("policies")(["periodic"]), r"policies\[0\].*it needs 'interval'"),
    "an interval in furlongs": (
        put("policies", 0, "interval")("15furlong"),
        r"policies\[0\].*interval is '15furlong'; 'furlong' is no unit",
    ),
    "a time of a policy without a unit": (
        put("policies", 0, "interval")(15),
        r"policies\[0\].*'periodic': interval is 15; it has no unit; write it like 5m",
    ),
    "one of a sweep without a unit": (
        put("policies", 0, "interval")(["15m", "15"]),
        r"policies\[0\].*'periodic': interval is '15'; it has no unit; write it like 5m",
    ),
    "a time of a base without a unit": (
        put("policies")([{"name": "event", "on": ["spot"], "base": {"name": "periodic", "interval": 900.0}}]),
        r"policies\[0\].*'periodic': interval is 900.0; it has no unit; write it like 5m",
    ),
    "an interval of nothing": (
        put("policies", 0, "interval")("0s"),
        r"policies\[0\].*interval is 0.* above 0",
    ),
    "an interval longer than the job": (
        put("policies", 0, "interval")("60d"),
        r"policies\[0\].interval is 5.184e\+06 s, longer than the work",
    ),
    "the same cell twice": (
        put("policies", 0, "interval")(["5m", "5m"]),
        "policies come to .* 2 times; leave one out",
    ),
    "an unknown section": (
        put("failurs")([{"kind": "none"}]),
        "failurs is no key here; did you mean 'failures'",
    ),
    "an unknown key": (put("cluster", "node")(3), "cluster.node is no key here; did you mean 'nodes'"),
    "an unknown key in a list": (put("failures", 0, "shap")(1), r"failures\[0\].shap is no key here"),
    "no nodes": (put("cluster", "nodes")(0), "cluster.nodes is 0; it must be 1 or more"),
    "part of a node": (put("cluster", "nodes")(1.5), "cluster.nodes is 1.5; it must be a whole number"),
    "nodes as a word": (
        put("cluster", "nodes")("many"),
        "cluster.nodes is 'many'; it must be a whole number",
    ),
    "nodes as a flag": (put("cluster", "nodes")(True), "cluster.nodes is True; it must be a whole number"),
    "fewer than no spares": (put("cluster", "spares")(-1), "cluster.spares is -1; it must be 0 or more"),
    "more racks than nodes": (put("cluster", "racks")(65), "cluster.racks is 65, more than the 64 nodes"),
    "a cluster that is a list": (put("cluster")([]), "cluster is an empty list"),
    "a cluster that is a word": (put("cluster")("big"), "cluster is 'big'; it must hold keys and values"),
    "a negative rate": (
        put("failures", 0, "rate_per_1000_node_days")(-4),
        r"failures\[0\].rate_per_1000_node_days is -4; .* above 0",
    ),
    "no rate": (
        put("failures")([{"kind": "exponential"}]),
        r"failures\[0\].rate_per_1000_node_days is missing",
    ),
    "a rate and a mean": (
        put("failures", 0, "mean")("3d"),
        r"failures\[0\].rate_per_1000_node_days is there beside mean",
    ),
    "an unknown kind of failure": (
        put("failures", 0, "kind")("weibul"),
        r"failures\[0\].kind .* did you mean 'weibull'",
    ),
    "a Weibull law without a shape": (
        put("failures", 0, "kind")("weibull"),
        r"failures\[0\].shape is missing",
    ),
    "failures that are no list": (put("failures")({"kind": "none"}), "failures is .*; it must be a list"),
    "groups that are not there": (
        put("failures")([{"kind": "group", "scope": "switch", "mean": "9d"}]),
        r"failures\[0\].scope is switch, of which the cluster has none; set cluster.switches",
    ),
    "a time without a unit": (put("repair")(20), "repair is 20; it has no unit"),
    "an unknown unit": (
        put("repair")("20hours"),
        "repair is '20hours'; 'hours' is no unit here; did you mean",
    ),
    "a time that is no number": (put("repair")("soon"), "repair is 'soon'; it must be a number with a unit"),
    "a negative time": (put("costs", "restart")("-5m"), "costs.restart is '-5m'; it must be 0 or more"),
    "a time too long for a number": (put("repair")("1e999d"), "repair is '1e999d'; it is too large"),
    "an unknown law": (put("repair")({"kind": "normal", "mean": "3h"}), "repair.kind is 'normal'; "),
    "a law without a mean": (
        put("repair")({"kind": "lognormal", "sigma": 1}),
        "repair.mean is missing; give it, or a median",
    ),
    "quantiles out of order": (
        put("repair")({"kind": "quantiles", "points": {"p0": "9s", "p100": "3s"}}),
        "repair.points is wrong",
    ),
    "a share that is none": (
        put("repair")({"kind": "quantiles", "points": {"least": "9s", "p100": "3s"}}),
        "repair.points.least is no share",
    ),
    "no cost of a checkpoint": (
        drop("costs", "stall"),
        "costs.stall is missing; give what a checkpoint stalls",
    ),
    "a measured.json that is not there": (
        put("costs", "file")("gone.json"),
        "costs.file is .*gone.json.*calibrate",
    ),
    "more nodes than there are": (
        put("job", "nodes")(65),
        "job.nodes asks for 65 nodes, and the cluster has 64",
    ),
    "GPUs of part of a node": (
        put("job")({"gpus": 12, "work": "9d"}),
        "job.gpus is 12, no multiple of the 8 of a node",
    ),
    "endless nodes": (put("cluster", "nodes")(math.inf), "cluster.nodes is inf; it must be a whole number"),
    "nodes that are no number": (put("cluster", "nodes")(math.nan), "cluster.nodes is nan; it must be a"),
    "a number too large for a float": (
        put("study", "replications", "rel_half_width")(10**400),
        "rel_half_width is 10+...; it must be a number without a unit",
    ),
    "an option too large for a float": (
        put("policies", 0, "interval")(10**400),
        r"policies\[0\] cannot be used: could not make policy 'periodic': interval",
    ),
    "a time without an end": (put("study", "horizon")(math.inf), "study.horizon is inf; it must be a number"),
    "GPUs and nodes": (put("job", "gpus")(8), "job.gpus is there beside nodes"),
    "more gangs than fit": (put("job", "count")(2), "job.count is 2: 128 nodes, and the cluster has 64"),
    "work of nothing": (put("job", "work")("0s"), "job.work is '0s'; it must be above 0"),
    "replicas that do not divide": (
        put("job", "replicas")(7),
        "job.replicas is 7, which does not divide 64 nodes",
    ),
    "a step longer than the job": (put("job", "step")("99d"), "job.step is longer than the work"),
    "a size that is a time": (put("job", "state")("4h"), "job.state is '4h'; 'h' is no unit here"),
    "no work": (drop("job"), "the file has no work; give one of job, queue, inference, spot"),
    "two kinds of work": (put("spot")({}), "the file has job and spot; give one of"),
    "no end": (
        both(drop("job", "work"), drop("study", "horizon")),
        "study.horizon is missing, and the work has no end",
    ),
    "more least than most replications": (
        put("study", "replications")({"min": 9, "max": 3}),
        "study.replications.min is 9, more than the 3 of max",
    ),
    "one replication": (
        put("study", "replications", "min")(1),
        "study.replications.min is 1; it must be 2 or more",
    ),
    "a half-width that is no share": (
        put("study", "replications", "rel_half_width")(3),
        "study.replications.rel_half_width is 3; .* at most 1",
    ),
    "a study without a name": (drop("study", "name"), "study.name is missing; give it"),
    "a key without a value": (put("study", "name")(None), "study.name has no value; give it one"),
    "warm-up of a job with an end": (
        put("study", "warmup")("1d"),
        "study.warmup is for a queue or a service",
    ),
    "a sweep over nothing": (put("cluster", "spares")([]), "cluster.spares is an empty list; give values"),
    "too many cells": (
        both(put("cluster", "spares")(list(range(400))), put("study", "seed")(list(range(400)))),
        "the file comes to 160000 cells; sweep no more than 100000",
    ),
    "a sweep with one bad value": (
        put("cluster", "spares")([1, "x"]),
        "cluster.spares is 'x'; it must be a whole number",
    ),
    "levels of one name": (
        put("storage")([{"name": "a", "stall": "3s"}, {"name": "a", "stall": "9s"}]),
        r"storage\[1\].name is 'a', which is taken",
    ),
    "storage lost with what is not there": (
        put("storage")([{"name": "a", "stall": "3s", "lost_with": "switch"}]),
        r"storage\[0\].lost_with is switch, of which the cluster has none; set cluster.switches",
    ),
    "an unknown bandwidth": (
        put("storage")([{"name": "a", "write": "20GB"}]),
        r"storage\[0\].write is '20GB'; 'GB' is no unit here",
    ),
    "bandwidth without bytes": (
        both(
            drop("job", "state"),
            both(drop("costs", "stall"), put("storage")([{"name": "a", "write": "20Gbps"}])),
        ),
        r"job.state is missing, which storage\[0\].write needs",
    ),
    "more notice than all": (
        put("notices")([{"kind": "spot", "mean": "9d", "away": "1h", "lead": "2m", "coverage": 1.5}]),
        r"notices\[0\].coverage is 1.5; it must be 0 or more, at most 1",
    ),
    "a prediction that is never right": (
        put("notices")([{"kind": "predictor", "precision": 0, "recall": 0.5, "lead": "2m"}]),
        r"notices\[0\].precision is 0; it must be 1e-05 or more",
    ),
    "nothing to predict": (
        both(drop("failures"), put("notices")([{"kind": "predictor"}])),
        r"notices\[0\].kind is predictor, and there are no failures",
    ),
    "maintenance of more than there is": (
        put("notices")([{"kind": "maintenance", "every": "1d", "lead": "1h", "lasting": "1h", "nodes": 99}]),
        r"notices\[0\].nodes is 99, more than the 66 machines",
    ),
    "a trace that is not there": (
        put("failures")([{"kind": "trace", "path": "gone.json"}]),
        r"failures\[0\].path is 'gone.json', and there is no such",
    ),
    "an empty trace": (
        put("failures")([{"kind": "trace", "path": "empty.json"}]),
        r"failures\[0\].path is wrong.*it has no faults",
    ),
    "a trace that ends before it begins": (
        put("failures")([{"kind": "trace", "path": "faults.json", "start": "900d"}]),
        r"failures\[0\].start is 900 days, past the end",
    ),
    "a trace of more nodes": (
        put("failures")([{"kind": "trace", "path": "faults.json", "nodes": 99}]),
        r"failures\[0\].nodes is 99, more than the 66",
    ),
    "a random moment of a trace that ends": (
        put("failures")([{"kind": "trace", "path": "faults.json", "offset": "random"}]),
        r"failures\[0\].offset is random, .* set repeat",
    ),
    "a queue of nothing": (instead(queue={"classes": []}), "queue.classes is empty"),
    "a class of jobs that never come": (
        instead(queue={"classes": [{"name": "a", "nodes": 1, "work": "1h"}]}),
        r"queue.classes\[0\].every is missing",
    ),
    "a service that gets nothing": (
        instead(inference={"requests": {"rate": "0/s"}}),
        "inference.requests.rate is '0/s'; it must be above 0",
    ),
    "a service without a limit": (
        both(instead(inference=SERVICE), drop("study", "horizon")),
        "study.horizon is missing, and the work has no end",
    ),
    "more replicas than there are": (
        instead(inference={**SERVICE, "least": 9}),
        "inference.least is 9, more than the 4 of most",
    ),
    "a deadline that is too near": (
        instead(spot={**SPOT, "deadline": "48h", "regions": [REGION]}),
        "spot.deadline is 172800 s, less than",
    ),
    "no regions": (instead(spot=SPOT), "spot.regions is empty; give regions, or a trace"),
    "a price without a time": (
        instead(spot={**SPOT, "spot_price": "3", "regions": [REGION]}),
        r"spot.spot_price is '3'; .*like \$3.06/h",
    ),
    "a price too large for a number": (
        instead(spot={**SPOT, "spot_price": "$1e999/h", "regions": [REGION]}),
        r"spot.spot_price is '\$1e999/h'; it is too large for a number",
    ),
    "a price of bytes too large for a number": (
        instead(spot={**SPOT, "move_price": "$1e999/GB", "regions": [REGION]}),
        r"spot.move_price is '\$1e999/GB'; it is too large for a number",
    ),
    "a size too large once its unit is counted": (
        put("job", "state")("1e300TB"),
        "job.state is '1e300TB'; it is too large for a number",
    ),
    "reversed polarity": (
        instead(spot={**SPOT, "trace": "reversed.json"}),
        "spot.trace cannot be used.*polarity is '0 = AVAILABLE'",
    ),
    "a trace that runs backwards": (
        put("failures")([{"kind": "trace", "path": "backwards.json"}]),
        r"failures\[0\].path is wrong.*ends a fault before it began",
    ),
    "a fault without an end": (
        put("failures")([{"kind": "trace", "path": "open.json"}]),
        r"failures\[0\].path is wrong.*1 faults have no end",
    ),
    "polarity that is not told": (
        instead(spot={**SPOT, "trace": "unsaid.json"}),
        "spot.trace cannot be used.*polarity",
    ),
    "a policy for other work": (
        put("policies")(["exact", "kv-restore"]),
        r"policies\[1\].name is 'kv-restore', which is for inference and decides nothing for job",
    ),
    "a zone that is not there": (
        instead(spot={**SPOT, "trace": "zones.json", "zones": ["moon"]}),
        "spot.zones holds 'moon', which the trace has not; it has a",
    ),
    "zones that are no names": (
        instead(spot={**SPOT, "trace": "zones.json", "zones": 5}),
        "spot.zones is 5; it must be names of zones",
    ),
    "zones that are no names either": (
        instead(spot={**SPOT, "trace": "zones.json", "zones": [{"a": 1}]}),
        "spot.zones is .*; it must be names of zones",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    events = synthetic.fault_events(16, 300, 0.01, 1.0, 3)
    zones = {"a": {"first_tick": 0, "data": [1] * 600}}
    meta = {"gap_seconds": 600, "start_indexes": [0], "window_ticks": 500}
    for name, document in {
        "faults.json": events,
        "empty.json": [],
        "zones.json": {"meta": {**meta, "polarity": "1 = AVAILABLE"}, "zones": zones},
        "reversed.json": {"meta": {**meta, "polarity": "0 = AVAILABLE"}, "zones": zones},
        "backwards.json": [{**events[0], "event_time": 9.0}, {**events[0], "event_type": "fault_end"}],
        "open.json": events[:1],
        "unsaid.json": {"meta": {**meta, "polarity": "unknown"}, "zones": zones},
    }.items():
        (tmp_path / name).write_text(json.dumps(document))
    return tmp_path


def sentence(path: Path) -> str:
    with pytest.raises(SimError) as caught:
        study.load(path)
    said = str(caught.value)
    assert said.startswith(f"could not read study '{path}': ")
    assert "\n" not in said
    return said


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_study_is_told_in_one_sentence(kind: str, folder: Path) -> None:
    change, expected = BAD[kind]
    tree = good()
    change(tree)
    path = folder / "bad.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert re.search(expected, sentence(path))


def test_the_good_study_is_good(folder: Path) -> None:
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(good()))
    assert len(study.load(path).cells) == 1


TEXTS = {
    "nothing": ("", "it is empty"),
    "a list": ("- 1\n- 2\n", "it is no mapping of keys to values"),
    "no YAML": ("schema: 1\nstudy: {name: a\n", "it is not YAML in line"),
    "a tab": ("schema: 1\n\tstudy: 2\n", "it is not YAML in line 2"),
    "a key twice": ("schema: 1\nschema: 1\n", "key 'schema' is there again in line 2"),
    "a number as a key": ("1: 2\n", "a key in line 1 is no word"),
    "what refers to itself": ("schema: 1\nstudy: &a\n  name: *a\n", "it refers to itself"),
    "a tag": ("schema: !!python/name:os.system\n", "it is not YAML"),
    "a number of five thousand digits": ("schema: " + "1" * 5000, "a whole number of thousands of digits"),
    "deep nesting": ("schema: " + "[" * 1100, "it is n"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_file_that_is_no_study(kind: str, tmp_path: Path) -> None:
    text, expected = TEXTS[kind]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert expected in sentence(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in sentence(tmp_path / "gone.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "it is no text" in sentence(tmp_path / "binary.yaml")
