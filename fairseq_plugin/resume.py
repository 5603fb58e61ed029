"""What fairseq leaves out of a checkpoint although the next update depends on it.

Mixed precision: fairseq saves the 16-bit model and rebuilds the float32 master weights from it, so a resumed run goes
on from rounded weights, and it saves the loss scale without the counters that decide when the scale changes. Both go
under the key :data:`KEY` of the optimizer's state, which plain fairseq ignores. Early stopping, the plateau schedule
and the EMA interval count in memory only; they go under the same key of ``extra_state``.

Dropout needs nothing: fairseq seeds torch's generator before every update from the seed and the number of updates, and
the layers draw their own seed from that generator alone.

Batches: fairseq orders the sentences once, by the seed and the epoch in which the run starts, and keeps the batches. A
run that is continued in a later epoch would order them by that epoch; the first one goes with the run's counters. With
``--curriculum`` a data loader that fairseq uses again would go on without shuffling for ever, and one that is made on
resume shuffle: both do after the epochs of the curriculum.

Position in an epoch: fairseq saves the number of batches that a rank has had, and counts it as updates of the present
``--update-freq``, rounded up. With another number of ranks or another ``--update-freq`` it would skip batches or repeat
them, the last ones would be lost and the epoch begin again, or none would be left and training fail. Here the run goes
on with the batches that are left; where they do not divide, each rank repeats less than one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ls_train.compact_master import rounds_to

KEY = "ls_train"
MASTERS = "masters"
SCALER_COUNTERS = (
    "loss_scale",
    "_iter",
    "_last_overflow_iter",
    "_last_rescale_iter",
    "_overflows_since_rescale",
)


def install() -> None:
    """Let fairseq's trainer and mixed-precision optimizers restore everything; a second call does nothing."""
    from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
    from fairseq.optim import AMPOptimizer
    from fairseq.optim import fp16_optimizer as fp16
    from fairseq.trainer import Trainer

    if not hasattr(Trainer.get_train_iterator, "complete"):
        Trainer.get_train_iterator = _batching_as_before(Trainer.get_train_iterator)
    if not hasattr(EpochBatchIterator._get_iterator_for_epoch, "complete"):
        EpochBatchIterator._get_iterator_for_epoch = _shuffling_as_asked(EpochBatchIterator._get_iterator_for_epoch)
    if not hasattr(GroupedIterator.__init__, "complete"):
        GroupedIterator.__init__ = _grouping_what_is_left(GroupedIterator.__init__)
    for kind in (fp16._FP16OptimizerMixin, fp16._MemoryEfficientFP16OptimizerMixin, AMPOptimizer):
        if not hasattr(kind.load_state_dict, "complete"):
            kind.state_dict = _saving(kind.state_dict)
            kind.load_state_dict = _restoring(kind.load_state_dict)


