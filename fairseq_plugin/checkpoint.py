"""fairseq's checkpoints made whole: atomic files, allow-listed loading, exact resume, both ways with fairseq's archs.

:func:`install` hooks into ``fairseq.checkpoint_utils`` and ``fairseq.trainer.Trainer``; every hook says why it is
there. The plugin calls it when it is imported, so launchers, ``--user-dir`` and spawned ranks all have it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fairseq_plugin import checkpoint_io, checkpoint_match, optimizer_state, resume
from fairseq_plugin.checkpoint_io import DamagedCheckpoint
from fairseq_plugin.errors import UserError

logger = logging.getLogger(__name__)

DEFAULT_RESTORE_FILE = "checkpoint_last.pt"


@dataclass
class _Loading:
    """A trainer that is loading a checkpoint, and the architecture found in it."""

    trainer: Any
    held: str = "unknown"


# None outside Trainer.load_checkpoint.
_loading: _Loading | None = None


def install() -> None:
    """Put the hooks into fairseq; a second call does nothing."""
    from fairseq import checkpoint_utils
    from fairseq.trainer import Trainer

    if isinstance(checkpoint_utils.torch, _AllowListedTorch):
        return
    # Several functions of the module call torch.load, in some fairseq versions with weights_only=False.
    checkpoint_utils.torch = _AllowListedTorch(torch)
    # fairseq's own writer retries into the same stream and never syncs; its copies are written in place.
    checkpoint_utils.torch_persistent_save = _writing(checkpoint_utils.torch_persistent_save)
    checkpoint_utils.PathManager = _atomic_copies(checkpoint_utils.PathManager)
    checkpoint_utils.load_checkpoint = _choosing_file(checkpoint_utils.load_checkpoint)
    checkpoint_utils.load_checkpoint_to_cpu = _falling_back(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.load_model_ensemble_and_task = _explaining(checkpoint_utils.load_model_ensemble_and_task)
    Trainer.state_dict = _saving_run(Trainer.state_dict)
    Trainer.load_checkpoint = _restoring_run(Trainer.load_checkpoint)
    resume.install()


class _AllowListedTorch:
    """torch, except that ``load`` accepts the types of a checkpoint and nothing else."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def load(file: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return checkpoint_io.read(file)


def _writing(persistent_save: Callable[..., None]) -> Callable[..., None]:
    from fairseq.file_io import PathManager

    @functools.wraps(persistent_save)
    def torch_persistent_save(obj: Any, filename: Any, async_write: bool = False) -> None:
        if async_write or not isinstance(filename, str) or not PathManager.supports_rename(filename):
            persistent_save(obj, filename, async_write)
        else:
            checkpoint_io.write(obj, filename)

    return torch_persistent_save


