"""Optimizer ``ls_adam``: fairseq's ``adam`` on flat buffers, with its flags, under its mixed-precision wrappers.

fairseq asks the optimiser inside for its abilities. ``--memory-efficient-fp16`` and ``--memory-efficient-bf16`` give it
the 16-bit parameters themselves: it keeps float32 masters and divides by the loss scale in the same launch.
``--fp16`` and ``--bf16`` give it float32 copies that fairseq keeps in step; the plugin's trainer builds
:class:`LSFP16Optimizer` instead wherever its own training step runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.optim.fp16_optimizer import MemoryEfficientFP16Optimizer
from torch import Tensor

from fairseq_plugin.errors import UserError
from ls_train.optim import FusedAdam

logger = logging.getLogger(__name__)


class _FairseqFusedAdam(FusedAdam):
    """FusedAdam with the attributes by which fairseq's wrappers learn what an optimiser can do."""

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    # The wrapper would replace the float32 state by what the checkpoint holds, on the CPU; ours is loaded exactly.
    disable_mem_eff_fp16_loading_hack = True

    @property
    def supports_step_with_scale(self) -> bool:
        """Whether step() takes the loss scale: with 16-bit parameters only.

        With float32 copies under --bf16, fairseq's FP16Optimizer never resets the factor that it would pass.
        """
        return any(buffer.data.element_size() == 2 for buffer in self.buffers)


_GRAPH_HELP = (
    "replay training steps as CUDA graphs, one for each of a few levels of batch sizes: on, off or auto (the "
    "default), which is on where the plugin's own training step runs on a GPU, but on a single one not for batches "
    "that keep it busy anyway"
)
_COMPACT_HELP = (
    "keep the float32 masters of 16-bit parameters as 16 bits beside them, which saves 2 bytes a parameter and some "
    "time; with --fp16 weights below 2^-16 are kept to 2^-39 only; checkpoints are the same"
)
_BUDGET_HELP = (
    "fill each training batch with real tokens up to --max-tokens, sentences of all lengths in it, so that few shapes "
    "serve nearly all steps; padded sizes do not count, as the plugin's own training step has none"
)
_BALANCE_HELP = (
    "let the batches of an update be about equally large, so that no rank waits for another: batches change places "
    "within some updates, each comes once an epoch"
)
_SHARD_HELP = (
    "let each rank sum the gradients of its own part of the parameters, update that part and gather the others': half "
    "the bytes beside the backward, Adam's time divided by the ranks"
)
# fairseq and hydra want types as annotations, which this module's are not.
LSAdamConfig = make_dataclass(
    "LSAdamConfig",
    [
        ("ls_cuda_graph", ChoiceEnum(["auto", "on", "off"]), field(default="auto", metadata={"help": _GRAPH_HELP})),
        ("ls_compact_master", bool, field(default=False, metadata={"help": _COMPACT_HELP})),
        ("ls_token_budget", bool, field(default=False, metadata={"help": _BUDGET_HELP})),
        ("ls_balance_ranks", bool, field(default=False, metadata={"help": _BALANCE_HELP})),
        ("ls_shard_update", bool, field(default=False, metadata={"help": _SHARD_HELP})),
    ],
    bases=(FairseqAdamConfig,),
    namespace={
        "__module__": __name__,
        "__doc__": "fairseq's options of Adam, and how the training step around it runs.",
    },
)


@register_optimizer("ls_adam", dataclass=LSAdamConfig)
class LSAdam(FairseqAdam):
    """fairseq's Adam (decoupled weight decay, eps outside the bias correction) in two launches an update."""

    def __init__(self, cfg: LSAdamConfig, params: Any) -> None:
        """Build over ``params``.

        Raises:
            UserError: an option asks for another implementation of Adam.
        """
        FairseqOptimizer.__init__(self, cfg)
        for option, reason in (
            ("fp16_adam_stats", "--fp16-adam-stats: the moments of ls_adam are float32; drop the flag"),
            ("use_old_adam", "--use-old-adam asks for fairseq's own Adam; use --optimizer adam --use-old-adam"),
            ("tpu", "--tpu: ls_adam has no TPU implementation; use --optimizer adam"),
        ):
            if getattr(cfg, option, False):
                raise UserError(reason)
        params = list(params)
        compact = bool(getattr(cfg, "ls_compact_master", False))
        if compact and not any(param.element_size() == 2 for param in _parameters(params)):
            logger.info("--ls-compact-master: without effect, the parameters that ls_adam was given are float32")
        self._optimizer = _FairseqFusedAdam(
            params, eps_after_correction=False, compact_master=compact, **self.optimizer_config
        )

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply all gradients by ``c``, one launch a buffer."""
        self.optimizer.multiply_grads(c)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> torch.Tensor:
        """Scale the gradients down to the L2 norm ``max_norm`` (0: leave them); return the norm before, on the device.

        Mixture-of-experts parameters, which fairseq leaves out of the norm, are left to fairseq.
        """
        if any(hasattr(param, "expert") for param in self.params):
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        norm = self.optimizer.grad_norm()[0].view(()).clone()
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            self.optimizer.clip_grads(max_norm, norm)
        return norm


def _parameters(params: list[Any]) -> list[Tensor]:
    """Return the parameters of a list of them or of groups."""
    return [p for entry in params for p in (entry["params"] if isinstance(entry, dict) else [entry])]


class LSFP16Optimizer(MemoryEfficientFP16Optimizer):
    """``--fp16`` and ``--bf16`` without copies: ``ls_adam`` has the 16-bit parameters and keeps float32 masters.

    Its state is converted to and from that of fairseq's FP16Optimizer (:mod:`fairseq_plugin.optimizer_state`).
    """
