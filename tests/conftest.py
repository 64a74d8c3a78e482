"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

IN_CI = bool(os.environ.get("CI"))


def _refuse_skip(report: Any) -> Any:
    """A skip is for people's machines. Where everything is installed, it would hide a promise."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    return _refuse_skip((yield))
