"""``--ls-token-budget``: batches of real tokens hold every sentence once, keep to the budget and come in few shapes."""

import json
import re
import shutil

import numpy as np
import pytest
from fairseq.data import FairseqDataset, iterators
from fairseq.data.data_utils import batch_by_size

from fairseq_plugin import cli
from fairseq_plugin.errors import UserError
from fairseq_plugin.packed import Buckets
from fairseq_plugin.ports import free_port
from fairseq_plugin.token_budget import fill, filled_by_tokens, sentence_sizes
from fairseq_plugin.user_dir import PLUGIN_DIR
from tests.plugin.checkpoint_bits import assert_same_bits
from tests.plugin.test_ranks import losses
from tests.plugin.test_trainer import precise_metrics, start  # noqa: F401

OPTION = "--ls-token-budget"


def wmt_sizes(count):
    """Return tokens (count, 2) of sentence pairs with lengths as in WMT14 English-German, in a random order."""
    rng = np.random.default_rng(1)
    source = np.exp(rng.normal(3.22, 0.62, count))
    target = source * np.exp(rng.normal(0.02, 0.17, count))
    return np.stack([source.clip(3, 200), target.clip(3, 220)], 1).astype(int) + 1


@pytest.mark.parametrize("max_sentences", [None, 1, 20])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("sides", [1, 2])
def test_batches_are_full_and_hold_each_sentence_once(max_sentences, multiple, sides):
    sizes, budget = wmt_sizes(3000)[:, :sides], 600
    batches = fill(sizes, budget, max_sentences, multiple)
    assert np.array_equal(np.concatenate([np.arange(3000)[part] for part in batches]), np.arange(3000))
    for part in batches:
        count = part.stop - part.start
        assert 0 < count <= (max_sentences or 3000)
        assert count < multiple or count % multiple == 0
        assert sizes[part].sum(0).max() <= budget
        more = sizes[part.start : part.stop + (multiple if count >= multiple else 1)]
        assert more.sum(0).max() > budget or len(more) > (max_sentences or 3000) or part.stop + multiple > 3000


def test_edges():
    assert fill(np.zeros((0, 2), dtype=int), 10) == []
    assert fill(np.array([[10, 3], [3, 10], [4, 0], [6, 0]]), 10) == [slice(0, 1), slice(1, 3), slice(3, 4)]
    with pytest.raises(UserError, match="--ls-token-budget: a sentence has 11 tokens; raise --max-tokens 10"):
        fill(np.array([[3, 11]]), 10)


@pytest.mark.parametrize(("max_tokens", "most", "share"), [(512, 65, 0.7), (4096, 6, 0.98), (15000, 3, 0.99)])
def test_few_shapes_serve_nearly_all_steps(max_tokens, most, share):
    """Of an epoch with lengths as in WMT14, against fairseq's batches; ``share`` of the steps have one of 4 shapes."""
    sizes = wmt_sizes(100000)
    order = np.lexsort((sizes[:, 1], sizes[:, 0]))
    fairseqs = batch_by_size(order, None, num_tokens_vec=sizes[order].max(1), max_tokens=max_tokens)
    counts = []
    for batches in (fill(sizes, max_tokens), fairseqs):
        parts = [sizes[batch] for batch in batches]
        shapes = [Buckets(max_tokens).shape(*part.sum(0)[::-1].tolist(), int(part.max()), len(part)) for part in parts]
        counts.append(np.sort(np.unique(shapes, axis=0, return_counts=True)[1])[::-1])
    ours, theirs = counts
    assert ours.sum() < theirs.sum(), "the same sentences in fewer steps"
    assert len(ours) <= most
    assert len(theirs) > max(len(ours), 30)
    assert ours[:4].sum() > share * ours.sum() > theirs[:4].sum()


def ids(iterator, shuffle=True):
    return [batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=shuffle)]


