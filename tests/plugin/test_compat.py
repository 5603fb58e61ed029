"""Every mend of fairseq_plugin.compat: what broke works, and nothing else changes."""

import argparse
import sys

import numpy as np
import pytest

from fairseq_plugin import compat
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
