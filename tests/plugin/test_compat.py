"""Every mend of fairseq_plugin.compat: what broke works, and nothing else changes."""

import argparse
import contextlib
import random
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fairseq_plugin import compat, ports
from fairseq_plugin.errors import UserError


def test_applied_once_and_explained():
    from fairseq import options

    in_force = compat.apply()
    parse = options.parse_args_and_arch
    assert compat.apply() == in_force
    assert options.parse_args_and_arch is parse
    assert set(in_force) <= set(compat.reasons())
    assert all(len(reason) > 30 for reason in compat.reasons().values())


@pytest.mark.parametrize("extra, tpu", [([], False), (["--tpu"], True)])
def test_bf16_does_not_mean_tpu(monkeypatch, tmp_path, extra, tpu):
    from fairseq import options

    arguments = [str(tmp_path), "--arch", "transformer_tiny", "--bf16", *extra]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    for given in (None, arguments):
        args = options.parse_args_and_arch(options.get_training_parser(), given)
        assert args.bf16
        assert args.tpu is tpu


def test_batch_buckets():
    from fairseq.data import bucket_pad_length_dataset, data_utils

    sizes = np.array([1, 2, 3, 4, 5, 6, 7, 100])
    assert data_utils.get_buckets(sizes, 2).tolist() == [4, 100]
    assert bucket_pad_length_dataset.get_buckets is data_utils.get_buckets
    assert np.compat.long is np.int64


def test_unknown_architecture_is_named():
    from fairseq import models

    with pytest.raises(UserError, match="'no_such_arch' is not registered"):
        models.build_model(argparse.Namespace(arch="no_such_arch", braces="{1}"), task=None)


@pytest.mark.parametrize("multiple, lost", [(8, 5), (1, 0)])
def test_dropped_sentences_are_counted_not_restored(caplog, multiple, lost):
    from fairseq.data import data_utils

    sizes = np.full(21, 5)
    with caplog.at_level("WARNING"):
        batches = data_utils.batch_by_size(
            np.arange(21), lambda index: sizes[index], sizes, max_tokens=80, required_batch_size_multiple=multiple
        )
    assert sum(map(len, batches)) == 21 - lost
    assert (f"drops {lost} of 21" in caplog.text) == bool(lost)


def test_missing_fairseq_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairseq", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ls-train\[fairseq\]'"):
        compat.import_fairseq()


class TestPort:
    """Ranks of one host meet where nothing listens and no outgoing connection of another process can be."""

    @pytest.fixture
    def infer(self, monkeypatch):
        from fairseq.distributed import utils as distributed_utils

        compat.apply()
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        for name in ("MASTER_ADDR", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
            monkeypatch.delenv(name, raising=False)
        kept = {"distributed_init_method": None, "distributed_world_size": 2, "distributed_no_spawn": False}
        kept |= {"tpu": False, "pipeline_model_parallel": False}

        def run(port: int) -> str:
            cfg = SimpleNamespace(**kept, distributed_port=port)
            monkeypatch.setattr(distributed_utils, "open_dict", contextlib.nullcontext)
            distributed_utils.infer_init_method(cfg, force_distributed=True)
            return cfg.distributed_init_method

        return run

    def test_fairseq_takes_a_free_one(self, infer, monkeypatch):
        monkeypatch.setattr(compat, "free_port", lambda: 12345)
        assert infer(-1) == "tcp://localhost:12345"
        assert infer(4321) == "tcp://localhost:4321"

    def test_ranks_of_slurm_find_one_another(self, infer, monkeypatch):
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        assert infer(-1) == infer(-1)

    def test_is_free_and_not_for_outgoing_connections(self, monkeypatch):
        with socket.socket() as taken, socket.socket() as probe:
            taken.bind(("", 0))
            port = taken.getsockname()[1]
            monkeypatch.setattr(random.SystemRandom, "sample", lambda self, numbers, count: [port, *numbers[:50]])
            found = ports.free_port()
            assert 10000 <= found < 32768
            probe.bind(("localhost", found))
            monkeypatch.setattr(random.SystemRandom, "sample", lambda self, numbers, count: [port])
            with pytest.raises(UserError, match="--distributed-port"):
                ports.free_port()