def test_an_epoch_has_each_sentence_once(start):  # noqa: F811
    """Batches of the trainer's iterator: over two epochs, of one rank and of two."""
    run = start(OPTION, "--required-batch-size-multiple", 8)
    dataset = run.trainer.task.dataset("train")
    first, second = ids(run.epoch), ids(run.epoch)
    assert sorted(sum(first, [])) == list(range(len(dataset)))
    assert first != second
    assert sorted(map(sorted, first)) == sorted(map(sorted, second))
    for batch in first:
        assert dataset.sizes[batch].sum(0).max() <= 400
        assert len(batch) % 8 == 0 or len(batch) < 8
    lengths = [int(dataset.sizes[batch].max()) for batch in first]
    plain = [int(dataset.sizes[batch].max()) for batch in ids(start().epoch)]
    assert len(first) < len(plain)
    assert np.median(lengths) > np.median(plain) + 3, "long sentences in most batches"
    options = {"max_tokens": 400, "required_batch_size_multiple": 8, "seed": 3, "disable_iterator_cache": True}
    with filled_by_tokens(run.trainer.task, keeps_order=False):
        ranks = [
            run.trainer.task.get_batch_iterator(dataset=dataset, **options, num_shards=2, shard_id=rank)
            for rank in range(2)
        ]
    shares = [ids(iterator) for iterator in ranks]
    assert sorted(sum(shares[0] + shares[1], [])) == list(range(len(dataset)))
    assert sorted(map(sorted, first)) == sorted(sorted(batch) for batch in shares[0] + shares[1] if batch)
    with filled_by_tokens(run.trainer.task, keeps_order=False):
        later = run.trainer.task.get_batch_iterator(dataset=dataset, **options, epoch=2)
    assert sorted(map(sorted, ids(later))) != sorted(map(sorted, first)), "batches that are made anew are others"


@pytest.mark.parametrize("keeps_order", [False, True])
def test_batches_that_a_task_makes_when_an_epoch_begins_are_filled_too(keeps_order):
    """As translation_multi_simple_epoch does; an iterator that comes again is told once."""
    sizes = wmt_sizes(300)
    dataset = FairseqDataset()
    dataset.sizes, dataset.num_tokens_vec, dataset.batches = sizes, lambda indices: sizes[indices].max(1), []

    class Task:
        def get_batch_iterator(self, dataset, max_tokens, seed, epoch=1):
            def sampler(dataset, epoch):
                return dataset.batch_by_size(np.arange(300), max_tokens=max_tokens)

            known = dataset.batches
            if not known:
                known.append(iterators.EpochBatchIterator(dataset, None, sampler, seed=seed, epoch=epoch))
            return known[0]

    task = Task()
    with filled_by_tokens(task, keeps_order):
        found = [task.get_batch_iterator(dataset, 600, seed=1), task.get_batch_iterator(dataset, 600, seed=1)][1]
    epochs = [found.batch_sampler(dataset, epoch) for epoch in (1, 2, 1)]
    for batches in epochs:
        assert sorted(np.concatenate(batches)) == list(range(300))
        assert max(sizes[batch].sum(0).max() for batch in batches) <= 600
        assert np.mean([sizes[batch].sum(0).max() for batch in batches]) > 500, "filled by real tokens"
    first, second, again = ([batch.tolist() for batch in batches] for batches in epochs)
    assert first == again
    assert (first == second) is keeps_order
    assert "batch_by_size" not in vars(dataset), "other uses of the data set"


def test_data_without_sentences_or_sizes():
    dataset = FairseqDataset()
    with pytest.raises(UserError, match="--ls-x: a FairseqDataset does not know the tokens of its sentences"):
        sentence_sizes(dataset, "--ls-x")
    for sizes, shape in ([], (0, 1)), (np.zeros((0, 2)), (0, 2)), ([3, 4], (2, 1)), (np.ones((2, 2)), (2, 2)):
        dataset.sizes = sizes
        assert sentence_sizes(dataset, "--ls-x").shape == shape


