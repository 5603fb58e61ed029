"""The sum of flat gradients goes out in pieces, each when its last gradient is written."""

import contextlib
import random

import pytest
import torch

from ls_train.optim import all_reduce
from ls_train.optim.all_reduce import FlatAllReduce
from ls_train.params import FlatParameters, grad_slot


@pytest.fixture
def sent(monkeypatch):
    """What was sent: one list of gradient values a piece. The other rank has the same gradients."""
    pieces = []

    class Work:
        def wait(self):
            pass

    def send(tensor, group, async_op):
        assert async_op
        pieces.append(tensor.tolist())
        tensor.mul_(2)
        return Work()

    monkeypatch.setattr(all_reduce.dist, "all_reduce", send)
    monkeypatch.setattr(all_reduce.dist, "broadcast", lambda order, group, group_src: None)
    return pieces


@pytest.fixture
def flat():
    flat = FlatParameters([torch.nn.Parameter(torch.zeros(64)) for _ in range(4)])
    flat.direct_grads = True
    return flat


def write(flat, *order):
    """Write slots as layers do: the first time overwriting, then adding."""
    for index in order:
        slot = grad_slot(flat.buffers[0].params[index])
        if slot.written:
            slot.tensor.add_(1.0)
        else:
            slot.tensor.fill_(index)
        slot.commit()


def update(flat, reduce, order, sent):
    """Do one backward; return how many pieces had gone out after each write."""
    flat.zero_grad()
    sent.clear()
    reduce.start()
    counts = []
    for index in order:
        write(flat, index)
        counts.append(len(sent))
    reduce.finish(reduce.end())
    return counts


