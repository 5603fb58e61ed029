"""Flags that are fairseq's alone: each reaches its code with the value that plain fairseq's command would give it.

What fairseq does with them needs a package or a cluster that is not here (wandb, aim, plasma, azureml, several nodes),
or has no effect on these models. ``flags.py`` names this test for exactly these flags.
"""

import contextlib
import importlib
import sys
from unittest.mock import MagicMock

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils

from fairseq_plugin import cli, flags

TRAIN = {
    "--aim-repo": "somewhere",
    "--aim-run-hash": "1f",
    "--wandb-project": "project",
    "--azureml-logging": True,
    "--reset-logging": True,
    "--suppress-crashes": True,
    "--profile": True,
    "--use-plasma-view": True,
    "--plasma-path": "/tmp/socket",
    "--eval-bleu-detok-args": '{"lang": "de"}',
    "--eval-tokenized-bleu": True,
    "--eval-bleu-remove-bpe": "@@ ",
    "--distributed-num-procs": 3,
    "--distributed-port": 1234,
    "--local_rank": 2,
    "--on-cpu-convert-precision": True,
    "--ema-seed-model": "seed.pt",
    "--data-buffer-size": 7,
    "--fixed-validation-seed": 11,
    "--load-checkpoint-on-all-dp-ranks": True,
    "--write-checkpoints-asynchronously": True,
    "--checkpoint-shard-count": 3,
    "--nprocs-per-node": 2,
    "--fix-batches-to-gpus": True,
    "--find-unused-parameters": True,
    "--gradient-as-bucket-view": True,
    "--broadcast-buffers": True,
    "--fast-stat-sync": True,
    "--all-gather-list-size": 4096,
    "--grouped-shuffling": True,
    "--update-epoch-batch-itr": True,
}
GENERATION = {
    "--pad": 5,
    "--eos": 6,
    "--unk": 7,
    "--beam-mt": 3,
    "--max-len-a-mt": 1.5,
    "--max-len-b-mt": 9,
    "--lenpen-mt": 0.7,
    "--print-step": True,
    "--iter-decode-eos-penalty": 0.5,
    "--iter-decode-max-iter": 4,
    "--iter-decode-force-max-iter": True,
    "--iter-decode-with-beam": 2,
    "--iter-decode-with-external-reranker": True,
    "--retain-iter-history": True,
    "--decoding-format": "vote",
    "--no-early-stop": True,
    "--no-beamable-mm": True,
    "--sacrebleu": True,
    "--eos-token": "</s>",
    "--tokenizer": "moses",
}


SIDES = ["--source-lang", "en", "--target-lang", "de"]


def words(given: dict[str, object]) -> list[str]:
    parts: list[str] = []
    for flag, value in given.items():
        parts += [flag] if value is True and flag != "--update-epoch-batch-itr" else [flag, str(value)]
    return parts


def configuration(monkeypatch, module: str, main, arguments: list[object]):
    """Return the configuration with which a command's ``main`` would start."""
    seen = []
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    with monkeypatch.context() as patch:
        if module == "fairseq_cli.generate":
            patch.setattr(importlib.import_module(module), "main", seen.append)
        else:
            patch.setattr(distributed_utils, "call_main", lambda cfg, main, **_: seen.append(cfg))
            # --use-plasma-view and --profile start these before.
            patch.setattr("fairseq_cli.train.PlasmaStore", MagicMock())
            patch.setattr("fairseq.data.plasma_utils.PYARROW_AVAILABLE", True)
            for name in ("cuda.profiler.profile", "autograd.profiler.emit_nvtx"):
                patch.setattr(f"torch.{name}", contextlib.nullcontext)
        main()
    (found,) = seen
    return found if module != "fairseq_cli.generate" else convert_namespace_to_omegaconf(found)


@pytest.mark.parametrize("command", ["train", "generate"])
def test_value_is_that_of_plain_fairseq(monkeypatch, plain, train_arguments, data_bin, command):
    given = TRAIN if command == "train" else GENERATION
    arguments = train_arguments if command == "train" else [data_bin, "--path", "some.pt", *SIDES]
    module = f"fairseq_cli.{command}"
    ours, theirs, without = (
        configuration(monkeypatch, module, main, [*arguments, *extra])
        for main, extra in (
            (getattr(cli, command), words(given)),
            (plain[command], ["--user-dir", cli.user_dir.PLUGIN_DIR, *words(given)]),
            (getattr(cli, command), []),
        )
    )
    sections = [name for name in ours if name not in ("model", "_name") and ours[name] is not None]
    assert {name: ours[name] for name in sections} == {name: theirs[name] for name in sections}
    for flag, value in given.items():
        if flag == "--tokenizer":
            assert ours.tokenizer._name == value
            assert without.tokenizer is None
            continue
        name = "device_id" if flag == "--local_rank" else flag[2:].replace("-", "_")
        (section,) = [part for part in sections if hasattr(ours[part], "keys") and name in ours[part]][:1]
        assert ours[section][name] == value != without[section][name], flag


def test_seed_flag(monkeypatch, data_bin):
    """fairseq's parser overwrites it, whatever is given."""
    monkeypatch.setattr(sys, "argv", ["command"])
    words = [str(data_bin), "--path", "some.pt", "--no-seed-provided"]
    args = options.parse_args_and_arch(options.get_generation_parser(), words)
    assert not args.no_seed_provided


def test_the_list_names_exactly_these():
    (group,) = [group for group in flags.HONOURED if "test_value_is_that_of_plain" in group.test]
    assert set(group.flags) == {*TRAIN, *GENERATION}
