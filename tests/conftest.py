"""Rules for the whole suite: real-engine tests are counted, and none may be skipped silently."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

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

_KEY = pytest.StashKey["EngineCount"]()


class EngineCount:
    """Outcomes of the tests marked `engine`."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.silent: list[str] = []

    def add(self, report: pytest.TestReport) -> None:
        """Count one report. A test that failed in set-up or tear-down counts as failed, once."""
        if report.skipped:
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
    config.stash[_KEY] = EngineCount()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("engine") is not None:
        item.config.stash[_KEY].add(report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[_KEY].silent and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash[_KEY]
    for nodeid in count.silent:
        terminalreporter.write_line(f"skipped without a reason: {nodeid}", red=True)
    terminalreporter.write_line(count.line(), bold=True)
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    counts = list(soak.summary(reports))
    if soak.SOAK and counts:
        terminalreporter.section("soak")
        for line in counts:
            terminalreporter.write_line(line)
