"""One fairseq run in a process that stops between start-up and the first update until it is told to go on.

``python -m benchmarks.fairseq_process IMPLEMENTATION FLAGS...`` with the flags of fairseq-train. Start-up is importing,
reading the data, building the model and moving it to its device. At the end the peak memory is printed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import _utils as data_loading

from benchmarks.processes import wait_for_go

# At the end each worker of the data loader is waited for this long, in vain: fairseq's buffering thread still holds it.
# With torch's 5 s a run of 4 workers takes 20 s to end. Ranks import this module too.
data_loading.MP_STATUS_CHECK_INTERVAL = 0.2

PEAK = "peak memory of this run, bytes:"
IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "fairseq_no_cudnn_attention", "fairseq_apex", "fairseq")


def is_ours(implementation: str) -> bool:
    """Return whether ``implementation`` trains with ls_train."""
    return implementation.startswith("ls_train")


def graph_flag(implementation: str) -> str:
    """Return the flag that turns CUDA graphs on or off in a run with ls_train."""
    return f"--ls-cuda-graph {'on' if implementation == 'ls_train_graph' else 'off'}"


def available() -> tuple[str, ...]:
    """Return the implementations that can run here: fairseq with Apex only where Apex is installed."""
    has_apex = importlib.util.find_spec("apex") is not None
    return tuple(name for name in IMPLEMENTATIONS if name != "fairseq_apex" or has_apex)


def train(implementation: str, flags: Sequence[str], before_first_epoch: Callable[[Any], None] | None = None) -> None:
    """Train in this process with the command line ``flags``.

    Args:
        implementation: one of :data:`IMPLEMENTATIONS`.
        flags: of fairseq-train.
        before_first_epoch: called with the trainer when everything is built and before the first update.
    """
    if implementation != "fairseq_apex":
        # fairseq takes whatever of Apex it can import.
        sys.modules.update({"apex": None, "amp_C": None})  # type: ignore[dict-item]
    if implementation in ("fairseq_no_cudnn_attention", "fairseq_apex"):
        torch.backends.cuda.enable_cudnn_sdp(False)
    if is_ours(implementation):
        importlib.import_module("fairseq_plugin")
    program = importlib.import_module("fairseq_cli.train")
    if before_first_epoch is not None:
        _call_before_epochs(program, before_first_epoch)
    if is_ours(implementation):
        importlib.import_module("fairseq_plugin.cli").train(flags)
    else:
        _keep_bf16_from_meaning_tpu()
        sys.argv = ["fairseq-train", *flags]
        program.cli_main()


def main(argv: Sequence[str]) -> None:
    """Train when told to. argv: the implementation and the flags."""
    train(argv[0], argv[1:], lambda trainer: wait_for_go())
    print(PEAK, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, flush=True)


def _call_before_epochs(program: Any, function: Callable[[Any], None]) -> None:
    """Make ``fairseq_cli.train`` call ``function`` with its trainer before the first epoch."""
    train_epoch = program.train

    def call_and_train(cfg: Any, trainer: Any, *arguments: Any, **options: Any) -> Any:
        program.train = train_epoch
        function(trainer)
        return train_epoch(cfg, trainer, *arguments, **options)

    program.train = call_and_train


def _keep_bf16_from_meaning_tpu() -> None:
    """Let plain fairseq train with ``--bf16`` on a GPU, which its command line takes for a TPU's."""
    options = importlib.import_module("fairseq.options")
    parse = options.parse_args_and_arch

    def parse_without_tpu(*arguments: Any, **named: Any) -> Any:
        parsed = parse(*arguments, **named)
        for namespace in parsed if isinstance(parsed, tuple) else (parsed,):
            if getattr(namespace, "bf16", False):
                namespace.tpu = False
        return parsed

    options.parse_args_and_arch = parse_without_tpu


if __name__ == "__main__":
    main(sys.argv[1:])
