"""``--ls-balance-ranks``: an update's batches are about equally large, every batch comes once an epoch."""

import json
import re
import shutil

import numpy as np
import pytest
from fairseq.data import iterators
from fairseq.data.data_utils import batch_by_size

from fairseq_plugin import cli
from fairseq_plugin.errors import UserError
from fairseq_plugin.ports import free_port
from fairseq_plugin.rank_balance import WINDOW, balance, balanced, sizes_of
from tests.plugin.checkpoint_bits import assert_same_bits
from tests.plugin.test_ranks import losses
from tests.plugin.test_token_budget import ids, wmt_sizes
from tests.plugin.test_trainer import precise_metrics, start  # noqa: F401

OPTION = "--ls-balance-ranks"


class Sentences:
    """What the order needs of a data set: tokens of each sentence on each side."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)


def waiting(works, ranks):
    """Return the share of the time that ranks wait for the slowest one."""
    updates = works[: len(works) // ranks * ranks].reshape(-1, ranks)
    return 1 - updates.mean() / updates.max(1).mean()


@pytest.mark.parametrize("max_tokens", [512, 4096, 15000])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_hardly_wait(max_tokens, ranks):
    """Lengths as in WMT14, in fairseq's batches."""
    sizes = wmt_sizes(60000)
    order = np.lexsort((sizes[:, 1], sizes[:, 0]))
    batches = batch_by_size(order, None, num_tokens_vec=sizes[order].max(1), max_tokens=max_tokens)
    np.random.default_rng(0).shuffle(batches)
    works = sizes_of(Sentences(sizes), batches, max_tokens)
    assert waiting(works, ranks) > 0.03
    assert waiting(works[balanced(works, ranks, (1, 1))], ranks) < 0.02


@pytest.mark.parametrize("count", [0, 1, 3, 4, 127, 256, 257, 600])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_batch_comes_once_and_stays_within_its_window(count, group):
    works = np.random.default_rng(2).random(count)
    order = balanced(works, group, (3, 1))
    assert sorted(order) == list(range(count))
    window = WINDOW * group
    if group == 1:
        assert order.tolist() == list(range(count))
    assert (order // window == np.arange(count) // window).all()
    whole = count // group * group
    assert order[whole:].tolist() == list(range(whole, count)), "an incomplete update stays the last one"
    assert order.tolist() == balanced(works, group, (3, 1)).tolist()
    if count > 100 and group > 1:
        assert order.tolist() != balanced(works, group, (3, 2)).tolist()


def test_target_tokens_and_long_sequences_weigh_more_and_one_side_is_enough():
    pairs = Sentences(np.array([[64, 32], [32, 64], [64, 64], [250, 250]]))
    works = sizes_of(pairs, [[0], [1], [0, 1], [2] * 4, [3]], 512)
    assert works[:3].round(3).tolist() == [336, 336, 672], "rows go up to 64 and 128"
    assert works[0] < works[1], "of one shape, the one with more target tokens"
    assert works[3] < works[4], "of one number of tokens, the one with longer sequences"
    one = sizes_of(Sentences(np.array([10, 200])), [[0], [1]], 512)
    assert one[0] < one[1]


def shares(run, ranks, epoch=1):
    """Return the sentences of each batch that each rank gets in an epoch."""
    iterator = run.epoch
    found = []
    for rank in range(ranks):
        iterator.num_shards, iterator.shard_id = ranks, rank
        found.append([list(batch) for batch in iterator.ordered_batches(epoch, False, True)])
    return found


def test_ranks_and_micro_batches_share_the_same_updates(start):  # noqa: F811
    """Two ranks get in each update what one gets with twice the ``--update-freq``; an odd one out gets nothing."""
    one, two = start(OPTION, "--update-freq", 2), start(OPTION)
    (alone,), pair = shares(one, 1), shares(two, 2)
    assert len(pair[0]) == len(pair[1]) == -(-len(alone) // 2)
    dealt = [batch for update in zip(*pair) for batch in update]
    assert [batch for batch in dealt if batch] == alone
    plain = [list(batch) for batch in start().epoch.ordered_batches(1, False, True)]
    assert sorted(alone) == sorted(plain)
    assert alone != plain
    assert shares(start(OPTION), 1) == [plain], "one batch an update has nothing to balance"
    assert shares(two, 2, epoch=2) != pair


def test_an_iterator_is_balanced_once_and_goes_on_within_an_epoch(start):  # noqa: F811
    run = start(OPTION, "--update-freq", 2)
    again = run.trainer.get_train_iterator(1, load_dataset=False)
    assert again.ordered_batches(1, False, True) == run.epoch.ordered_batches(1, False, True)
    whole = ids(run.epoch)
    other = start(OPTION, "--update-freq", 2).epoch
    other.load_state_dict({"epoch": 1, "iterations_in_epoch": 4, "shuffle": True})
    assert ids(other) == whole[4:]
    assert isinstance(other, iterators.EpochBatchIterator)


def test_a_curriculum_keeps_its_order(start):  # noqa: F811
    orders = [ids(run.epoch, shuffle=False) for run in (start(OPTION, "--update-freq", 2), start("--update-freq", 2))]
    assert orders[0] == orders[1]


def test_refused(start):  # noqa: F811
    with pytest.raises(UserError, match="--ls-balance-ranks: --grouped-shuffling"):
        start(OPTION, "--grouped-shuffling")


@pytest.mark.parametrize(
    "kind", [iterators.GroupedEpochBatchIterator, iterators.StreamingEpochBatchIterator, iterators.EpochBatchIterating]
)
def test_iterators_with_an_order_of_their_own_are_refused(kind):
    iterator = kind.__new__(kind)
    iterator.dataset = Sentences([1, 2])
    with pytest.raises(UserError, match="--ls-balance-ranks: this task orders the batches of each rank itself"):
        balance(iterator, 100, [1])


@pytest.fixture(scope="module")
def arguments(train_arguments):
    logs = ["--log-format", "json", "--log-interval", 1, "--disable-validation", "--seed", 2]
    return [*train_arguments, *logs, OPTION, "--dropout", 0]


def test_two_ranks_train_as_one(run_cli, arguments, tmp_path):
    """The launcher's losses with two ranks are those of one with twice the ``--update-freq``; a run resumes exactly."""
    command, save = [*arguments, "--max-update", 5], tmp_path / "save"
    out = run_cli(cli.train, *command, "--update-freq", 2, "--save-dir", save, "--save-interval-updates", 3).check().out
    alone = losses(out)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = ["--distributed-world-size", 2, "--distributed-backend", "gloo", "--no-save"]
    jobs = [
        run_cli.start(cli.train, *command, *ranks, env={**env, "RANK": str(rank)}, cwd=tmp_path) for rank in range(2)
    ]
    both = losses([job.wait(120).check() for job in jobs][0].out)
    assert both == pytest.approx(alone, rel=1e-5)
    words = [
        [json.loads(line)["wpb"] for line in re.findall(r"\| train_inner \| (\{.*\})", text)]
        for text in (out, jobs[0].text(".out"))
    ]
    assert len(words[0]) == 5
    assert words[0] == words[1]
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copy(save / "checkpoint_1_3.pt", resumed / "checkpoint_last.pt")
    again = run_cli(cli.train, *command, "--update-freq", 2, "--save-dir", resumed).check().out
    assert losses(again).items() == {update: loss for update, loss in alone.items() if update > 3}.items()
    assert_same_bits(save / "checkpoint_last.pt", resumed / "checkpoint_last.pt")
