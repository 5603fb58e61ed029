"""For which runs the plugin's own training step takes over, see :mod:`fairseq_plugin.trainer`."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.tasks import FairseqTask

from fairseq_plugin.criterion import LSCrossEntropyCriterion, LSLabelSmoothedCrossEntropyCriterion
from fairseq_plugin.decoder import LSTransformerDecoder
from fairseq_plugin.encoder import LSTransformerEncoder
from fairseq_plugin.fused_model import reference_causes
from fairseq_plugin.language_model import LSTransformerLanguageModel
from fairseq_plugin.model import LSTransformerModel
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer

_MODELS = (LSTransformerModel, LSTransformerLanguageModel)
_CRITERIA = (LSCrossEntropyCriterion, LSLabelSmoothedCrossEntropyCriterion)
_BACKENDS = ("c10d", "pytorch_ddp", "legacy_ddp", "no_c10d")
_BUCKET_CAP = 25  # fairseq's default, of which the plugin's own sum of gradients takes no notice
_BUSY = 9e10  # parameters of a layer times tokens: 6100 tokens of Transformer-big
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def obstacles(
    cfg: Any, task: FairseqTask, model: torch.nn.Module, criterion: torch.nn.Module, quantizer: Any = None
) -> list[str]:
    """Return why fairseq's own training step has to run, as options and short phrases; empty where ours can.

    Args:
        cfg: fairseq's configuration.
        task: of the run.
        model: not wrapped.
        criterion: not wrapped.
        quantizer: of the run, or None.
    """
    return [
        *_options(cfg),
        *_task(task),
        *_model(model),
        *_criterion(criterion),
        *(["quantization"] if quantizer else []),
    ]


def graph_obstacles(model: torch.nn.Module, on_gpu: bool, is_lean: bool) -> list[str]:
    """Return why a run cannot replay its steps as CUDA graphs, as options and short phrases; empty where it can.

    Args:
        model: not wrapped.
        on_gpu: whether it trains on a GPU.
        is_lean: whether the plugin's own training step runs; what that cannot do, no graph can.
    """
    found = {
        "fairseq's own training step": not is_lean,
        "training on the CPU": not on_gpu,
        "--checkpoint-activations": any(getattr(m, "checkpoint_activations", False) for m in model.modules()),
        "anomaly detection": torch.is_anomaly_enabled(),
    }
    return [reason for reason, given in found.items() if given]


def keeps_busy(model: torch.nn.Module, max_tokens: int | None) -> bool:
    """Return whether a GPU takes longer for batches of ``max_tokens`` than the host takes to issue their steps.

    A graph gains nothing then, and its few shapes add 7 % unused rows. The host's time goes with the number of layers,
    the GPU's also with their parameters and the tokens, whose product decides: measured on an H200 (docs/decisions.md).

    Args:
        model: not wrapped.
        max_tokens: of a batch, None where it is bounded by sentences.
    """
    layers = [m for m in model.modules() if isinstance(m, LSTransformerEncoderLayer)]  # decoder layers are such too
    if max_tokens is None or not layers:
        return False
    parameters = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return max_tokens * parameters >= _BUSY * len(layers)


def _options(cfg: Any) -> list[str]:
    common, parallel, optimization = cfg.common, cfg.distributed_training, cfg.optimization
    found = {
        f"--optimizer {_name(cfg.optimizer)}": _name(cfg.optimizer) != "ls_adam",
        "--tpu": common.tpu,
        "--amp": common.amp,
        "--empty-cache-freq": common.empty_cache_freq > 0,
        "--model-parallel-size": common.model_parallel_size > 1,
        "--pipeline-model-parallel": parallel.pipeline_model_parallel,
        f"--ddp-backend {parallel.ddp_backend}": parallel.ddp_backend not in _BACKENDS,
        f"--ddp-comm-hook {parallel.ddp_comm_hook}": parallel.ddp_comm_hook != "none",
        "--heartbeat-timeout": parallel.heartbeat_timeout > 0,
        "--bucket-cap-mb": parallel.bucket_cap_mb != _BUCKET_CAP,
        f"--zero-sharding {parallel.zero_sharding}": parallel.zero_sharding != "none",
        "--use-bmuf": optimization.use_bmuf,
        "--debug-param-names": optimization.debug_param_names,
        "--store-ema": cfg.ema.store_ema,
    }
    return [option for option, given in found.items() if given]


def _name(options: Any) -> str | None:
    return getattr(options, "_name", None)


def _task(task: FairseqTask) -> list[str]:
    own = [
        name for name in ("train_step", "optimizer_step") if getattr(type(task), name) is not getattr(FairseqTask, name)
    ]
    return [f"{type(task).__name__}.{name}" for name in own]


def _model(model: torch.nn.Module) -> list[str]:
    kind = type(model)
    if not any(isinstance(model, known) and kind.forward is known.forward for known in _MODELS):
        return [f"model {kind.__name__}"]
    causes, reasons = reference_causes(model), []
    for side, fused in (("encoder", LSTransformerEncoder), ("decoder", LSTransformerDecoder)):
        module = getattr(model, side, None)
        if module is None:
            continue
        if not isinstance(module, fused):
            reasons.append(causes.get(side, f"{side} {type(module).__name__}"))
        elif module.layerdrop > 0:
            reasons.append(f"--{side}-layerdrop {module.layerdrop}")
    # Hooks inside fairseq's own encoder or decoder say nothing that its cause does not say.
    named = {module for side in causes for module in getattr(model, side).modules()}
    modules = [module for module in model.modules() if module not in named]
    # Ours calls the layers, not the modules around them.
    if any(getattr(module, hooks, None) for module in modules for hooks in _HOOKS):
        reasons.append("hooks on modules")
    if any(getattr(p, "_backward_hooks", None) or p._post_accumulate_grad_hooks for p in model.parameters()):
        reasons.append("hooks on parameters")
    # fairseq's own modules only pass the number of updates on.
    if any(not _ignores_updates(module) for module in modules):
        reasons.append("a module with set_num_updates")
    return reasons


def _ignores_updates(module: torch.nn.Module) -> bool:
    method = getattr(type(module), "set_num_updates", None)
    return method is None or method.__module__.startswith("fairseq.models.fairseq_")


def _criterion(criterion: torch.nn.Module) -> list[str]:
    kind = type(criterion)
    known = any(isinstance(criterion, own) and kind.forward is own.forward for own in _CRITERIA)
    if not known or any(True for _ in criterion.parameters()):
        return [f"criterion {kind.__name__}"]
    return []
