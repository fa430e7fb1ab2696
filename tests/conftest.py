"""Rules for the whole suite: real-engine tests are counted; no silent skips; few second tries."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.support import soak

# Else its handlers end one in fifty of the processes that tests fork while a CRI client lives.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Slowness is no finding; and the same examples are drawn each time, new ones only by `./run soak`.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not soak.SOAK
)
settings.load_profile("suite")

# `./run test` tries a failed test once more, and shows how it failed. More of them than this are a finding.
MOST_AGAIN = 3

_KEY = pytest.StashKey["Outcomes"]()


class Outcomes:
    """What became of the tests marked `engine`, and what was tried again.

    engine: the outcome of each `engine` test, by its id. silent: those skipped without a reason. again: how
    each test failed that was then tried once more, marked or not.
    """

    def __init__(self) -> None:
        self.engine: dict[str, str] = {}
        self.silent: list[str] = []
        self.again: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one report. A test that failed in set-up or tear-down counts as failed, once."""
        if str(report.outcome) == "rerun":  # what the plugin for second tries makes of a failure
            self.again.append(report)
            self.engine.pop(report.nodeid, None)
        elif "engine" in report.keywords and (not report.passed or report.when == "call"):
            self.engine[report.nodeid] = report.outcome
            if report.skipped and not _reason(report):
                self.silent.append(report.nodeid)

    def n_again(self) -> int:
        """How many tests were tried again; each may have failed in its call and in its tear-down."""
        return len({report.nodeid for report in self.again})

    def line(self) -> str:
        """The summary that continuous integration looks for."""
        found = Counter(self.engine.values())
        counts = ", ".join(f"{found[name]} {name}" for name in ("passed", "failed", "skipped"))
        return f"real-engine tests: {counts}"


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped or failed as expected; empty if nobody said."""
    expected = getattr(report, "wasxfail", None)
    if expected is not None:
        return str(expected).removeprefix("reason: ").strip()
    text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = text.removeprefix("Skipped:").removeprefix("Skipped").strip()
    return "" if reason == "unconditional skip" else reason


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KEY] = Outcomes()
    config.pluginmanager.register(config.stash[_KEY])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes = session.config.stash[_KEY]
    refused = outcomes.silent or outcomes.n_again() > MOST_AGAIN
    if refused and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash[_KEY]
    if outcomes.again:
        terminalreporter.section("tried again")
        for report in outcomes.again:
            terminalreporter.write_line(f"{report.nodeid} failed first, at {report.when}:", yellow=True)
            terminalreporter.write_line(report.longreprtext)
        too_many = outcomes.n_again() > MOST_AGAIN
        verdict = f", which fails the run: at most {MOST_AGAIN} may" if too_many else ""
        terminalreporter.write_line(f"tried again: {outcomes.n_again()}{verdict}", bold=True)
    for nodeid in outcomes.silent:
        terminalreporter.write_line(f"skipped without a reason: {nodeid}", red=True)
    terminalreporter.write_line(outcomes.line(), bold=True)
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    counts = list(soak.summary(reports))
    if soak.SOAK and counts:
        terminalreporter.section("soak")
        for line in counts:
            terminalreporter.write_line(line)
