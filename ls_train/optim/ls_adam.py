"""Adam under LightSeq's name and with its argument names and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ls_train.optim.adam import FusedAdam


class LSAdam(FusedAdam):
    """Adam with epsilon added before the bias correction and decoupled weight decay, as in LightSeq and fairseq.

    Args:
        params: what :class:`FusedAdam` takes.
        lr: learning rate.
        bias_correction: whether the moments are corrected for their start at zero.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        eps_inside_sqrt: only False.
        weight_decay: decay rate, applied to the parameter.
        max_grad_norm: only 0; pass ``max_norm`` to :meth:`step` instead.
        amsgrad: only False.

    Raises:
        ValueError: an option is out of range or not offered.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        if eps_inside_sqrt or amsgrad:
            raise ValueError("eps_inside_sqrt and amsgrad are not offered; leave them out or use torch.optim.Adam")
        if max_grad_norm:
            raise ValueError(f"max_grad_norm = {max_grad_norm}: clip with step(max_norm={max_grad_norm}) instead")
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction=bias_correction, eps_after_correction=False
        )
