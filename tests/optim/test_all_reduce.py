"""The sum of flat gradients goes out in pieces, each when its last gradient is written."""

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
    reduce.finish()
    return counts


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
        reduce.finish()
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