def _atomic_copies(path_manager: type) -> type:
    class AtomicPathManager(path_manager):
        @staticmethod
        def copy(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
            if not path_manager.supports_rename(dst_path):
                return path_manager.copy(src_path, dst_path, overwrite=overwrite)
            checkpoint_io.copy(src_path, dst_path)
            return dst_path

    return AtomicPathManager


def _choosing_file(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Continue from the newest whole checkpoint when ``checkpoint_last.pt`` is missing, where fairseq starts anew.

    Every rank takes the same file: they look at the same folder, to which nobody writes yet.
    """

    @functools.wraps(load_checkpoint)
    def choosing(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        suffix = trainer.checkpoint_suffix
        last = _last_path(cfg.save_dir, suffix)
        if cfg.restore_file != DEFAULT_RESTORE_FILE or os.path.lexists(last) or "://" in last:
            return load_checkpoint(cfg, trainer, **kwargs)
        other = checkpoint_io.newest_whole(cfg.save_dir, suffix)
        if other is None:
            return load_checkpoint(cfg, trainer, **kwargs)
        logger.warning(f"{last} is missing; continuing from {other}, the newest whole checkpoint of that folder")
        # fairseq adds the suffix again, and refuses --finetune-from-model beside a file to restore.
        chosen = {"restore_file": other.removesuffix(suffix + ".pt") + ".pt", "finetune_from_model": None}
        before = {name: getattr(cfg, name) for name in chosen}
        try:
            for name, value in chosen.items():
                setattr(cfg, name, value)
            return load_checkpoint(cfg, trainer, **kwargs)
        finally:
            for name, value in before.items():
                setattr(cfg, name, value)

    return choosing


def _last_path(save_dir: str, suffix: str) -> str:
    return os.path.join(save_dir, DEFAULT_RESTORE_FILE.removesuffix(".pt") + suffix + ".pt")


def _falling_back(load_to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Let a trainer take the newest whole file of the folder in place of a damaged ``checkpoint_last.pt``."""

    @functools.wraps(load_to_cpu)
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        trainer = None if _loading is None else _loading.trainer
        try:
            state = load_to_cpu(path, *args, **kwargs)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such checkpoint") from error
        except DamagedCheckpoint as error:
            suffix = "" if trainer is None else trainer.checkpoint_suffix
            save_dir = os.path.dirname(path)
            if trainer is None or path != _last_path(trainer.cfg.checkpoint.save_dir, suffix):
                raise
            other = checkpoint_io.newest_whole(save_dir, suffix, besides=[path])
            if other is None:
                raise UserError(
                    f"{error}, and {save_dir} holds no whole checkpoint: remove the file to train from the beginning"
                ) from error
            logger.warning(f"{error}; continuing from {other}, the newest whole checkpoint of that folder")
            path, state = other, load_to_cpu(other, *args, **kwargs)
        if _loading is not None:
            _loading.held = checkpoint_match.architecture((state.get("cfg") or {}).get("model"))
            optimizer_state.remember_order(state)
        return state

    return load_checkpoint_to_cpu


def _explaining(load_ensemble: Callable[..., Any]) -> Callable[..., Any]:
    """Say which dictionary or architecture does not fit, where generation shows torch's list of every tensor."""

    @functools.wraps(load_ensemble)
    def load_model_ensemble_and_task(filenames: list[str], *args: Any, **kwargs: Any) -> Any:
        try:
            return load_ensemble(filenames, *args, **kwargs)
        except RuntimeError as error:
            path = ", ".join(filenames)
            otherwise = f"{path} does not fit the model that its own options, with --model-overrides, build"
            message = checkpoint_match.explain(str(error), path, "the data folder", otherwise)
            if message is None:
                raise
            raise UserError(message) from error
        except OSError as error:
            raise UserError(f"--path {':'.join(filenames)}: {error}") from error

    return load_model_ensemble_and_task


def _saving_run(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def complete(self: Any) -> dict[str, Any]:
        state = state_dict(self)
        state["extra_state"][resume.KEY] = resume.run_extras(self)
        return state

    return complete


def _restoring_run(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Convert between fairseq's and the plugin's classes and layouts while loading, and restore the run's counters."""

    @functools.wraps(load_checkpoint)
    def complete(
        self: Any,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: dict[str, Any] | None = None,
        reset_meters: bool = False,
    ) -> Any:
        last = _last_path(self.cfg.checkpoint.save_dir, self.checkpoint_suffix)
        if filename != last and "://" not in filename and not os.path.isfile(filename):
            raise UserError(
                f"{filename}: no such checkpoint to start from; mind that --restore-file is relative to the current "
                "folder, not to --save-dir"
            )
        with _loading_into(self) as loading:
            try:
                extra_state = load_checkpoint(
                    self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
                )
            except KeyError as error:
                if "lr_scheduler" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                    raise
                raise UserError(
                    f"{filename}: its --lr-scheduler was another one, whose state has no {error}; give that one, or "
                    "--reset-lr-scheduler to begin a schedule"
                ) from error
            except Exception as error:
                # fairseq says only that architectures should match; torch's own message is the error before.
                data = getattr(self.cfg.task, "data", "the data folder")
                otherwise = (
                    f"{filename} holds a model of architecture {loading.held}, but --arch "
                    f"{checkpoint_match.architecture(self.cfg.model)} with these options builds another one (give the "
                    "options of the checkpoint's run, or another --save-dir)"
                )
                message = checkpoint_match.explain(str(error.__context__), filename, data, otherwise)
                if message is None:
                    raise
                raise UserError(message) from error
        if extra_state is not None:
            resume.restore_position(self, extra_state)
        if extra_state is not None and not reset_optimizer:
            resume.restore_run_extras(self, extra_state.get(resume.KEY, {}), reset_lr_scheduler)
        return extra_state

    return complete


@contextlib.contextmanager
def _loading_into(trainer: Any) -> Iterator[_Loading]:
    """Hook the moment at which ``trainer`` builds its optimizer anew, after the model's tensors were loaded."""
    global _loading
    build = trainer._build_optimizer

    def build_optimizer() -> None:
        build()
        if trainer._optim_history:
            optimizer_state.match_names(trainer)
            optimizer_state.convert_at_load(trainer)

    _loading, trainer._build_optimizer = _Loading(trainer), build_optimizer
    try:
        yield _loading
    finally:
        _loading = None
        del trainer._build_optimizer
