"""What current Python, torch and numpy break in fairseq, mended from outside.

:func:`apply` runs when the plugin is imported, so launchers, plain ``--user-dir fairseq_plugin`` and spawned ranks all
get it. Every mend says why it is there and looks at the installed versions first: on a fairseq that has the fix it does
nothing. None of them changes what is computed, nor which data is read in which order. Reading checkpoints is the
business of :mod:`fairseq_plugin.checkpoint`.

Silent bugs of fairseq that change results are left as they are, because a comparison with plain fairseq must see the
same data; where sentences get lost a warning says so:

- ``data_utils.batch_by_size`` drops the last batch (the longest sentences) when its size is no multiple of
  ``--required-batch-size-multiple`` (default 8), in generation and validation too. A warning counts them;
  ``--required-batch-size-multiple 1`` keeps them.
- ``--num-batch-buckets`` pads the last bucket to the longest sentence of the corpus and then filters by length; the
  warning that counts the skipped sentences is fairseq's own.
- ``--amp`` unscales gradients twice (``AMPOptimizer``): use ``--fp16`` or ``--bf16``.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fairseq_plugin.errors import UserError
from fairseq_plugin.ports import free_port

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mend:
    """One repair: why it is there, whether the installed versions need it, and what it does."""

    reason: str
    needed: Callable[[], bool]
    repair: Callable[[], None]


_mends: dict[str, Mend] = {}
_applied: dict[str, bool] = {}


def apply() -> tuple[str, ...]:
    """Apply every mend the installed versions need, each once per process; return the names of those in force."""
    for name, mend in _mends.items():
        if name not in _applied:
            _applied[name] = mend.needed()
            if _applied[name]:
                mend.repair()
    return tuple(name for name, in_force in _applied.items() if in_force)


def reasons() -> dict[str, str]:
    """Return the reason of every mend by its name."""
    return {name: mend.reason for name, mend in _mends.items()}


def import_fairseq() -> None:
    """Import fairseq without its noise: known deprecation warnings are hidden, the root logger stays unconfigured.

    Some of fairseq's task modules call ``logging.basicConfig``; coming before the command-line module's own call they
    would take all log lines from stdout to stderr at level DEBUG.

    Raises:
        ModuleNotFoundError: fairseq is not installed.
    """
    for category, message in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    placeholder = logging.NullHandler()
    logging.root.addHandler(placeholder)
    try:
        import fairseq  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "fairseq":
            raise
        raise ModuleNotFoundError(
            "fairseq is not installed: `pip install 'ls-train[fairseq]'` (or any importable fairseq), then run "
            "`lightseq-doctor`",
            name="fairseq",
        ) from None
    finally:
        logging.root.removeHandler(placeholder)


# Deprecated calls inside fairseq that still work: (category, start of the message as a regular expression).
_KNOWN_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    (FutureWarning, r"`torch\.cuda\.amp\."),
    (FutureWarning, r"`broadcast_buffers` is deprecated"),
    (DeprecationWarning, r"`torch\.jit\."),
    (UserWarning, r"Support for mismatched key_padding_mask and attn_mask"),
    (UserWarning, r"hydra\.experimental\.\w+\(\) is no longer experimental"),
    (UserWarning, r"\s*'config' is validated against ConfigStore schema"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    (UserWarning, r"In 'config': Usage of deprecated keyword in package header"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
)


def _mend(reason: str, needed: Callable[[], bool]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(repair: Callable[[], None]) -> Callable[[], None]:
        _mends[repair.__name__.strip("_")] = Mend(reason, needed, repair)
        return repair

    return register


def _has_code(function: Callable[..., Any], *fragments: str) -> bool:
    source = inspect.getsource(function)
    return all(fragment in source for fragment in fragments)


def _loads_weights_only() -> bool:
    """Whether ``torch.load`` refuses unknown classes by default (torch 2.6 and later)."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 6)


def _broadcast_load_is_strict() -> bool:
    from fairseq.distributed import utils as distributed_utils

    function = getattr(distributed_utils, "_broadcast_object_slow", None)
    return function is not None and _loads_weights_only() and not _has_code(function, "weights_only")


