"""Flat buffers: order, aliasing, gradient slots, and what copying, saving and casting a flattened module does."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from ls_train.flat_order import ALIGNMENT, keep_together
from ls_train.params import FlatParameters, grad_slot, joined


class Attention(nn.Module):
    """Projections in fairseq's order of registration, which is not the order they are multiplied in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        self.encoder_attn = Attention(width)
        self.fc1 = nn.Linear(width, 2 * width)


class Stack(nn.Module):
    def __init__(self, width: int = 5, depth: int = 2, declare: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.output = nn.Linear(width, 7, bias=False)
        self.output.weight = self.embed.weight
        for kind in ("weight", "bias") if declare else ():
            for layer in self.layers:
                keep_together(getattr(self.project(layer.self_attn, p), kind) for p in "qkv")
            keep_together(getattr(self.project(la.encoder_attn, p), kind) for la in self.layers for p in "kv")

    @staticmethod
    def project(attention: Attention, name: str) -> nn.Linear:
        return getattr(attention, f"{name}_proj")

    def together(self) -> list[list[torch.Tensor]]:
        groups = []
        for kind in ("weight", "bias"):
            for layer in self.layers:
                groups.append([getattr(self.project(layer.self_attn, p), kind) for p in "qkv"])
            groups.append([getattr(self.project(la.encoder_attn, p), kind) for la in self.layers for p in "kv"])
        return groups


@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_multiplied_together_lies_together(by_name):
    model = Stack(declare=not by_name)
    expected = [torch.cat([t.detach().clone() for t in group]) for group in model.together()]
    assert all(joined(group) is None for group in model.together())
    flat = FlatParameters(model.named_parameters() if by_name else model.parameters())
    for group, values in zip(model.together(), expected, strict=True):
        view = joined(group)
        assert torch.equal(view, values)
        assert view.data_ptr() == group[0].data_ptr()
        assert view.data_ptr() % 16 == 0
    first, second = model.layers[0].self_attn, model.layers[1].self_attn
    assert joined([first.q_proj.weight, first.k_proj.weight]) is not None
    assert joined([first.k_proj.weight, first.q_proj.weight]) is None
    assert joined([first.v_proj.weight, second.q_proj.weight]) is None
    assert joined([first.q_proj.weight, first.q_proj.bias]) is None
    assert flat.intact()


def test_values_stay_and_a_write_to_the_buffer_is_seen():
    model = Stack()
    before = copy.deepcopy(model.state_dict())
    (buffer,) = FlatParameters(model.parameters()).buffers
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    buffer.data.fill_(3.0)
    assert all(bool((p == 3.0).all()) for p in model.parameters())


def test_tied_parameter_has_one_slot_and_stays_tied():
    model = Stack()
    tied = [("a", model.embed.weight), ("b", model.output.weight)]
    (buffer,) = FlatParameters(tied).buffers
    assert len(buffer.params) == 1
    assert model.embed.weight is model.output.weight


def test_one_buffer_per_dtype_and_frozen_state():
    a, b, c, d = (nn.Parameter(torch.ones(3)) for _ in range(4))
    b.data = b.data.half()
    c.requires_grad = False
    flat = FlatParameters([a, b, c, d])
    assert [buffer.params for buffer in flat.buffers] == [(a, d), (b,), (c,)]


def test_padding_is_outside_groups_and_zero():
    model = Stack()
    (buffer,) = FlatParameters(model.parameters()).buffers
    covered = torch.zeros(buffer.data.numel(), dtype=torch.bool)
    for begin, param in zip(buffer.begins, buffer.params, strict=False):
        covered[begin : begin + param.numel()] = True
    assert not buffer.data[~covered].any()
    assert buffer.segments.tolist() == buffer.begins
    assert buffer.data.numel() % ALIGNMENT == 0


def saved_bytes(value) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def test_state_dict_of_a_layer_does_not_save_the_buffer():
    model = Stack(width=64, depth=4)
    layer = model.layers[0]
    plain, plain_pickle = saved_bytes(layer.state_dict()), len(pickle.dumps(layer))
    flat = FlatParameters(model.parameters())
    assert saved_bytes(layer.state_dict()) < plain + 2000
    assert len(pickle.dumps(layer)) < plain_pickle + 2000
    assert flat.buffers[0].data.nbytes > 3 * plain


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_owns_its_parameters(copier):
    model = Stack()
    flat = FlatParameters(model.parameters())
    flat.direct_grads = True
    twin = copier(model)
    assert twin.output.weight is twin.embed.weight
    assert all(grad_slot(p) is not None for p in model.parameters())
    assert all(grad_slot(p) is None for p in twin.parameters())
    before = copy.deepcopy(twin.state_dict())
    flat.buffers[0].data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    own = FlatParameters(twin.parameters())
    own.buffers[0].data.fill_(1.0)
    assert not any(p.any() for p in model.parameters())
    assert flat.intact()
    assert own.intact()


def test_casting_and_rebinding_are_noticed():
    model = Stack()
    flat = FlatParameters(model.parameters())
    group = model.together()[0]
    model.half()
    assert not flat.intact()
    assert joined(group) is None
    again = FlatParameters(model.parameters())
    assert joined(group) is not None, "the declared order survives .half()"
    model.embed.weight.data = model.embed.weight.data.clone()
    assert not again.intact()


def test_loading_a_state_dict_keeps_the_buffer():
    model, other = Stack(), Stack()
    flat = FlatParameters(model.parameters())
    model.load_state_dict(other.state_dict())
    assert flat.intact()
    assert torch.equal(model.layers[0].fc1.weight, other.layers[0].fc1.weight)


def test_no_slot_without_direct_grads_and_none_after_the_owner_is_gone():
    model = Stack()
    flat = FlatParameters(model.parameters())
    assert grad_slot(model.embed.weight) is None
    flat.direct_grads = True
    assert grad_slot(model.embed.weight).tensor.shape == model.embed.weight.shape
    del flat
    gc.collect()
    assert grad_slot(model.embed.weight) is None
    assert joined(model.together()[0]) is None
    assert torch.isfinite(model.embed.weight).all()


def test_slot_follows_grad():
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    flat = FlatParameters([param, other])
    flat.direct_grads = True
    slot = grad_slot(param)
    assert not slot.written
    slot.tensor.copy_(torch.tensor([1.0, 2.0, 3.0]))
    slot.commit()
    assert slot.written
    assert param.grad is slot.tensor
    (param * 2).sum().backward()  # an ordinary use of the same parameter adds in place
    assert slot.written
    assert slot.tensor.tolist() == [3.0, 4.0, 5.0]
    param.grad = None
    assert not slot.written
    (param * 2).sum().backward()
    slot.tensor.fill_(5.0)
    slot.commit()
    assert slot.tensor.tolist() == [7.0, 7.0, 7.0], "a gradient that autograd left before is kept"
    flat.zero_grad(set_to_none=False)
    assert slot.written
    assert not slot.tensor.any()
    flat.zero_grad()
    assert param.grad is None
    assert other.grad is None


def test_gradient_slots_of_neighbours_join():
    model = Stack()
    flat = FlatParameters(model.parameters())
    flat.direct_grads = True
    group = model.together()[0]
    view = joined([grad_slot(p).tensor for p in group])
    view.fill_(2.0)
    assert all(bool((grad_slot(p).tensor == 2.0).all()) for p in group)
    assert view.shape == (15, 5)


def test_ordinary_gradients_are_collected():
    a, b, c = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))
    (buffer,) = FlatParameters([a, b, c]).buffers
    (a.sum() + (c * 3).sum()).backward()
    assert buffer.collect_grads() == [True, False, True]
    assert a.grad.data_ptr() == buffer.grad.data_ptr()
    (c * 2).sum().backward()
    assert buffer.collect_grads() == [True, False, True]
    begin = buffer.begins[2]
    assert buffer.grad[begin : begin + 4].tolist() == [5.0] * 4


