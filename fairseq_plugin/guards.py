"""Bad input, found before training starts and reported in one line.

:func:`install` puts the checks where fairseq asks for the thing in question: the configuration before anything is
built, the data when it is opened, the save-dir before the first batch. :class:`UserError` carries the one line and
:func:`report` prints it for a launcher.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairseq_plugin import fused_model, option_values, save_dir
from fairseq_plugin.errors import UserError, report

__all__ = [
    "UserError",
    "check_data_folders",
    "check_dataset",
    "check_precision",
    "check_ranks",
    "check_start",
    "install",
    "report",
]


def install() -> None:
    """Put the checks into fairseq; a second call does nothing."""
    from fairseq import checkpoint_utils, tasks
    from fairseq.data import Dictionary, data_utils
    from fairseq.dataclass import initialize
    from fairseq.distributed import utils as distributed_utils

    if getattr(tasks.setup_task, "checked", False):
        return
    option_values.install()
    add_defaults = initialize.add_defaults
    initialize.add_defaults = _checking_config(add_defaults)
    for name in ("fairseq_cli.train", "fairseq_cli.hydra_train", "__main__"):
        # A module that was imported earlier holds its own reference.
        module = sys.modules.get(name)
        if getattr(module, "add_defaults", None) is add_defaults:
            module.add_defaults = initialize.add_defaults
    distributed_utils.call_main = _checking_start(distributed_utils.call_main)
    tasks.FairseqTask.build_generator = _checking_language_model(tasks.FairseqTask.build_generator)
    tasks.setup_task = _checking_data_folder(tasks.setup_task)
    Dictionary.add_from_file = _naming_dictionary(Dictionary.add_from_file)
    data_utils.load_indexed_dataset = _checking_dataset(data_utils.load_indexed_dataset)
    checkpoint_utils.verify_checkpoint_directory = save_dir.prepare


def _checking_config(add_defaults: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(add_defaults)
    def checked(cfg: Any) -> None:
        add_defaults(cfg)
        check_precision(cfg.common)
        check_ranks(cfg.distributed_training, cfg.common.cpu)
        save_dir.expect_writes(not cfg.checkpoint.no_save)
        fused_model.expect_training_step(True)

    return checked


def _checking_start(call_main: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call_main)
    def checked(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
        check_start(cfg.distributed_training, cfg.common.cpu)
        call_main(cfg, main, **kwargs)

    return checked


def check_start(distributed: Any, cpu: bool) -> None:
    """Refuse ranks that cannot start: a rank beyond the world size, or a backend that is unknown or not for the CPU.

    Raises:
        UserError: naming the option and what to give instead.
    """
    size, rank, backend = (getattr(distributed, f"distributed_{name}") for name in ("world_size", "rank", "backend"))
    if size <= 1:
        return
    if not 0 <= rank < size:
        raise UserError(f"--distributed-rank {rank}: must be from 0 to {size - 1} with --distributed-world-size {size}")
    if cpu and backend == "nccl":
        raise UserError(
            f"--distributed-backend nccl: cannot serve the {size} ranks of --distributed-world-size {size} with --cpu; "
            "add --distributed-backend gloo, or --distributed-world-size 1"
        )
    known = torch.distributed.Backend.backend_list
    # Several can be given, one a device: cpu:gloo,cuda:nccl
    unknown = [name for part in backend.split(",") if (name := part.split(":")[-1]) not in known]
    if unknown:
        raise UserError(f"--distributed-backend {backend}: must be one of {', '.join(known)}; gloo for --cpu")


def check_precision(common: Any, gpu: bool | None = None) -> None:
    """Refuse ``--fp16`` where no GPU will run it.

    The two forms that keep one tensor a parameter also run on a CPU, slowly, and are let through: tests use them.

    Raises:
        UserError: flat fp16 training without a GPU.
    """
    gpu = (torch.cuda.is_available() and not common.cpu) if gpu is None else gpu
    runs_on_cpu = common.memory_efficient_fp16 or common.fp16_no_flatten_grads
    if common.fp16 and not gpu and not runs_on_cpu and not common.tpu:
        reason = "--cpu is given" if common.cpu else "torch.cuda.is_available() is False"
        raise UserError(
            f"--fp16 needs a GPU and there is none for this run ({reason}): drop --fp16, or train with --bf16, or add "
            "--memory-efficient-fp16 to run half precision on the CPU for a test"
        )


def check_ranks(distributed: Any, cpu: bool) -> None:
    """Refuse to train alone as one of several processes of torchrun.

    fairseq's default world size is the number of GPUs of this machine; where that is 1 it ignores torchrun's variables.

    Raises:
        UserError: torchrun started several processes, and the configuration is that of one.
    """
    alone = distributed.distributed_world_size == 1 and distributed.distributed_init_method is None
    count = os.environ.get("WORLD_SIZE", "")
    if alone and count.isdigit() and int(count) > 1 and {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys():
        backend = " --distributed-backend gloo" * cpu
        raise UserError(
            f"--distributed-world-size 1: torchrun started {count} processes (WORLD_SIZE={count}), of which each would "
            f"train a model of its own: add --distributed-world-size {count}{backend}, or start one process"
        )


def _checking_data_folder(setup_task: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup_task)
    def checked(cfg: Any, **kwargs: Any) -> Any:
        data = getattr(cfg, "data", None)
        if isinstance(data, str):
            check_data_folders(data)
        try:
            return setup_task(cfg, **kwargs)
        except FileNotFoundError as error:
            raise UserError(
                f"{error.filename or error}: no such file; is {data!r} a folder that lightseq-preprocess "
                "(fairseq-preprocess) wrote, and are --source-lang and --target-lang its languages?"
            ) from error
        except Exception as error:
            if "Could not infer language pair" in str(error):
                raise UserError(
                    f"{data}: no file train.SOURCE-TARGET.SOURCE.idx in it, so it is no folder that "
                    "lightseq-preprocess (fairseq-preprocess) wrote for translation"
                ) from error
            raise

    checked.checked = True
    return checked


def _checking_language_model(build_generator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build_generator)
    def checked(self: Any, models: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        from fairseq.models import FairseqLanguageModel

        extra = kwargs.get("extra_gen_cls_kwargs") or {}
        model = extra.get("lm_model")
        if model is not None and not isinstance(model, FairseqLanguageModel):
            raise UserError(
                f"--lm-path {getattr(args, 'lm_path', '')}: holds a {type(model).__name__}, which is no language model"
            )
        return build_generator(self, models, args, *rest, **kwargs)

    return checked


def check_data_folders(data: str) -> None:
    """Refuse a DATA argument whose local folders do not exist. data: folders separated by ``:``.

    Raises:
        UserError: a folder is missing.
    """
    from fairseq import utils

    for folder in utils.split_paths(data):
        if "://" not in folder and not os.path.exists(folder):
            raise UserError(f"{folder}: the data folder does not exist; give the one lightseq-preprocess wrote")


def _naming_dictionary(add_from_file: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_from_file)
    def checked(self: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        try:
            add_from_file(self, f, *args, **kwargs)
        except OSError:
            raise
        except Exception as error:
            if not isinstance(f, str):
                raise
            raise UserError(f"{f}: not a whole dictionary ({error}); write the data folder anew") from error

    return checked


def _checking_dataset(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def checked(path: str, *args: Any, **kwargs: Any) -> Any:
        check_dataset(path)
        dataset = load(path, *args, **kwargs)
        if dataset is None and os.path.basename(path).startswith("train"):
            raise UserError(f"{path}.idx: missing, so there is nothing to train on; write the data folder anew")
        return dataset

    return checked


_MMAP_MAGIC = b"MMIDIDX\x00\x00"
_OTHER_MAGICS = (b"TNTIDX\x00\x00", b"HUFFIDX\x00")
# Item sizes of fairseq's memory-mapped format by type code, fairseq/data/indexed_dataset.py.
_ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2, 9: 4, 10: 8}


def check_dataset(prefix: str) -> None:
    """Refuse an indexed dataset of which a file is missing, truncated or not an index. prefix: path without suffix.

    The sizes in the index are compared with the files' lengths; the tokens are not read. A dataset of which neither
    file is there, and formats other than the memory-mapped one, are left to fairseq.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    if not index.exists() and not data.exists():
        return
    for path, other in ((index, data), (data, index)):
        if not path.exists():
            raise UserError(f"{path}: missing although {other.name} is there; write the data folder anew")
    with index.open("rb") as stream:
        magic = stream.read(len(_MMAP_MAGIC))
        if magic != _MMAP_MAGIC:
            if magic[:8] in _OTHER_MAGICS:
                return
            raise UserError(f"{index}: not an index of a fairseq dataset; write the data folder anew")
        header = stream.read(17)
        if len(header) < 17:
            raise UserError(f"{index}: truncated within its header; write the data folder anew")
        _, code, count = struct.unpack("<QBQ", header)
        needed = stream.tell() + 12 * count
        if index.stat().st_size < needed:
            raise UserError(
                f"{index}: truncated, {index.stat().st_size} bytes instead of {needed}; write the data folder anew"
            )
        if count == 0 or code not in _ITEM_SIZES:
            return
        stream.seek(stream.tell() + 4 * (count - 1))
        (size,) = struct.unpack("<i", stream.read(4))
        stream.seek(needed - 8)
        (pointer,) = struct.unpack("<q", stream.read(8))
    needed = pointer + size * _ITEM_SIZES[code]
    if data.stat().st_size < needed:
        raise UserError(
            f"{data}: truncated, {data.stat().st_size} bytes instead of {needed}; write the data folder anew"
        )