@_mend(
    "torch.load refuses the configuration object that rank 0 sends to the other ranks of its own job on resume",
    _broadcast_load_is_strict,
)
def _broadcast_object() -> None:
    from fairseq.distributed import utils as distributed_utils

    def broadcast_object_slow(obj: Any, src_rank: int, group: object, dist_device: torch.device) -> Any:
        if distributed_utils.get_rank(group) == src_rank:
            stream = io.BytesIO()
            torch.save(obj, stream)
            content = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).to(dist_device)
            length = torch.tensor([content.numel()], dtype=torch.int64, device=dist_device)
            distributed_utils.broadcast(length, src=src_rank, group=group)
            distributed_utils.broadcast(content, src=src_rank, group=group)
            return obj
        length = torch.zeros(1, dtype=torch.int64, device=dist_device)
        distributed_utils.broadcast(length, src=src_rank, group=group)
        content = torch.empty(int(length), dtype=torch.uint8, device=dist_device)
        distributed_utils.broadcast(content, src=src_rank, group=group)
        return torch.load(io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)

    distributed_utils._broadcast_object_slow = broadcast_object_slow


def _buckets_use_old_numpy() -> bool:
    from fairseq.data import data_utils

    return _has_code(data_utils.get_buckets, "interpolation=") and np.lib.NumpyVersion(np.__version__) >= "2.0.0"