def test_no_sentence_is_short_enough(start):  # noqa: F811
    with pytest.raises(Exception, match="The dataset is empty"):
        start(OPTION, "--max-source-positions", 1, "--max-target-positions", 1)


def test_other_batches_are_fairseqs(start):  # noqa: F811
    """Validation, and training by a step that computes padding."""
    run, plain = start(OPTION, "--valid-subset", "train"), start("--valid-subset", "train")
    for kind in (run, plain):
        kind.trainer.task.load_dataset("train")
    batches = [ids(kind.trainer.get_valid_iterator("train"), shuffle=False) for kind in (run, plain)]
    assert batches[0] == batches[1]


def test_without_the_plugins_step_it_says_so(start, caplog):  # noqa: F811
    caplog.set_level("INFO")
    run = start(OPTION, "--ls-shard-update", "--use-bmuf")
    for option in (OPTION, "--ls-shard-update"):
        assert f"{option}: without effect" in caplog.text
    assert sorted(map(sorted, ids(run.epoch))) == sorted(map(sorted, ids(start().epoch)))


def test_a_curriculum_goes_from_short_to_long(start):  # noqa: F811
    run = start(OPTION, "--curriculum", 1)
    longest = [run.trainer.task.dataset("train").sizes[batch, 0].max() for batch in ids(run.epoch, shuffle=False)]
    assert longest == sorted(longest)


def test_refused(start):  # noqa: F811
    with pytest.raises(UserError, match="--num-batch-buckets"):
        start(OPTION, "--num-batch-buckets", 2)
    task = start().trainer.task
    with pytest.raises(UserError, match="--max-tokens is missing"), filled_by_tokens(task, keeps_order=False):
        task.get_batch_iterator(dataset=task.dataset("train"), max_sentences=4, disable_iterator_cache=True)


@pytest.fixture(scope="module")
def arguments(train_arguments):
    logs = ["--log-format", "json", "--log-interval", 1, "--disable-validation", "--seed", 2]
    return [*train_arguments, *logs, OPTION, "--max-tokens", 1000, "--dropout", 0]


def test_a_run_resumes_within_any_epoch(run_cli, plain, arguments, tmp_path):
    """Stopped in the second epoch, it ends with the bits of the whole run; --user-dir gives the launcher's losses."""
    command, save = [*arguments, "--max-update", 22], tmp_path / "save"
    out = run_cli(cli.train, *command, "--save-dir", save, "--save-interval-updates", 17).check().out
    whole = losses(out)
    assert len(whole) == 22
    assert np.isfinite(list(whole.values())).all()
    (checkpoint,) = save.glob("checkpoint_2_17.pt")
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copy(checkpoint, resumed / "checkpoint_last.pt")
    again = run_cli(plain["train"], "--user-dir", PLUGIN_DIR, *command, "--save-dir", resumed).check().out
    assert list(losses(again)) == [18, 19, 20, 21, 22]
    assert losses(again).items() <= whole.items()
    assert_same_bits(save / "checkpoint_last.pt", resumed / "checkpoint_last.pt")


def test_two_ranks_equal_one(run_cli, arguments, tmp_path):
    command = [*arguments, "--max-update", 5, "--no-save"]
    alone = losses(run_cli(cli.train, *command, "--update-freq", 2).check().out)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = ["--distributed-world-size", 2, "--distributed-backend", "gloo"]
    jobs = [
        run_cli.start(cli.train, *command, *ranks, env={**env, "RANK": str(rank)}, cwd=tmp_path) for rank in range(2)
    ]
    both = losses([job.wait(120).check() for job in jobs][0].out)
    assert both == pytest.approx(alone, rel=1e-5)
    words = [json.loads(line)["wpb"] for line in re.findall(r"\| train_inner \| (\{.*\})", jobs[0].text(".out"))]
    assert len(words) == 5
