"""Ranks of one run must have been given the same options and data.

Each rank of torchrun or of several hosts has a command line of its own. What differs there trains on some sentences
twice and on others never, lets the ranks' parameters drift apart, or makes them wait for each other for ever.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from fairseq_plugin.errors import UserError

_SECTIONS = ("common", "dataset", "optimization", "checkpoint", "optimizer", "lr_scheduler", "criterion", "ema")
# Logs, files and speed of one rank; fairseq gives each rank its own suffix of checkpoints where they are sharded.
_MAY_DIFFER = {
    *("log_interval", "log_format", "log_file", "no_progress_bar", "reset_logging", "suppress_crashes", "profile"),
    *("aim_repo", "aim_run_hash", "tensorboard_logdir", "wandb_project", "azureml_logging", "user_dir", "plasma_path"),
    *("use_plasma_view", "quantization_config_path", "num_workers", "data_buffer_size", "dataset_impl", "shard_id"),
    *("save_dir", "restore_file", "finetune_from_model", "checkpoint_suffix", "load_checkpoint_on_all_dp_ranks"),
    *("write_checkpoints_asynchronously", "keep_last_epochs", "keep_best_checkpoints", "keep_interval_updates"),
    *("keep_interval_updates_pattern", "empty_cache_freq"),
}


def check_options(cfg: Any, model: torch.nn.Module) -> None:
    """Compare options and shapes of parameters of all ranks, each of which calls this.

    Args:
        cfg: fairseq's configuration.
        model: not wrapped.

    Raises:
        UserError: on all ranks alike, naming the first option that differs.
    """
    if cfg.distributed_training.distributed_world_size > 1:
        check_agreement(_given(cfg, model))


def check_agreement(given: dict[str, str]) -> None:
    """Compare named values of all ranks, each of which calls this; does nothing where there is no process group.

    Raises:
        UserError: on all ranks alike, naming the first value that differs.
    """
    if not dist.is_initialized():
        return
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, given)
    first, *others = all_ranks
    for rank, values in enumerate(others, 1):
        for name in {**first, **values}:
            one, other = first.get(name, "absent"), values.get(name, "absent")
            if one != other:
                differs = f"{name}: {one} on rank 0 but {other} on rank {rank}"
                raise UserError(f"{differs}; start all ranks with the same options and data")


def _given(cfg: Any, model: torch.nn.Module) -> dict[str, str]:
    given: dict[str, str] = {}
    for section in _SECTIONS:
        values = getattr(cfg, section, None)
        if isinstance(values, DictConfig):
            named = OmegaConf.to_container(values, resolve=True)
            given |= {_option(section, name): str(value) for name, value in named.items() if name not in _MAY_DIFFER}
    if cfg.distributed_training.ddp_backend != "fully_sharded":
        given |= {f"parameter {name}": str(tuple(value.shape)) for name, value in model.named_parameters()}
    return given


def _option(section: str, name: str) -> str:
    return f"--{(section if name == '_name' else name).replace('_', '-')}"
