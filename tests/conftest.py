"""Shared set-up: one thread, fixed seeds, and a summary line that says which devices ran."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    device = getattr(item, "callspec", None) and item.callspec.params.get("device")
    if device is not None:
        item.user_properties.append(("device", str(device)))


def pytest_terminal_summary(terminalreporter) -> None:
    ran = Counter(
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "device"
    )
    counts = ", ".join(f"{device}: {count} tests" for device, count in sorted(ran.items())) or "no device tests"
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device present"
    terminalreporter.write_line(f"devices that ran: {counts} ({card})")
