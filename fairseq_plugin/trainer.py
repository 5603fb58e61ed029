"""fairseq's trainer with a training step that never waits for the device, for runs of the plugin's own parts.

fairseq's step reads a dozen values from the GPU and launches two copies a parameter. Here an update is enqueued as a
whole: batches are packed on the host, layers write their gradients into one flat buffer, norm, overflow, clipping, loss
scale and Adam are a handful of launches that read learning rate and step number from device memory. The statistics of
an update arrive while the next one runs and are logged then.

The host counts an update as done when it is enqueued. Where its flag later says that it overflowed, the count and the
learning rate go back by one; the device, which counts for itself, never advanced. Whenever a number of updates matters
to fairseq's loop (logging, validation, saving, the last update, the end of an epoch) the step waits for its own
statistics, so that everything there sees exact values.

What runs on the device, and as CUDA graphs with ``--ls-cuda-graph``, is in :mod:`fairseq_plugin.device_step`.

Runs with anything else (:mod:`fairseq_plugin.step_options`) use fairseq's step, which one logged line says.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from fairseq import optim
from fairseq import trainer as fairseq_trainer
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.nan_detector import NanDetector
from fairseq.optim import MemoryEfficientFP16Optimizer, lr_scheduler

from fairseq_plugin.data_parallel import TRAIN_TIME, Ranks
from fairseq_plugin.device_step import DeviceStep
from fairseq_plugin.errors import UserError
from fairseq_plugin.loading import send_whole
from fairseq_plugin.optimizer import LSFP16Optimizer
from fairseq_plugin.pending import PendingUpdate
from fairseq_plugin.rank_balance import balance
from fairseq_plugin.rank_options import check_agreement, check_options
from fairseq_plugin.step_options import graph_obstacles, keeps_busy, obstacles
from fairseq_plugin.token_budget import filled_by_tokens
from ls_train.graph import CapturedCalls, CudaGraphs
from ls_train.optim import DynamicLossScale, FusedAdam
from ls_train.optim.peer_exchange import symmetric_bytes

logger = logging.getLogger(__name__)

FairseqTrainer = fairseq_trainer.Trainer


class LSTrainer(FairseqTrainer):
    """fairseq's Trainer; see the module's text."""

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        if isinstance(cfg, Namespace):
            cfg = convert_namespace_to_omegaconf(cfg)
        check_options(cfg, model)
        reasons = obstacles(cfg, task, model, criterion, quantizer)
        self.is_lean = not reasons
        self._pending: PendingUpdate | None = None
        self._earlier_lr: list[float] | None = None
        self._loss_scale: DynamicLossScale | None = None
        self._ranks: Ranks | None = None
        self._device_step: DeviceStep | None = None
        self._epoch_iterator: Any = None
        super().__init__(cfg, task, model, criterion, quantizer)
        # Every access to the configuration costs microseconds.
        self._fp16, self._clip_norm = cfg.common.fp16, cfg.optimization.clip_norm
        self._max_update = cfg.optimization.max_update
        self._intervals = [
            interval
            for interval in (
                cfg.common.log_interval,
                cfg.checkpoint.save_interval_updates,
                cfg.dataset.validate_interval_updates,
            )
            if interval > 0
        ]
        if reasons:
            logger.info(f"training step: fairseq's own runs because of {', '.join(reasons)}")
        wanted = getattr(cfg.optimizer, "ls_cuda_graph", "off")
        reasons = graph_obstacles(model, self.cuda, self.is_lean)
        by_tokens = getattr(cfg.optimizer, "ls_token_budget", False)
        # Measured on one GPU; batches of a token budget are hardly rounded.
        may_be = wanted == "auto" and self.data_parallel_world_size == 1 and not by_tokens
        is_busy = may_be and keeps_busy(model, cfg.dataset.max_tokens)
        self._replays = not reasons and wanted != "off" and not is_busy
        if by_tokens and not self.is_lean:
            logger.info("--ls-token-budget: without effect, padding costs fairseq's own training step memory and time")
        if getattr(cfg.optimizer, "ls_shard_update", False) and not self.is_lean:
            logger.info("--ls-shard-update: without effect, fairseq's own training step updates all on each rank")
        has_curriculum = cfg.dataset.curriculum > 0
        self._batches = (
            functools.partial(filled_by_tokens, task, has_curriculum)
            if by_tokens and self.is_lean
            else contextlib.nullcontext
        )
        if is_busy and not reasons:
            logger.info("--ls-cuda-graph auto: no graphs, batches of this size keep the GPU busy without")
        if wanted == "on" and reasons:
            logger.info(f"--ls-cuda-graph on: steps run without graphs because of {', '.join(reasons)}")

    # What fairseq builds

    @property
    def use_distributed_wrapper(self) -> bool:
        """Whether the model is wrapped for several ranks; not where this trainer sums the gradients itself."""
        return super().use_distributed_wrapper and not self.is_lean

    def _build_optimizer(self) -> None:
        self._loss_scale = self._device_step = None
        if not self.is_lean:
            super()._build_optimizer()
            return
        common = self.cfg.common
        params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if not (common.fp16 or common.bf16):
            self._optimizer = optim.build_optimizer(self.cfg.optimizer, params)
        elif common.memory_efficient_fp16 or common.memory_efficient_bf16:
            self._optimizer = MemoryEfficientFP16Optimizer.build_optimizer(self.cfg, params)
        else:
            self._optimizer = LSFP16Optimizer.build_optimizer(self.cfg, params)
        self._lr_scheduler = lr_scheduler.build_lr_scheduler(self.cfg.lr_scheduler, self.optimizer)
        self._lr_scheduler.step_update(0)
        if self.data_parallel_world_size > 1:
            sharded = bool(getattr(self.cfg.optimizer, "ls_shard_update", False))
            self._ranks = Ranks(self.data_parallel_world_size, self.data_parallel_process_group, self._fused, sharded)

    def get_train_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return an iterator over the training set and remember it, to know where an epoch ends."""
        with self._batches():
            self._epoch_iterator = super().get_train_iterator(*args, **kwargs)
        if self.data_parallel_world_size > 1:
            batches = getattr(self._epoch_iterator, "frozen_batches", ())
            check_agreement({"number of training batches": str(len(batches))})
        if self.is_lean:
            # Graphs round batches up to their shapes, which the step does.
            criterion = self._criterion
            packing = None if self._replays else (criterion.padding_idx, criterion.loss_options.prefix)
            send_whole(self._epoch_iterator, packing)
        if getattr(self.cfg.optimizer, "ls_balance_ranks", False):
            balance(self._epoch_iterator, self.cfg.dataset.max_tokens, self.cfg.optimization.update_freq)
        return self._epoch_iterator

    # One update

    def train_step(self, samples: Sequence[Any], raise_oom: bool = False) -> dict[str, Any] | None:
        """Do one update; return what to log of the latest one whose statistics are known, None if it was skipped."""
        if not self.is_lean:
            return super().train_step(samples, raise_oom)
        return self._lean_step(samples, raise_oom)

    @metrics.aggregate("train")
    def _lean_step(self, samples: Sequence[Any], raise_oom: bool) -> dict[str, Any] | None:
        metrics.log_start_time("train_wall", priority=800, round=0)
        update = self._enqueue(samples, raise_oom)
        if update is None:
            self._settle()
            return None
        output = self._settle() if self._pending is not None else {}
        self._pending = update
        self._earlier_lr = self._rates()
        self.set_num_updates(self.get_num_updates() + 1)
        if self._is_boundary(len(samples)):
            output = self._settle()
        if self._fp16:
            metrics.log_scalar("loss_scale", self.optimizer.scaler.loss_scale, priority=700, round=4, weight=0)
        metrics.log_stop_time("train_wall")
        return output

    def _enqueue(self, samples: Sequence[Any], raise_oom: bool) -> PendingUpdate | None:
        """Hand one update to the device; return None where memory ran out and the batch is given up."""
        if not self._model.training:
            self._model.train()
        if not self._criterion.training:
            self._criterion.train()
        uncertain = self._pending is not None and self._fp16
        self._fused.expect(self.get_num_updates(), self._earlier_lr if uncertain else None)
        if self._dummy_batch == "DUMMY" and samples[0]:
            self._dummy_batch = samples[0]
        step = self._step
        try:
            batches, is_dummy = [sample or self._dummy() for sample in samples], not samples[-1]
            update = step.run(batches, is_dummy, self._local_cumulative_training_time)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            self._log_oom(error)
            if raise_oom or self._ranks is not None:
                raise
            logger.warning("attempting to recover from OOM in forward/backward pass")
            step.recover()
            return None
        except Exception:
            self._save_crash()
            raise
        if self.cuda and self.get_num_updates() == 0:
            torch.cuda.empty_cache()
        return update

    @property
    def _step(self) -> DeviceStep:
        if self._device_step is None:
            # The scale is made of the optimizer's, the optimizer of the run's: whatever replaces them drops the step.
            graphs = self._captured_calls() if self._replays else None
            self._device_step = DeviceStep(
                self._model,
                self._criterion,
                self._fused,
                self._scale,
                self.cfg.common.seed,
                self._clip_norm,
                self._ranks,
                graphs,
                self.cfg.dataset.max_tokens,
            )
        return self._device_step

    def _captured_calls(self) -> CapturedCalls:
        return CapturedCalls(CudaGraphs(self.device), self._model)

    def _dummy(self) -> Any:
        """Return the batch that stands in for an empty one."""
        if not self._dummy_batch or self._dummy_batch == "DUMMY":
            raise RuntimeError(
                "a rank got no batch before it had one to repeat: the training set has fewer batches than there are "
                "ranks; use fewer ranks or smaller batches"
            )
        return self._dummy_batch

    @property
    def _fused(self) -> FusedAdam:
        return self.optimizer.optimizer

    @property
    def _scale(self) -> DynamicLossScale | None:
        """The loss scale on the device; the optimizer's scaler repeats on the host what it does."""
        scaler = getattr(self.optimizer, "scaler", None)
        if self._loss_scale is None and scaler is not None:
            options = ("scale_factor", "scale_window", "tolerance", "threshold", "min_loss_scale")
            self._loss_scale = DynamicLossScale(
                self.device, scaler.loss_scale, **{name: getattr(scaler, name) for name in options}
            )
            self._loss_scale.load_state_dict(
                {
                    "loss_scale": scaler.loss_scale,
                    "iteration": scaler._iter,
                    "last_overflow": scaler._last_overflow_iter,
                    "last_rescale": scaler._last_rescale_iter,
                    "overflows": scaler._overflows_since_rescale,
                }
            )
        return self._loss_scale

    # What came of it

    def _settle(self) -> dict[str, Any] | None:
        """Wait for the update that is under way, log it and return its log; None if there is none or it was skipped."""
        update, self._pending = self._pending, None
        if update is None:
            return None
        outcome = update.wait()
        scaler = self.optimizer.scaler if self._fp16 else None
        if outcome.overflow:
            self.set_num_updates(self.get_num_updates() - 1)
            try:
                if scaler is None:
                    raise FloatingPointError("gradients are Nan/Inf")
                scaler.check_overflow(float("nan"))
            except OverflowError as error:
                logger.info(f"NOTE: gradient overflow detected, ignoring gradient, {error}")
                return None
            except FloatingPointError:
                self._save_crash(on_all_ranks=True)
                self._find_nan(update.samples)
                raise
        if scaler is not None:
            scaler.update()
        if self._ranks is not None:
            self._cumulative_training_time = outcome.logging_outputs[0].pop(TRAIN_TIME) / self._ranks.size
        metrics.log_speed("ups", 1.0, priority=100, round=2)
        metrics.log_scalar("gnorm", outcome.norm, priority=400, round=3)
        if self._clip_norm > 0:
            metrics.log_scalar("clip", 100.0 if outcome.norm > self._clip_norm else 0.0, priority=500, round=1)
        return self._reduce_and_log_stats(outcome.logging_outputs, outcome.sample_size)

    def _is_boundary(self, micro_batches: int) -> bool:
        """Return whether fairseq's loop does something at this number of updates that needs it to be exact."""
        done = self.get_num_updates()
        is_last = 0 < self._max_update <= done
        if done == 1 or is_last or any(done % interval == 0 for interval in self._intervals):
            self._log_memory()
            return True
        batches = getattr(self._epoch_iterator, "_cur_epoch_itr", None)
        return batches is None or batches.total - batches.n < micro_batches

    def _log_memory(self) -> None:
        if self.cuda and self.cuda_env is not None:
            used = (torch.cuda.max_memory_allocated() + symmetric_bytes()) / 1024**3
            torch.cuda.reset_peak_memory_stats()
            free = self.cuda_env.total_memory_in_GB - used
            metrics.log_scalar("gb_free", free, priority=1500, round=1, weight=0)

    def _rates(self) -> list[float]:
        return [group["lr"] for group in self._fused.param_groups]

    def _save_crash(self, on_all_ranks: bool = False) -> None:
        if self._ranks is not None and self._ranks.gradients.is_sharded and not on_all_ranks:
            logger.warning("the state that failed was not saved: each rank has a part of it")
            return
        path = os.path.join(self.cfg.checkpoint.save_dir, "crash.pt")
        try:
            self.consolidate_optimizer()
            self.save_checkpoint(path, {})
        except (OSError, UserError) as error:  # what made the step fail matters more to the user
            logger.warning(f"the state that failed was not saved: {error}")

    def _find_nan(self, samples: Sequence[Any]) -> None:
        """Run the batches again as fairseq does, with hooks that print where a number stops being finite."""
        self._step.clear_gradients()
        with NanDetector(self.get_model()):
            for sample in samples:
                sample, _ = self._prepare_sample(sample)
                self.task.train_step(
                    sample, self.model, self.criterion, self.optimizer, self.get_num_updates(), ignore_grad=False
                )

    # Where fairseq looks at the run, nothing may be under way

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch.

        Raises:
            UserError: the epoch has no update.
        """
        self._settle()
        batches = getattr(self._epoch_iterator, "_cur_epoch_itr", None)
        if batches is not None and not batches.has_next():
            raise UserError(
                "--skip-remainder-batch: leaves out the only batches of an epoch, which are fewer than those of "
                "--distributed-world-size ranks and --update-freq; drop the flag or make the batches smaller"
            )
        super().begin_epoch(epoch)

    def begin_valid_epoch(self, epoch: int) -> None:
        """Start a validation."""
        self._settle()
        if self._device_step is not None and self._device_step.graphs is not None:
            self._device_step.graphs.has_leftovers = True
        super().begin_valid_epoch(epoch)

    def cumulative_training_time(self) -> float:
        """Return the seconds of training; once they reach ``--stop-time-hours`` nothing is under way any more."""
        seconds = super().cumulative_training_time()
        limit = self.cfg.optimization.stop_time_hours
        if 0 < limit < seconds / 3600:
            self._settle()
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, as fairseq's trainer saves it."""
        self._settle()
        return super().state_dict()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, see fairseq's trainer."""
        self._settle()
        result = super().load_checkpoint(*args, **kwargs)
        self._loss_scale = self._device_step = None
        return result


def install() -> None:
    """Let fairseq's training commands build :class:`LSTrainer`; a second call does nothing.

    Modules that fairseq's trainer was imported into before, the running script among them, hold their own reference.
    """
    fairseq_trainer.Trainer = LSTrainer
    for name in ("fairseq_cli.train", "__main__"):
        module = sys.modules.get(name)
        if getattr(module, "Trainer", None) is FairseqTrainer:
            module.Trainer = LSTrainer
