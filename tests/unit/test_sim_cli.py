"""The commands of `torpor sim` on small studies, as a user gives them, and what they say when they cannot."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engines.api import DumpStats
from shim.cli.main import main
from shim.timing import Timings, encode
from sim.engine.dispatch import simulate
from sim.errors import SimError
from sim.policies import registry
from sim.results import plots
from sim.studies import study
from sim.traces import synthetic
from sim.validation import validate
from tests.support.traces import trace

STUDY = """
schema: 1
study: {name: small, question: "how often?", seed: 3, replications: {min: 8, max: 8}, horizon: 5d}
cluster: {nodes: 32, spares: 2}
failures: [{kind: exponential, rate_per_1000_node_days: 300}]
repair: 6h
costs: {stall: 30s, restart: 5m, detection: 30s, node_price: $2/h}
job: {nodes: 32}
policies:
  - {name: periodic, interval: [4m, 20m, 90m]}
  - young
  - exact
"""


def torpor(*words: str | Path, **environment: str) -> Result:
    unset = {"TORPOR_TRACES": None, **environment}
    return CliRunner().invoke(main, ["sim", *map(str, words)], env=unset)


def good(*words: str | Path, **environment: str) -> str:
    done = torpor(*words, **environment)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: str | Path, **environment: str) -> str:
    done = torpor(*words, **environment)
    assert done.exit_code == 1, done.output
    assert done.output.startswith("Error: could not ")
    assert len(done.output.splitlines()) == 1
    return done.output


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studies") / "small.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def ran(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "r"
    good("run", small, "--out", folder)
    return folder


def test_run_says_who_wins(small: Path) -> None:
    said = good("run", small)
    assert re.search(r"^POLICY +ETTR +± 95 % +MTTF ", said, re.M)
    rows = [line for line in said.splitlines() if line.startswith(("periodic", "young", "exact"))]
    assert len(rows) >= 5
    assert "best" in rows[0]
    assert "periodic, interval 90 min" in said
    assert re.search(r"best: ettr 0\.\d+ ±|no significant difference between .* and ", said)


def test_run_for_machines(small: Path) -> None:
    said = json.loads(good("run", small, "--json"))
    assert said["objective"] == "ettr"
    assert len(said["cells"]) == 5
    best = said["groups"][0]["best"]
    means = {cell["name"]: cell["metrics"]["ettr"]["mean"] for cell in said["cells"]}
    assert means[best] == max(means.values())
    assert said["groups"][0]["ranked"][0] == {
        "cell": best, "tied": False, "flaw": "", "behind": None,
    }  # fmt: skip


def test_a_sweep_gives_what_a_run_gives(small: Path, ran: Path, tmp_path: Path) -> None:
    good("sweep", small, "--out", tmp_path / "s", "--jobs", "1")
    for name in ("results.parquet", "summary.csv"):
        assert (tmp_path / "s" / name).read_bytes() == (ran / name).read_bytes()
    assert not (tmp_path / "s/timeline.parquet").exists()
    assert (ran / "timeline.parquet").exists()


def test_every_plot_of_a_training_study(ran: Path, tmp_path: Path) -> None:
    drawn = [Path(line).stem for line in good("plot", ran, "-o", tmp_path).splitlines()]
    assert drawn == ["interval", "badput", "recovery", "timeline"]
    for name in drawn:
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 10_000
    good("plot", ran, "-o", tmp_path / "again", "--kind", "badput")
    same = (tmp_path / "again/badput.png").read_bytes() == (tmp_path / "badput.png").read_bytes()
    assert same, "a plot has nothing of the moment it was drawn at"
    assert "it takes a sweep over two keys" in refused("plot", ran, "--kind", "heat")
    assert "there is no such plot; there are interval, heat" in refused("plot", ran, "--kind", "pie")
    assert "it is of a measured.json" in refused("plot", ran, "--kind", "measured")


OTHERS = {
    "heat": STUDY.replace("rate_per_1000_node_days: 300", "rate_per_1000_node_days: [100, 300]").replace(
        "stall: 30s", "stall: [10s, 60s, 300s]"
    ),
    "mttf": STUDY.replace("nodes: 32}\npol", "nodes: [4, 16, 32]}\npol"),
    "spares": STUDY.replace("spares: 2", "spares: [0, 1, 3, 6]"),
    "deadline": """
