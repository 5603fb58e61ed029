"""Shared set-up: one thread, fixed seeds, and a summary line that says which devices ran."""

from __future__ import annotations

import gc
import importlib
from collections import Counter

import pytest
import torch

from tests import forks

torch.set_num_threads(1)

# Autograd counts the devices at the first backward of a process and starts a thread for each; after that a forked child
# cannot run a backward, which the command-line tests do. Where torch is built for CUDA and there is no card, fake
# tensors pretend that there is one: the first backward has to come before the first of them.
torch.ones((), requires_grad=True).backward()


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):  # pytest-timeout; a machine with a GPU may lack it
        config.addinivalue_line("markers", "timeout(seconds): has no effect without pytest-timeout")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def imported_fairseq() -> None:
    """fairseq and the plugin are imported, and configurations are composed, before this process is forked."""
    # torch imports its compiler where the first optimizer is built: here once, not in every fork.
    for name in ("torch._dynamo", "fairseq_cli.train", "fairseq_cli.generate", "fairseq_plugin.cli"):
        importlib.import_module(name)
    composing = importlib.import_module("tests.composing")
    composing.keep_what_is_composed()
    for choice in composing.USUAL_CHOICES:
        composing.configuration([".", "--cpu", "--arch", "ls_transformer_tiny", *choice])
    gc.collect()
    gc.freeze()


@pytest.fixture
def forked_python(monkeypatch) -> None:
    """The processes of benchmarks are forks of this one."""
    for name in ("processes", "curves"):
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "subprocess", forks.SUBPROCESS)


# Files whose tests take seconds each come first, so that the last ones left for the workers to share are short.
_LONG = ("tests/soak", "tests/test_", "tests/plugin")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))


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
