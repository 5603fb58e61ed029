"""Adam over a flat parameter buffer (Kingma and Ba, 2015; decoupled decay: Loshchilov and Hutter, 2019).

With g the unscaled and clipped gradient, t the slot's step, m and v the moments:

- ``eps_after_correction`` False (fairseq): p -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)
- ``eps_after_correction`` True (torch.optim): p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
- ``decoupled_decay`` True: p -= lr * weight_decay * p before; False: g += weight_decay * p.

Everything that changes from step to step is read from device memory, so that a captured graph can be replayed.
``adam_prepare`` advances the step counters and works out the gradient's factor, ``adam`` updates. Both do nothing after
an overflow (``found_inf`` > 0), and slots that are not active keep their bits.

A 16-bit ``param`` comes with a float32 ``master``, whose rounded copy it is, or with a ``remainder``, which makes it
the compact form of that master (:mod:`ls_train.compact_master`): 24 bytes read and written a parameter, not 28.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ls_train._library import define, reference
from ls_train.compact_master import join_master, split_master
from ls_train.ops._arguments import Arguments, check_kinds

define(
    "adam_prepare",
    "(Tensor(a!) segment_step, Tensor(b!) update, Tensor(c!) grad_scale, Tensor? active, Tensor? norm,"
    " Tensor? found_inf, Tensor? multiplier, float max_norm) -> ()",
)
define(
    "adam",
    "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? remainder, Tensor(d!) exp_avg, Tensor(e!) exp_avg_sq,"
    " Tensor grad, Tensor segments, Tensor segment_group, Tensor segment_step, Tensor? active, Tensor hyper,"
    " Tensor update, Tensor? grad_scale, Tensor? found_inf, bool decoupled_decay, bool bias_correction,"
    " bool eps_after_correction) -> ()",
)

HYPER_COLUMNS = ("beta1", "beta2", "eps", "weight_decay", "lr", "next_lr")
"""Columns of ``hyper``: ``lr`` is for update number ``update[1]``, ``next_lr`` for any later one."""


@reference("adam_prepare")
def _prepare(
    segment_step: Tensor,
    update: Tensor,
    grad_scale: Tensor,
    active: Tensor | None,
    norm: Tensor | None,
    found_inf: Tensor | None,
    multiplier: Tensor | None,
    max_norm: float,
) -> None:
    _check_prepare(segment_step, update, grad_scale, active, norm, found_inf, multiplier, max_norm)
    if found_inf is None or float(found_inf) <= 0:
        segment_step += 1 if active is None else (active != 0)
        update[0] += 1
    factor = torch.ones(1) if multiplier is None else multiplier.clone()
    if max_norm > 0:
        factor *= (max_norm / (norm * factor + 1e-6)).clamp(max=1.0)
    grad_scale.copy_(factor)


@reference("adam")
def _adam(
    param: Tensor,
    master: Tensor | None,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segments: Tensor,
    segment_group: Tensor,
    segment_step: Tensor,
    active: Tensor | None,
    hyper: Tensor,
    update: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    decoupled_decay: bool,
    bias_correction: bool,
    eps_after_correction: bool,
) -> None:
    _check_adam(
        param,
        master,
        remainder,
        exp_avg,
        exp_avg_sq,
        grad,
        segments,
        segment_group,
        segment_step,
        active,
        hyper,
        update,
        grad_scale,
        found_inf,
    )
    if found_inf is not None and float(found_inf) > 0:
        return
    later = int(update[0]) > int(update[1])
    factor = 1.0 if grad_scale is None else float(grad_scale)
    for start, end, group, step in _runs(segments, segment_group, segment_step, active):
        beta1, beta2, eps, weight_decay, lr, next_lr = hyper[group].tolist()
        lr = next_lr if later else lr
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        m, v = exp_avg[start:end], exp_avg_sq[start:end]
        if remainder is None:
            p = (param if master is None else master)[start:end]
        else:
            p = join_master(param[start:end], remainder[start:end])
        g = grad[start:end].to(m.dtype) * factor
        if decoupled_decay:
            p.sub_(p, alpha=lr * weight_decay)
        else:
            g.add_(p, alpha=weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = math.sqrt(correction2)
        if eps_after_correction:
            p.addcdiv_(m, v.sqrt().div_(root).add_(eps), value=-lr / correction1)
        else:
            p.addcdiv_(m, v.sqrt().add_(eps), value=-lr * root / correction1)
        if remainder is not None:
            for target, part in zip((param, remainder), split_master(p, param.dtype), strict=True):
                target[start:end].copy_(part)
        elif master is not None:
            param[start:end].copy_(p)


def _runs(
    segments: Tensor, segment_group: Tensor, segment_step: Tensor, active: Tensor | None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, end, group, step) of the active elements, neighbouring slots with equal settings together."""
    bounds = segments.tolist()
    groups, steps = segment_group.tolist(), segment_step.tolist()
    on = [True] * len(groups) if active is None else [bool(a) for a in active.tolist()]
    first = 0
    for slot in range(1, len(groups) + 1):
        if slot < len(groups) and (groups[slot], steps[slot], on[slot]) == (groups[first], steps[first], on[first]):
            continue
        if on[first] and bounds[slot] > bounds[first]:
            yield bounds[first], bounds[slot], groups[first], steps[first]
        first = slot