schema: 1
study: {name: spot, seed: 3, replications: {min: 10, max: 10}}
spot:
  work: 10h
  deadline: [11h, 14h]
  restart: 12m
  tick: 10m
  windows: 10
  spot_price: $1/h
  on_demand_price: $3/h
  regions: [{name: a, mean_up: 3h, mean_down: 2h}]
policies: [greedy, on-demand]
""",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_plots_of_other_studies(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = OTHERS[kind]
    path.write_text(text.replace("  - {name: periodic, interval: [4m, 20m, 90m]}\n  - young\n", ""))
    good("sweep", path, "--out", tmp_path / "r", "--jobs", "1")
    assert good("plot", tmp_path / "r", "--kind", kind).strip() == str(tmp_path / f"r/plots/{kind}.png")
    assert (tmp_path / f"r/plots/{kind}.png").stat().st_size > 10_000


def test_each_plot_says_what_it_lacks(ran: Path) -> None:
    from sim.results import tables as results

    read = results.load(ran)
    read.cells = [cell for cell in read.cells if cell.policy == "exact"]
    read.cells[0].recoveries_s.clear()
    read.cells[0].spans.clear()
    for kind in plots.KINDS:
        if kind.name != "badput":
            with pytest.raises(plots.NotHere):
                kind.draw([read])


class Page(HTMLParser):
    """Checks that tags are closed, and collects what lies outside of the page."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_needs_nothing_else(ran: Path, tmp_path: Path) -> None:
    good("report", ran, "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert len(page.links) == 4
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    for words in (
        "how often?",
        "Answer",
        "Sensitivity",
        "Seeds and versions",
        "Limits",
        "rate_per_1000_node_days",
    ):
        assert words in text, words
    assert "horizon" in text


def test_a_recommendation_can_be_run_by_a_node(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    said = good("recommend", small, "-o", path)
    document = json.loads(path.read_text())
    assert document["verdict"] in said
    policy = registry.from_policy_json(path)
    assert policy.name == document["policy"]["name"]
    low, high = document["valid"]["mtbf_s"]
    assert low < 86400 / 300 * 1000 / 32 < high
    low, high = document["valid"]["stall_s"]
    assert low < 30 < high
    assert 300 < document["interval_s"] < 1500
    assert document["inputs"]["study_sha256"] == study.load(small).sha256


@pytest.mark.parametrize("name", ["asynchronous", "incremental"])
def test_no_range_is_given_for_checkpoints_that_do_not_block(name: str, small: Path, tmp_path: Path) -> None:
    other, path = tmp_path / "other.yaml", tmp_path / "p.json"
    text = small.read_text().replace("costs: {", "costs: {async_stall: 25s, increment: 0.5, ")
    other.write_text(text[: text.index("policies:")] + f"policies: [{name}]\n")
    good("recommend", other, "-o", path)
    document = json.loads(path.read_text())
    assert document["interval_s"] > 0 and document["valid"] is None


def test_what_cannot_be_written_is_said_before_anything_is_run(
    small: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was begun")

    for place in (
        "sim.results.sweep.run",
        "sim.results.report.page",
        "sim.results.plots.draw",
        "sim.results.calibrate.calibrate",
    ):
        monkeypatch.setattr(place, never)
    file = tmp_path / "file"
    file.touch()
    for words in (("recommend", small), ("report", ran), ("calibrate", tmp_path)):
        assert "could not write" in refused(*words, "-o", tmp_path / "none" / "p.json")
    assert "could not write" in refused("plot", ran, "-o", file / "plots")
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left of having looked"


def test_a_number_of_processes_that_no_machine_has_is_refused(small: Path, tmp_path: Path) -> None:
    done = torpor("sweep", small, "--out", tmp_path / "r", "--jobs", "99999999999")
    assert done.exit_code == 2
    assert "is not in the range 1<=x<=4096" in done.output
    assert not (tmp_path / "r").exists()


def test_a_sweep_that_cannot_be_kept_is_refused_before_it_runs(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.engine.dispatch.simulate", None)
    (tmp_path / "file").touch()
    assert "could not use" in refused("sweep", small, "--jobs", "1", "--out", tmp_path / "file" / "r")


def test_a_recommendation_says_what_it_acts_on(tmp_path: Path) -> None:
    text = STUDY[: STUDY.index("policies:")] + "policies: [{name: migrate, base: exact}]"
    notice = "notices: [{kind: maintenance, every: 12h, nodes: 1, lead: 30m, lasting: 1h}]\n"
    (tmp_path / "s.yaml").write_text(text.replace("restart: 5m", "restart: 5m, migrate: 1m") + "\n" + notice)
    good("recommend", tmp_path / "s.yaml", "-o", tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    assert document["policy"] == {"name": "migrate", "options": {"base": "exact"}}
    assert document["triggers"]["maintenance"] == ["Migrate"]
    assert registry.from_policy_json(tmp_path / "p.json").name == "migrate"


def test_a_study_of_many_places_has_no_one_best_policy_and_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.engine.dispatch.simulate", None)
    path = tmp_path / "s.yaml"
    path.write_text(STUDY.replace("spares: 2", "spares: [1, 2]"))
    assert "the study sweeps cluster.spares" in refused("recommend", path, "-o", tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()


def test_the_loop_from_timings_to_a_study(tmp_path: Path) -> None:
    for number in range(9):
        stall = 20.0 + number
        size = 10**9 * (number + 1)
        timings = Timings(
            operation="checkpoint", container_id="a", engine="criu", image="/i", started=f"{number}",
            total_s=stall + 4, phases={"engine": stall}, image_bytes=size,
            dump=DumpStats(frozen_s=stall, total_s=stall + 4, image_bytes=size),
        )  # fmt: skip
        (tmp_path / f"{number}.json").write_bytes(encode(timings))
    measured = tmp_path / "measured.json"
    said = good("calibrate", *sorted(tmp_path.glob("?.json")), "-o", measured)
    assert re.search(r"^stall +9 +24 ", said, re.M)
    assert "warning" not in said
    assert good("plot", measured).strip() == str(tmp_path / "measured.png")
    assert good("plot", measured, "--kind", "measured").strip() == str(tmp_path / "measured.png")
    assert "has one plot, measured" in refused("plot", measured, "--kind", "heat")
    assert "has one plot, measured" in refused("plot", measured, tmp_path)
    (tmp_path / "s.yaml").write_text(STUDY.replace("stall: 30s", "file: measured.json"))
    config = study.load(tmp_path / "s.yaml").cells[0].config
    stall = config.storage[0].stall
    assert stall is not None and stall.mean == pytest.approx(24.0)
    good("recommend", tmp_path / "s.yaml", "-o", tmp_path / "policy.json")
    document = json.loads((tmp_path / "policy.json").read_text())
    assert document["inputs"]["files"] == {"measured.json": hashlib.sha256(measured.read_bytes()).hexdigest()}


def test_engines_are_not_mixed_in_silence(tmp_path: Path) -> None:
    for number, engine in enumerate(("criu", "gvisor")):
        dump = DumpStats(frozen_s=1.0, total_s=2.0, image_bytes=9)
        timings = Timings(operation="checkpoint", container_id="a", engine=engine, image="/i",
                          started=f"{number}", total_s=2.0, phases={}, image_bytes=9, dump=dump)  # fmt: skip
        (tmp_path / f"{number}.json").write_bytes(encode(timings))
    said = good("calibrate", *sorted(tmp_path.glob("?.json")), "-o", tmp_path / "measured.json")
    assert "warning: times of criu and gvisor are mixed" in said


EXAMPLES = sorted(
    entry.name
    for entry in resources.files("sim").joinpath("examples").iterdir()
    if entry.name.endswith(".yaml")
)


def test_examples_are_listed_and_copied(tmp_path: Path) -> None:
    said = good("examples")
    assert [line.split()[0] + ".yaml" for line in said.splitlines()] == EXAMPLES
    good("examples", "llama3", "-o", tmp_path)
    assert (tmp_path / "llama3.yaml").read_text() == good("examples", "llama3")
    assert "is there already" in refused("examples", "llama3", "-o", tmp_path)
    assert "there are kv-restore, llama3" in refused("examples", "llama4")


def test_policies_are_listed_with_their_options() -> None:
    said = good("policies")
    assert re.search(r"^periodic +job queue +interval +Takes a checkpoint after every", said, re.M)
    assert re.search(r"^hot-spares +job +base\? interval\? +Puts", said, re.M)
    assert {line.split()[0] for line in said.splitlines()[1:]} == set(registry.names())


def test_lists_for_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads(good("policies", "--json"))["policies"]
    assert [one["name"] for one in listed] == registry.names()
    lines = [row for row in validate.table() if row.row.startswith(("V01", "V40"))]
    monkeypatch.setattr("sim.validation.validate.table", lambda: lines)
    done = torpor("validate", "--json")
    assert done.exit_code == 3
    verdicts = {line["row"]["row"]: line["verdict"] for line in json.loads(done.output)["lines"]}
    assert verdicts == {"V01.formula": "pass", "V01.paper": "pass", "V40.availability": "no trace"}
    events = tmp_path / "faults.json"
    events.write_text(json.dumps(synthetic.fault_events(20, 100, 0.01, 2, 1)))
    assert json.loads(good("trace", "inspect", events, "--json"))["figures"]["kind"]


def test_the_study_of_the_page_can_be_run(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/sim.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "s.yaml").write_text(text)
    loaded = study.load(tmp_path / "s.yaml")
    assert len(loaded.cells) == 5
    assert simulate(loaded.cells[1], 0).metrics["ettr"] > 0.5


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_a_study_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = resources.files("sim").joinpath("examples", name).read_text()
    path = tmp_path / name
    path.write_text(text)
    if found := re.search(r"(?:path|trace): ([\w/.-]+)", text):
        folder = os.environ.get("TORPOR_TRACES")
        monkeypatch.delenv("TORPOR_TRACES", raising=False)
        with pytest.raises(SimError, match=r"there is no such file .* give --traces or TORPOR_TRACES"):
            study.load(path)
        if folder:
            monkeypatch.setenv("TORPOR_TRACES", folder)
        trace(found[1])
    loaded = study.load(path)
    outcome = simulate(loaded.cells[-1], 0)
    assert outcome.metrics["wall_s"] > 0


def test_what_cannot_be_done_is_one_sentence(small: Path, ran: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(STUDY.replace("spares: 2", "sparse: 2"))
    assert "cluster.sparse" in refused("run", tmp_path / "broken.yaml")
    assert "it has no run.json" in refused("report", tmp_path)
    assert "another study" in refused("run", small, "--out", _other(ran, tmp_path))
    assert torpor("run", tmp_path / "none.yaml").exit_code == 2


def _other(ran: Path, tmp_path: Path) -> Path:
    """The same results, marked as another study's."""
    folder = tmp_path / "other"
    shutil.copytree(ran, folder)
    (folder / "parts/study.json").write_text('{"sha256": "else"}')
    return folder