def _saving(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def complete(self: Any) -> dict[str, Any]:
        return {**state_dict(self), KEY: optimizer_extras(self)}

    return complete


def _restoring(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_state_dict)
    def complete(self: Any, state: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        load_state_dict(self, state, optimizer_overrides)
        restore_optimizer_extras(self, state.get(KEY, {}))

    complete.complete = True
    return complete


def _batching_as_before(get_train_iterator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_train_iterator)
    def complete(self: Any, epoch: int, *args: Any, **kwargs: Any) -> Any:
        # Whoever asks for an iterator to restore then sets its epoch.
        first = vars(self).pop("restored_batches_epoch", epoch)
        iterator = get_train_iterator(self, first, *args, **kwargs)
        vars(iterator).setdefault("batches_epoch", first)
        self.train_batches = iterator
        return iterator

    complete.complete = True
    return complete


def _shuffling_as_asked(get_iterator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_iterator)
    def complete(self: Any, epoch: int, shuffle: bool, *args: Any, **kwargs: Any) -> Any:
        # That of the data loader of an earlier epoch.
        sampler = getattr(self, "epoch_batch_sampler", None)
        if sampler is not None:
            sampler.shuffle = shuffle
        return get_iterator(self, epoch, shuffle, *args, **kwargs)

    complete.complete = True
    return complete


def _grouping_what_is_left(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def complete(self: Any, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False) -> None:
        init(self, iterable, chunk_size, skip_remainder_batch)
        done = getattr(iterable, "n", 0)
        groups, remainder = divmod(max(0, len(iterable) - done), chunk_size)
        if skip_remainder_batch:
            iterable.take(done + groups * chunk_size)
        elif remainder:
            groups += 1
        self.n = self.total - groups

    complete.complete = True
    return complete


def optimizer_extras(optimizer: Any) -> dict[str, Any]:
    """Return what the state of a mixed-precision ``optimizer`` lacks: float32 masters and the scaler's counters."""
    extras: dict[str, Any] = {}
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        extras["grad_scaler"] = scaler.state_dict()
    elif scaler is not None:
        extras["scaler"] = {name: getattr(scaler, name) for name in SCALER_COUNTERS}
    masters = [master.detach() for master, _ in _masters(optimizer)]
    if masters:
        extras[MASTERS] = masters
    return extras


def restore_optimizer_extras(optimizer: Any, extras: dict[str, Any]) -> None:
    """Put back what :func:`optimizer_extras` returned.

    A master counts where it still rounds to the model's weight: in a file whose weights were changed afterwards, by
    averaging say, it is that of another model, and the one fairseq has rebuilt stays. Halfway between two weights it
    may round to either: compact masters and fairseq's differ there.
    """
    scaler = getattr(optimizer, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler):
        if extras.get("grad_scaler"):
            scaler.load_state_dict(extras["grad_scaler"])
    elif scaler is not None:
        for name, value in extras.get("scaler", {}).items():
            setattr(scaler, name, value)
    pairs, saved = list(_masters(optimizer)), extras.get(MASTERS, [])
    if len(saved) == len(pairs):
        for new, (master, kind) in zip(saved, pairs):
            new, weight = new.to(master).view_as(master), master.to(kind)
            master.data.copy_(torch.where((weight.float() == master) & rounds_to(new, weight), new, master))


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, torch.dtype]]:
    """Yield the float32 masters of ``optimizer`` and the type of the parameters they belong to."""
    masters = getattr(optimizer, "fp32_params", None)
    if masters is not None:
        kind = optimizer.fp16_params[0].dtype
        for master in masters.values() if isinstance(masters, dict) else masters:
            yield master, kind


def run_extras(trainer: Any) -> dict[str, Any]:
    """Return the counters of ``trainer``'s run that fairseq keeps in memory only."""
    extras: dict[str, Any] = {"ranks": trainer.data_parallel_world_size}
    stopping = _early_stopping()
    if hasattr(stopping, "best"):
        extras["early_stopping"] = {"best": stopping.best, "num_runs": stopping.num_runs}
    plateau = _plateau(trainer)
    if plateau is not None:
        extras["plateau"] = {name: getattr(plateau, name) for name in ("num_bad_epochs", "cooldown_counter")}
    batches = getattr(trainer, "train_batches", None)
    if batches is not None and _are_kept(trainer.task, batches):
        extras["batches_epoch"] = batches.batches_epoch
    if trainer.cfg.ema.store_ema:
        extras["ema_counter"] = trainer.ema.update_freq_counter
    if hasattr(trainer, "_amp_retries"):
        extras["amp_retries"] = trainer._amp_retries
    return extras


def _are_kept(task: Any, batches: Any) -> bool:
    """Return whether later epochs have the same batches, in another order."""
    is_cached = any(batches is kept for kept in task.dataset_to_epoch_iter.values())
    return is_cached and not callable(batches.batch_sampler)


def restore_run_extras(trainer: Any, extras: dict[str, Any], reset_lr_scheduler: bool) -> None:
    """Put back what :func:`run_extras` returned."""
    stopping = _early_stopping()
    if stopping is not None:
        vars(stopping).update(extras.get("early_stopping", {}))
    plateau = _plateau(trainer)
    if plateau is not None and not reset_lr_scheduler:
        vars(plateau).update(extras.get("plateau", {}))
    if "batches_epoch" in extras and not trainer.cfg.checkpoint.reset_dataloader:
        trainer.restored_batches_epoch = extras["batches_epoch"]
    if trainer.cfg.ema.store_ema and "ema_counter" in extras:
        trainer.ema.update_freq_counter = extras["ema_counter"]
    if hasattr(trainer, "_amp_retries") and "amp_retries" in extras:
        trainer._amp_retries = extras["amp_retries"]


def restore_position(trainer: Any, extra_state: dict[str, Any]) -> None:
    """Turn the position in the epoch in ``extra_state`` of a checkpoint into that of a rank of this run."""
    position = extra_state.get("train_iterator", {})
    ranks = extra_state.get(KEY, {}).get("ranks")
    if ranks is not None and "iterations_in_epoch" in position:
        position["iterations_in_epoch"] = position["iterations_in_epoch"] * ranks // trainer.data_parallel_world_size


def _early_stopping() -> Any:
    """Return fairseq's function that counts validations without progress, in its own attributes."""
    module = sys.modules.get("fairseq_cli.train")
    return getattr(module, "should_stop_early", None)


def _plateau(trainer: Any) -> Any:
    scheduler = getattr(trainer.lr_scheduler, "lr_scheduler", None)
    return scheduler if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else None
