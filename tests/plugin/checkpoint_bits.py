"""Equality of checkpoints to the bit, for tests that stop a run and start it again."""

import torch

from fairseq_plugin import checkpoint_io, resume


def leaves(state, prefix=""):
    """Yield (path, value) of every leaf below a checkpoint's entry."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else None
    if items is None:
        yield prefix, state
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}/{key}")


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
    # torch adds options of its optimizers to the groups when it loads them.
    return {key: value for key, value in leaves(kept) if not key.endswith("/differentiable")}


def assert_same_bits(one, other):
    one, other = bits(one), bits(other)
    assert one.keys() == other.keys()
    different = [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key])
    ]
    assert different == []
