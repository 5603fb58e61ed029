"""Batches from the data loader's workers: what arrives is what fairseq collated, and nobody waits for a dead reader."""

import copy
import functools
import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from fairseq_plugin.loading import Collate, LoadedBatch, send_whole
from fairseq_plugin.packed import Plan, pack_batch
from tests import forks
from tests.plugin.test_packed import PAD, sample
from tests.plugin.test_trainer import start  # noqa: F401

TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.int64, torch.int32, torch.uint8)},
    **{str(dtype): torch.rand(2, 3).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.complex64)},
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4, dtype=torch.int16),
    "window": torch.arange(20)[3:9],
    "transposed": torch.rand(3, 5).t(),
    "expanded": torch.rand(3, 1).expand(3, 4),
    "large": torch.arange(1 << 18),
    "sparse": torch.eye(3).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "trainable": torch.rand(2, requires_grad=True),
}
OTHERS = {"id": None, "nsentences": 3, "nested": {"list": [torch.tensor([1]), "text"], "tuple": (1, torch.ones(2))}}
CONTENT = {**TENSORS, **OTHERS}


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.layout) == (expected.dtype, expected.layout)
        assert found.requires_grad == expected.requires_grad
        if expected.is_nested:
            assert_same(found.unbind(), expected.unbind())
            return
        assert found.shape == expected.shape
        assert torch.equal(found.to_dense(), expected.to_dense())
        if expected.layout == torch.strided:
            assert found.stride() == expected.stride()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    else:
        assert found == expected
        assert type(found) is type(expected)


def load(batches, packing=None, workers=1):
    """What a data loader gives whose worker collates ``batches``."""
    collate = Collate(lambda indices: batches[indices[0]], packing)
    return list(DataLoader(range(len(batches)), batch_size=1, collate_fn=collate, num_workers=workers))


def test_any_content_arrives():
    (found,) = load([CONTENT])
    assert isinstance(found, LoadedBatch)
    assert found.packed is None
    assert_same(found, CONTENT)
    found["bool"].fill_(False)  # not a window of something that is read only


@pytest.mark.parametrize("batch", [None, {}, [torch.ones(2)], torch.ones(2)])
def test_what_is_no_batch_is_left_alone(batch):
    (found,) = load([batch])
    assert type(found) is type(batch)
    assert_same(found, batch)


def test_without_workers_batches_are_fairseqs():
    batch = sample([3, 9, 2], [4, 7, 1])
    assert load([batch], (PAD, 0), workers=0)[0] is batch


def test_small_tensors_travel_without_files_and_are_not_pinned(monkeypatch):
    batch = sample([3, 9, 2], [4, 7, 1])
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", None)
    (found,) = load([batch])
    assert_same(found, batch)
    assert pin_memory(found) is found


@pytest.mark.timeout(60)
def test_what_cannot_travel_is_an_error():
    """And nobody waits for it."""
    with pytest.raises(Exception, match="(?s)Caught .* in DataLoader worker process 0.*lambda"):
        load([{"id": torch.tensor([1]), "note": lambda: None}])


def test_copies_and_files_are_those_of_dictionaries(tmp_path):
    batch = LoadedBatch(sample([3, 9, 2], [4, 7, 1]))
    assert copy.copy(batch)["target"] is batch["target"]
    torch.save(batch, tmp_path / "batch.pt")
    assert_same(torch.load(tmp_path / "batch.pt", weights_only=False), dict(batch))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("is_language_model", [False, True])
def test_workers_pack_as_the_step_does(prefix, is_language_model):
    batch = sample([3, 9, 2], [4, 7, 1])
    if is_language_model:
        batch["net_input"] = {"src_tokens": batch["target"], "src_lengths": torch.tensor([4, 7, 1])}
    (found,) = load([batch], (PAD, prefix))
    assert found.packed is not None
    plan = Plan(5, 0.25, 2.0)
    (one, counted), (other, expected) = (
        pack_batch(given, PAD, torch.device("cpu"), prefix, plan) for given in (found, batch)
    )
    assert counted == expected
    for name, value in vars(other).items():
        for mine, theirs in zip(*map(tensors, (getattr(one, name), value)), strict=True):
            assert_same(mine, theirs)
    again, _ = pack_batch(found, PAD, torch.device("cpu"), prefix, Plan(6, 1.0, 1.0))
    assert (one.seed.item(), again.seed.item()) == (5, 6), "the numbers of one update must not reach another's batch"


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    members = vars(value).values() if hasattr(value, "__dict__") else value if isinstance(value, tuple) else ()
    return [member for member in members if isinstance(member, torch.Tensor)]


def test_other_options_pack_anew():
    batch = sample([3, 9, 2], [4, 7, 1])
    (found,) = load([batch], (PAD, 2))
    assert pack_batch(found, PAD, torch.device("cpu"))[1] == 12


def test_a_batch_that_the_step_refuses_is_refused_there():
    batch = sample([3], [4])
    batch["net_input"]["lang_id"] = torch.tensor([0])
    (found,) = load([batch], (PAD, 0))
    with pytest.raises(ValueError, match=r"the batch has the inputs \['lang_id'\]"):
        pack_batch(found, PAD, torch.device("cpu"))


def test_an_iterator_is_told_once():
    class Iterator:
        collate_fn = functools.partial(dict)

    iterator = Iterator()
    original = iterator.collate_fn
    for packing in (None, (PAD, 1)):
        send_whole(iterator, packing)
        assert iterator.collate_fn.collate is original
        assert iterator.collate_fn.packing == packing


@pytest.mark.parametrize("options", [[], ["--update-freq", 2], ["--ls-token-budget"]])
def test_a_run_with_workers_equals_one_without(start, options, monkeypatch):  # noqa: F811
    packed = []

    def noted(sample, *rest):
        packed.append(getattr(sample, "packed", None) is not None)
        return pack_batch(sample, *rest)

    monkeypatch.setattr("fairseq_plugin.device_step.pack_batch", noted)
    states, logs = [], []
    for workers in (0, 2):
        packed.clear()
        run = start("--num-workers", workers, *options)
        logs.append(run.steps(6))
        states.append(run.state())
        assert packed == [workers > 0] * len(packed)
    assert logs[0] == logs[1]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_fairseqs_own_step_gets_fairseqs_batches(start):  # noqa: F811
    run = start("--num-workers", 1, "--optimizer", "adam")
    assert not run.trainer.is_lean
    assert not isinstance(run.epoch.collate_fn, Collate)


def test_workers_end_with_a_run_that_was_killed(tmp_path):
    """Although they have more to say than the pipe holds."""
    note = tmp_path / "worker"

    def collate(indices):
        note.write_text(str(os.getpid()))
        return {"target": torch.zeros(100_000, dtype=torch.int64)}

    def train():
        loader = DataLoader(range(100), batch_size=1, collate_fn=Collate(collate, None), num_workers=1)
        iterator = iter(loader)
        next(iterator)
        time.sleep(1)  # the next batches do not fit
        os.kill(os.getpid(), signal.SIGKILL)

    with open(os.devnull, "w") as null:
        os.waitpid(forks.fork(train, *[null.fileno()] * 3), 0)
    worker = int(note.read_text())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker goes on without the run")
