"""A skip that nobody expects is a failure: a test that never runs shows nothing."""

from pathlib import Path

import pytest

EXPECTED = Path(__file__).with_name("expected_skips.txt")


class Skips:
    """Collects skips and fails the run for those that expected_skips.txt does not list."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []
        lines = EXPECTED.read_text().splitlines()
        self._expected = {line.split("#")[0].strip() for line in lines} - {""}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and report.nodeid not in self._expected:
            self.unexpected.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid in self.unexpected:
            terminalreporter.write_line(f"UNEXPECTED SKIP {nodeid} (see {EXPECTED.name})")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips())