@pytest.mark.parametrize("pieces", [1, 2, 4, 8, 50])
def test_pieces_cover_everything_and_a_large_slot_is_one(flat, pieces):
    """A table of embeddings, complete at the end of the backward, does not keep other gradients waiting."""
    sizes = [1920, *[64] * 120, 128]
    flat = FlatParameters([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
    lengths = [piece.tensor.numel() for piece in FlatAllReduce(flat.buffers, pieces=pieces)._pieces]
    assert sum(lengths) == flat.buffers[0].grad.numel() == sum(sizes)
    assert min(lengths) > 0
    if pieces > 4:
        assert lengths[0] == 1920
        assert max(lengths[1:]) <= 2 * sum(sizes) / pieces
    else:
        assert len(lengths) == pieces
        assert max(lengths) - min(lengths) <= 128


def test_pieces_go_out_while_gradients_come(flat, sent):
    """The first backward shows that slot 0 has two writers; from the second on its piece waits for both."""
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    order = (0, 3, 2, 1, 0)
    assert update(flat, reduce, order, sent) == [0, 0, 0, 0, 0]
    assert len(sent) == 4
    for _ in range(2):
        assert update(flat, reduce, order, sent) == [0, 1, 2, 3, 4]
        assert [piece[0] for piece in sent] == [3.0, 2.0, 1.0, 1.0]
        assert [param.grad[0].item() for param in flat.buffers[0].params] == [2.0, 2.0, 4.0, 6.0]


def test_gradients_of_autograd_are_sent_at_the_end(flat, sent):
    reduce = FlatAllReduce(flat.buffers, pieces=2)
    for _ in range(2):
        flat.zero_grad()
        sent.clear()
        reduce.start()
        flat.buffers[0].params[3].grad = torch.full((64,), 7.0)
        write(flat, 2, 1, 0)
        early = len(sent)
        reduce.finish(reduce.end())
        assert flat.buffers[0].grad.view(4, 64)[:, 0].tolist() == [0.0, 2.0, 4.0, 14.0]
    assert early == 1


def test_one_write_too_many(flat, sent):
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    update(flat, reduce, (3, 2, 1, 0), sent)
    with pytest.raises(RuntimeError, match="written after it was sent"):
        update(flat, reduce, (3, 2, 3), sent)
    reduce.stop()
    assert flat.buffers[0].listeners == []


def test_unwritten_slots_and_few_slots(flat, sent):
    reduce = FlatAllReduce(flat.buffers, pieces=9)
    update(flat, reduce, (3, 1), sent)
    assert update(flat, reduce, (3, 1), sent) == [1, 2]
    assert len(sent) == 4
    assert flat.buffers[0].params[0].grad is None


def test_a_piece_waits_for_those_before_it(flat, sent):
    """Later backwards in any order, with writes that are missing or more, send in the order of the first one."""
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    update(flat, reduce, (2, 3, 0, 1), sent)
    assert update(flat, reduce, (3, 2, 1, 0), sent) == [0, 2, 2, 4]
    assert update(flat, reduce, (1, 0, 3), sent) == [0, 0, 0]
    assert update(flat, reduce, (1, 0, 2, 3), sent) == [0, 0, 0, 0]
    for seed in range(10):
        order = random.Random(seed).sample(range(4), 4)
        update(flat, reduce, order, sent)
        assert [piece[0] for piece in sent] == [2.0, 3.0, 0.0, 1.0]


def test_order_is_the_first_ranks(flat, sent, monkeypatch):
    first = [1, 3, 0, 2]
    monkeypatch.setattr(all_reduce.dist, "broadcast", lambda order, **_: order.copy_(torch.tensor(first)))
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    for order in ((3, 2, 1, 0), (3, 2, 1, 0), (1, 3, 0, 2)):
        update(flat, reduce, order, sent)
        assert [piece[0] for piece in sent] == first


class Marks:
    """Makes marks that note how many writes had been seen, and which of them work waits for."""

    def __init__(self, flat):
        self.places, self.waiting, self.writes = [], None, 0
        flat.buffers[0].listeners.append(self.count)

    def count(self, slot):
        self.writes += 1

    def __call__(self):
        marks = self

        class Mark:
            def record(self):
                self.place = marks.writes
                marks.places.append(self.place)

            @contextlib.contextmanager
            def reached(self):
                marks.waiting = self.place
                yield
                marks.waiting = None

        return Mark()


def test_captured_backward_is_marked(flat, sent, monkeypatch):
    """Nothing leaves during a capture; after each replay pieces leave in order, each behind its own last write."""
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    order = (0, 3, 2, 1, 0)
    marks = Marks(flat)  # counts a write before the sum hears of it
    update(flat, reduce, order, sent)
    waits = []
    send = all_reduce.dist.all_reduce
    monkeypatch.setattr(all_reduce.dist, "all_reduce", lambda *a, **k: waits.append(marks.waiting) or send(*a, **k))
    for is_last in (True, False):
        flat.zero_grad()
        sent.clear()
        marks.writes = 0
        reduce.start(is_last, marks)
        write(flat, *order)
        captured = reduce.end()
        assert sent == []
        assert marks.places[-4:] == [2, 3, 4, 5]
        for _ in range(2):
            waits.clear()
            sent.clear()
            reduce.finish(captured)
            assert waits == [2, 3, 4, 5]
            assert len(sent) == 4
    assert update(flat, reduce, order, sent) == [0, 1, 2, 3, 4]
    assert waits[-4:] == [None] * 4


def test_capture_that_lacks_a_write_or_has_one_more(flat, sent):
    """What is never ready leaves without a mark, at its place; one write too many makes the capture fail."""
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    update(flat, reduce, (3, 2, 1, 0), sent)
    reduce.start(True, Marks(flat))
    write(flat, 3, 1, 0)
    captured = reduce.end()
    assert sorted(captured) == [0, 1, 3]
    sent.clear()
    reduce.finish(captured)
    assert len(sent) == 4
    update(flat, reduce, (3, 2, 1, 0), sent)
    reduce.start(True, Marks(flat))
    with pytest.raises(RuntimeError, match="written after it was sent"):
        write(flat, 3, 2, 3)
    # The same call runs eagerly, from the beginning.
    assert update(flat, reduce, (3, 2, 1, 0), sent) == [1, 2, 3, 4]


def test_only_the_last_backward_sends(flat, sent):
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    flat.zero_grad()
    for is_last, early in ((False, 0), (True, 0), (False, 0), (True, 4)):
        reduce.start(is_last)
        write(flat, 3, 2, 1, 0)
        assert len(sent) == early
        marks = reduce.end()
        if is_last:
            reduce.finish(marks)
            assert len(sent) == 4
            sent.clear()


def test_sums_are_awaited_as_they_arrive(flat, monkeypatch):
    """In the order in which they were sent, each once and no other with it; what is left waits at the end."""
    awaited = []

    class Work:
        def __init__(self, tensor):
            self.part = (tensor.data_ptr() - flat.buffers[0].grad.data_ptr()) // (64 * 4)

        def wait(self):
            awaited.append(self.part)

    monkeypatch.setattr(all_reduce.dist, "all_reduce", lambda tensor, **_: Work(tensor))
    monkeypatch.setattr(all_reduce.dist, "broadcast", lambda *_, **__: None)
    reduce = FlatAllReduce(flat.buffers, pieces=4)
    for _ in range(2):
        flat.zero_grad()
        awaited.clear()
        reduce.start()
        write(flat, 2, 3, 0, 1)
        reduce.finish(reduce.end(), wait=False)
        assert awaited == []
        arrivals = reduce.arrivals(flat.buffers[0])
        for count, part in enumerate((2, 3, 0), 1):
            assert next(arrivals) == part
            assert awaited == [2, 3, 0][:count]
        reduce.wait()
        assert awaited == [2, 3, 0, 1]
        assert list(arrivals) == [1]
        assert list(reduce.arrivals(flat.buffers[0])) == [2, 3, 0, 1]
        assert awaited == [2, 3, 0, 1]