@_mend("--num-batch-buckets calls np.percentile(interpolation=), which numpy 2 has no more", _buckets_use_old_numpy)
def _batch_buckets() -> None:
    from fairseq.data import bucket_pad_length_dataset, data_utils

    def get_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
        return np.unique(np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")[1:])

    data_utils.get_buckets = get_buckets
    bucket_pad_length_dataset.get_buckets = get_buckets


@_mend(
    "fairseq's bucketed and token-block datasets name np.compat.long, gone in numpy 2",
    lambda: not hasattr(np, "compat"),
)
def _numpy_compat() -> None:
    np.compat = SimpleNamespace(long=np.int64)


def _bf16_means_tpu() -> bool:
    from fairseq import options

    return _has_code(options.parse_args_and_arch, "if args.bf16:", "args.tpu = True")


@_mend("the option parser turns --bf16 into --tpu, so that training without torch_xla stops", _bf16_means_tpu)
def _bf16_without_tpu() -> None:
    from fairseq import options

    parse = options.parse_args_and_arch

    def parse_args_and_arch(
        parser: argparse.ArgumentParser,
        input_args: list[str] | None = None,
        parse_known: bool = False,
        suppress_defaults: bool = False,
        modify_parser: Callable[[argparse.ArgumentParser], None] | None = None,
    ) -> Any:
        parsed = parse(parser, input_args, parse_known, suppress_defaults, modify_parser)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(args, "bf16", False) and "--tpu" not in (sys.argv[1:] if input_args is None else input_args):
            args.tpu = False
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


def _unknown_arch_is_masked() -> bool:
    from fairseq import models

    return _has_code(models.build_model, "Could not infer model type from {cfg}", ".format(")


@_mend(
    "a checkpoint of an unregistered architecture fails with IndexError: the options' braces enter a format string",
    _unknown_arch_is_masked,
)
def _unknown_arch() -> None:
    from fairseq import models

    build = models.build_model

    def build_model(cfg: Any, task: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        if name and name not in models.ARCH_MODEL_REGISTRY and name not in models.MODEL_DATACLASS_REGISTRY:
            raise UserError(
                f"model architecture {name!r} is not registered: pass the --user-dir of the module that defines it"
            )
        return build(cfg, task, from_checkpoint)

    models.build_model = build_model


def _drops_incomplete_batch() -> bool:
    from fairseq.data import data_utils

    return _has_code(data_utils.batch_by_size, "b = b[:-1]")


@_mend(
    "batch_by_size drops its last batch without a word; the sentences stay dropped, but are counted in a warning",
    _drops_incomplete_batch,
)
def _dropped_sentences() -> None:
    from fairseq.data import data_utils

    batch = data_utils.batch_by_size

    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
        indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)
        batches = batch(indices, *args, **kwargs)
        lost = len(indices) - sum(len(members) for members in batches)
        if lost > 0:
            logger.warning(
                f"fairseq drops {lost} of {len(indices)} sentences (the longest ones) because the last batch is no "
                "multiple of --required-batch-size-multiple; --required-batch-size-multiple 1 keeps them"
            )
        return batches

    data_utils.batch_by_size = batch_by_size


def _replacing_wants_numbers() -> bool:
    from fairseq import utils

    return _has_code(utils.replace_unk, "src_tokens[alignment[i]]")


@_mend("--replace-unk takes alignments for numbers, but they are empty or lists of pairs", _replacing_wants_numbers)
def _replaced_words() -> None:
    from fairseq import utils

    replace = utils.replace_unk

    def replace_unk(hypo_str: str, src_str: str, alignment: Any, align_dict: dict[str, str], unk: str) -> str:
        if not isinstance(alignment, list) or not all(isinstance(pair, tuple) for pair in alignment):
            raise UserError(
                "--replace-unk needs to know which source word an unknown one comes from: add --print-alignment hard"
            )
        sources = {target: source for source, target in alignment}
        return replace(hypo_str, src_str, sources, align_dict, unk)

    utils.replace_unk = replace_unk


def _port_may_be_taken() -> bool:
    from fairseq.distributed import utils as distributed_utils

    infer = getattr(distributed_utils, "_infer_single_node_init", None)
    return infer is not None and _has_code(infer, "port = random.randint(10000, 60000)")


@_mend(
    "ranks of one host meet at a random port, which an outgoing connection of any process may have",
    _port_may_be_taken,
)
def _free_port() -> None:
    from fairseq.distributed import utils as distributed_utils

    infer = distributed_utils._infer_single_node_init

    def infer_single_node_init(cfg: Any) -> None:
        # Processes that Slurm started find one another by the port that fairseq makes of the job's number.
        if cfg.distributed_port <= 0 and "SLURM_JOB_ID" not in os.environ:
            cfg.distributed_port = free_port()
        infer(cfg)

    distributed_utils._infer_single_node_init = infer_single_node_init


def _cpu_ranks_do_not_start() -> bool:
    from fairseq.distributed import utils as distributed_utils

    return _has_code(distributed_utils.call_main, "torch.cuda.device_count()")


@_mend(
    "--cpu with several ranks starts none: fairseq starts one rank a GPU, and divides by their number under torchrun",
    _cpu_ranks_do_not_start,
)
def _cpu_ranks() -> None:
    from fairseq.distributed import utils as distributed_utils

    call = distributed_utils.call_main

    def call_main(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
        dist = cfg.distributed_training
        if not cfg.common.cpu or dist.distributed_world_size <= max(1, torch.cuda.device_count()):
            return call(cfg, main, **kwargs)
        if dist.distributed_init_method is None and {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys():
            dist.distributed_init_method = "env://"
            dist.distributed_rank = int(os.environ["RANK"])
            dist.distributed_no_spawn = True
        if dist.distributed_no_spawn:
            return call(cfg, main, **kwargs)
        if dist.distributed_init_method is None:
            if dist.distributed_port <= 0:
                dist.distributed_port = free_port()
            dist.distributed_init_method = f"tcp://localhost:{dist.distributed_port}"
        dist.distributed_num_procs = dist.distributed_world_size
        kwargs["start_rank"] = dist.distributed_rank
        dist.distributed_rank = None
        torch.multiprocessing.spawn(
            distributed_utils.distributed_main, args=(main, cfg, kwargs), nprocs=dist.distributed_world_size
        )

    distributed_utils.call_main = call_main


def _cpu_ranks_name_a_device() -> bool:
    from fairseq.models import distributed_fairseq_model

    return _has_code(distributed_fairseq_model.DistributedFairseqModel, "device_ids=[args.device_id]")


@_mend(
    "the c10d backend gives DistributedDataParallel a device number, which it refuses on the CPU",
    _cpu_ranks_name_a_device,
)
def _c10d_on_the_cpu() -> None:
    from fairseq.models import distributed_fairseq_model

    wrapper = distributed_fairseq_model.DistributedDataParallel

    def data_parallel(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            options.update(device_ids=None, output_device=None)
        return wrapper(module, **options)

    distributed_fairseq_model.DistributedDataParallel = data_parallel


@contextlib.contextmanager
def sacrebleu_reads_files() -> Iterator[None]:
    """Let ``sacrebleu.corpus_bleu`` take open files, as ``fairseq-score --sacrebleu`` passes them."""
    try:
        import sacrebleu
    except ImportError:
        yield
        return
    corpus_bleu = sacrebleu.corpus_bleu

    def from_lines(hypotheses: Any, references: Any, **kwargs: Any) -> Any:
        return corpus_bleu(list(hypotheses), [list(lines) for lines in references], **kwargs)

    sacrebleu.corpus_bleu = from_lines
    try:
        yield
    finally:
        sacrebleu.corpus_bleu = corpus_bleu