def test_a_single_parameter_and_its_gradient_stay_where_they_are():
    param = nn.Parameter(torch.arange(10.0))
    param.grad = torch.ones(10)
    place, grad = param.data_ptr(), param.grad
    (buffer,) = FlatParameters([param]).buffers
    assert buffer.collect_grads() == [True]
    assert param.data_ptr() == place
    assert param.grad is grad
    assert buffer.grad.data_ptr() == grad.data_ptr()


def test_not_flattened_parameters_stay_where_they_are():
    model = Stack()
    places = [p.data_ptr() for p in model.parameters()]
    flat = FlatParameters(model.parameters(), flatten=False)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert len(flat.buffers) == len(places)


def test_refusals_name_the_parameter():
    with pytest.raises(ValueError, match=r"parameter step .*int64"):
        FlatParameters([("step", torch.zeros(3, dtype=torch.int64))])
    with pytest.raises(ValueError, match="leaf"):
        FlatParameters([nn.Parameter(torch.ones(3)) * 2])
    embedding = nn.Embedding(5, 3, sparse=True)
    (buffer,) = FlatParameters([embedding.weight, nn.Parameter(torch.ones(2))]).buffers
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        buffer.collect_grads()


def test_empty_and_scalar_parameters():
    empty, scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))
    flat = FlatParameters([empty, scalar, nn.Parameter(torch.ones(2))])
    flat.buffers[0].data.fill_(4.0)
    assert scalar.item() == 4.0
    assert empty.shape == (0, 3)
    assert flat.intact()