@check_kinds
def adam_prepare(
    segment_step: Tensor,
    update: Tensor,
    grad_scale: Tensor,
    active: Tensor | None = None,
    norm: Tensor | None = None,
    found_inf: Tensor | None = None,
    multiplier: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """Advance the step counters unless ``found_inf`` > 0, and write the factor of the gradient.

    grad_scale = multiplier * min(1, max_norm / (norm * multiplier + 1e-6)), without the minimum when max_norm is 0.

    Args:
        segment_step: int64 (S,), changed: number of updates of each slot.
        update: int64 (2,), [0] changed: number of updates done; [1]: number of the update that column ``lr`` is for.
        grad_scale: float32 (1,), written.
        active: uint8 (S,), 1 for the slots that are updated, or None for all.
        norm: float32 (1,), norm of the gradient before scaling; needed when max_norm > 0.
        found_inf: float32 (1,) or None.
        multiplier: float32 (1,), for example the inverse loss scale, or None for 1.
        max_norm: largest norm of the scaled gradient, 0 for no limit.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or memory layout does not fit, or ``norm`` is missing.
    """
    _check_prepare(segment_step, update, grad_scale, active, norm, found_inf, multiplier, max_norm)
    torch.ops.ls_train.adam_prepare(segment_step, update, grad_scale, active, norm, found_inf, multiplier, max_norm)


@check_kinds
def adam(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segments: Tensor,
    segment_group: Tensor,
    segment_step: Tensor,
    active: Tensor | None,
    hyper: Tensor,
    update: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    remainder: Tensor | None = None,
    decoupled_decay: bool = True,
    bias_correction: bool = True,
    eps_after_correction: bool = False,
) -> None:
    """Update ``param`` in place by one step of Adam, after :func:`adam_prepare` has advanced the counters.

    Args:
        param: (n,), contiguous, changed.
        master: float32 (n,), changed, when ``param`` has 16 bits (param is its rounded copy) and there is no
            ``remainder``; None otherwise.
        exp_avg: (n,), float32 (float64 for float64), changed: first moment.
        exp_avg_sq: (n,), float32 (float64 for float64), changed: second moment.
        grad: (n,), same dtype as ``param``.
        segments: int64 (S + 1,), ascending from 0 to n: where the slots begin and end.
        segment_group: int32 (S,): row of ``hyper`` of each slot.
        segment_step: int64 (S,): number of this update of each slot, from 1.
        active: uint8 (S,), 1 for the slots that are updated, or None for all.
        hyper: float64 (G, 6), see ``HYPER_COLUMNS``.
        update: int64 (2,), see :func:`adam_prepare`.
        grad_scale: float32 (1,), factor of the gradient, or None for 1.
        found_inf: float32 (1,); nothing changes when it is > 0.
        remainder: int16 (n,), changed: with a 16-bit ``param``, instead of ``master``.
        decoupled_decay: weight decay apart from the gradient (AdamW) instead of in it.
        bias_correction: correct the moments' bias.
        eps_after_correction: add eps to the corrected root (torch.optim) instead of the plain one (fairseq).

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device or memory layout does not fit.
    """
    tensors = (param, master, remainder, exp_avg, exp_avg_sq, grad, segments, segment_group, segment_step, active)
    tensors += (hyper, update, grad_scale, found_inf)
    _check_adam(*tensors)
    torch.ops.ls_train.adam(*tensors, decoupled_decay, bias_correction, eps_after_correction)


def _check_prepare(
    segment_step: Tensor,
    update: Tensor,
    grad_scale: Tensor,
    active: Tensor | None,
    norm: Tensor | None,
    found_inf: Tensor | None,
    multiplier: Tensor | None,
    max_norm: float,
) -> None:
    arguments = Arguments("adam_prepare", "grad_scale", grad_scale, 1)
    arguments.tensor("segment_step", segment_step, (segment_step.numel(),), torch.int64)
    arguments.tensor("update", update, (2,), torch.int64)
    arguments.tensor("active", active, segment_step.shape, torch.uint8)
    scalars = (("grad_scale", grad_scale), ("norm", norm), ("found_inf", found_inf), ("multiplier", multiplier))
    for name, tensor in scalars:
        arguments.tensor(name, tensor, (1,), torch.float32)
    if max_norm > 0 and norm is None:
        arguments.fail(ValueError, "norm", f"is missing with max_norm = {max_norm}; pass the result of grad_norm")


def _check_adam(
    param: Tensor,
    master: Tensor | None,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    segments: Tensor,
    segment_group: Tensor,
    segment_step: Tensor,
    active: Tensor | None,
    hyper: Tensor,
    update: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    arguments = Arguments("adam", "param", param, 1)
    wide = param.element_size() > 2
    if remainder is not None and (wide or master is not None):
        reason = f"param of dtype {param.dtype}" if wide else "a master"
        arguments.fail(
            ValueError, "remainder", f"must be None with {reason}; it stands in for the master of 16-bit ones"
        )
    if wide == (master is not None) and remainder is None:
        state = "is missing with" if master is None else "must be None with"
        arguments.fail(ValueError, "master", f"{state} param of dtype {param.dtype}; it is the copy of 16-bit ones")
    arguments.tensor("remainder", remainder, param.shape, torch.int16)
    arguments.tensor("master", master, param.shape, torch.float32)
    arguments.tensor("grad", grad, param.shape)
    arguments.tensor("exp_avg", exp_avg, param.shape, arguments.statistics)
    arguments.tensor("exp_avg_sq", exp_avg_sq, param.shape, arguments.statistics)
    slots = (segments.numel() - 1,)
    arguments.tensor("segments", segments, (segments.numel(),), torch.int64)
    arguments.tensor("segment_group", segment_group, slots, torch.int32)
    arguments.tensor("segment_step", segment_step, slots, torch.int64)
    arguments.tensor("active", active, slots, torch.uint8)
    arguments.tensor("hyper", hyper, (hyper.shape[0], len(HYPER_COLUMNS)), torch.float64)
    arguments.tensor("update", update, (2,), torch.int64)
    arguments.tensor("grad_scale", grad_scale, (1,), torch.float32)
    arguments.tensor("found_inf", found_inf, (1,), torch.float32)
