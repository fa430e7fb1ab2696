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

    outcomes: how many `engine` tests passed, failed and were skipped. silent: those skipped without a reason.
    again: how each test failed that was then tried once more, marked or not.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.silent: list[str] = []
        self.again: list[pytest.TestReport] = []

    def add(self, report: pytest.TestReport) -> None:
        """Count one report. A test that failed in set-up or tear-down counts as failed, once."""
        if str(report.outcome) == "rerun":  # what the plugin for second tries makes of a failure
            self.again.append(report)
        elif "engine" not in report.keywords:
            return
        elif report.skipped:
            self.outcomes["skipped"] += 1
            if not _reason(report):
                self.silent.append(report.nodeid)
        elif report.failed:
            self.outcomes["failed"] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1

    def line(self) -> str:
        """The summary that continuous integration looks for."""
        counts = ", ".join(f"{self.outcomes[name]} {name}" for name in ("passed", "failed", "skipped"))
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
    config.pluginmanager.register(_Reports(config.stash[_KEY]))


class _Reports:
    """Hands each report over: the hook itself is told of no configuration."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    outcomes = session.config.stash[_KEY]
    refused = outcomes.silent or len(outcomes.again) > MOST_AGAIN
    if refused and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash[_KEY]
    if outcomes.again:
        terminalreporter.section("tried again")
        for report in outcomes.again:
            terminalreporter.write_line(f"{report.nodeid} failed first, at {report.when}:", yellow=True)
            terminalreporter.write_line(report.longreprtext)
        too_many = (
            f", which fails the run: at most {MOST_AGAIN} may" if len(outcomes.again) > MOST_AGAIN else ""
        )
        terminalreporter.write_line(f"tried again: {len(outcomes.again)}{too_many}", bold=True)
    for nodeid in outcomes.silent:
        terminalreporter.write_line(f"skipped without a reason: {nodeid}", red=True)
    terminalreporter.write_line(outcomes.line(), bold=True)
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    counts = list(soak.summary(reports))
    if soak.SOAK and counts:
        terminalreporter.section("soak")
        for line in counts:
            terminalreporter.write_line(line)
