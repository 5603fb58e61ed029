"""Exact resume: a run that stops and is started again ends with the bits of a run that did not stop.

Every comparison covers the model, the optimizer's state with float32 masters, and all counters of the loss scaler.
"""

import pytest
import torch

from fairseq_plugin import checkpoint_io, cli, resume

UPDATES = 9
STOP = 5  # within the first epoch


def flat(state, prefix=""):
    """Yield (path, value) of every leaf below a checkpoint's entry."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else None
    if items is None:
        yield prefix, state
        return
    for key, value in items:
        yield from flat(value, f"{prefix}/{key}")


def bits(path):
    """What must be equal: everything but wall-clock times and the history of restarts."""
    state = checkpoint_io.read(str(path))
    kept = {
        "model": state["model"],
        "optimizer": state["last_optimizer_state"],
        "updates": checkpoint_io.updates(state),
        "schedule": state["optimizer_history"][-1]["lr_scheduler_state"],
        "iterator": state["extra_state"]["train_iterator"],
        "best": state["extra_state"].get("best"),
        "run": state["extra_state"][resume.KEY],
        "ema": state["extra_state"].get("ema", {}),
        "ema_fp32": state["extra_state"].get("ema_fp32_params", {}),
    }
    return dict(flat(kept))


def assert_same_bits(one, other):
    one, other = bits(one), bits(other)
    assert one.keys() == other.keys()
    different = [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key])
    ]
    assert different == []


def arguments(train_arguments, *extra):
    return [
        *train_arguments,
        "--seed",
        5,
        "--dropout",
        0.2,
        "--attention-dropout",
        0.1,
        "--no-epoch-checkpoints",
        *extra,
    ]


# Overflows: the scale starts so high that updates are skipped before and after the stop, and it grows every 3 updates.
OVERFLOWING = ["--fp16-init-scale", 2**19, "--fp16-scale-window", 3, "--fp16-scale-tolerance", 0.25]
FORMS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16-tensors": ["--fp16", "--fp16-no-flatten-grads", *OVERFLOWING],
    "fp16-flat": ["--fp16", *OVERFLOWING],
    "memory-efficient-fp16": ["--memory-efficient-fp16", *OVERFLOWING],
    "update-freq": ["--update-freq", 3, "--clip-norm", 0.5],
    "ema": ["--store-ema", "--ema-decay", 0.9, "--ema-update-freq", 4, "--ema-fp32"],
}


def on_cpu(main):
    """fairseq sends the norm of a skipped update to the GPU and asks for the current one to lay out flat masters."""

    def run():
        torch.cuda.current_device = lambda: None
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        from fairseq_plugin import guards

        guards.check_precision.__defaults__ = (True,)
        return main()

    return run


@pytest.mark.parametrize("form", FORMS)
def test_stopped_and_continued_equals_uninterrupted(form, run_cli, train_arguments, tmp_path):
    command = arguments(train_arguments, *FORMS[form])
    main = on_cpu(cli.train)
    whole = run_cli.start(main, *command, "--save-dir", tmp_path / "whole", "--max-update", UPDATES)
    run_cli(main, *command, "--save-dir", tmp_path / "parts", "--max-update", STOP).check()
    again = run_cli(main, *command, "--save-dir", tmp_path / "parts", "--max-update", UPDATES).check()
    log = whole.wait().check().out
    assert f"@ {STOP} updates)" in again.out
    if "fp16" in form:
        assert "gradient overflow detected" in log
        assert "gradient overflow detected" in again.out
    assert_same_bits(tmp_path / "whole/checkpoint_last.pt", tmp_path / "parts/checkpoint_last.pt")


def test_masters_are_more_than_the_model(run_cli, train_arguments, tmp_path):
    """What the test above compares is not empty: the masters differ from the rounded model."""
    command = arguments(train_arguments, *FORMS["fp16-tensors"], "--save-dir", tmp_path, "--max-update", 3)
    run_cli(on_cpu(cli.train), *command).check()
    state = checkpoint_io.read(str(tmp_path / "checkpoint_last.pt"))["last_optimizer_state"]
    masters = state[resume.KEY][resume.MASTERS]
    assert any(not torch.equal(master, master.half().float()) for master in masters)
    assert set(state[resume.KEY]["scaler"]) == set(resume.SCALER_COUNTERS)
