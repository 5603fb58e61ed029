"""Gradients written straight into a flat buffer equal those that autograd accumulates."""

import copy

import pytest
import torch

from ls_train.layers.criterion import LSCrossEntropyLayer
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.gradients import GradientWriter
from ls_train.packing import Packing
from ls_train.params import FlatParameters, joined
from ls_train.testing import devices
from tests.layers.comparison import gradient_errors, gradients
from tests.layers.fairseq_models import batch
from tests.layers.test_autograd import SEED, loss_of, transformer


def fused_loss(model, seed=SEED):
    """Cross entropy with the projection inside, so that the tied table has three writers."""
    source, _, target = batch()
    features, packing = model.features(source, target, seed)
    criterion = LSCrossEntropyLayer(epsilon=0.1, padding_idx=1)
    targets = packing.pack(target.roll(-1, 1))
    return criterion(features, targets, model.decoder.output_projection.weight)[0]


def flatten(model, direct):
    flat = FlatParameters(model.named_parameters())
    flat.direct_grads = direct
    return flat


LOSSES = {"logits": loss_of, "fused": fused_loss}
MODELS = {
    "tied": {},
    "untied": {"share_all_embeddings": False, "learned_positions": True, "pre_layer_norm": False},
    "norms": {"layer_norm_embedding": True, "share_all_embeddings": False, "share_decoder_input_output_embed": True},
}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_same_gradients(model, loss, device):
    """Two micro-batches, then after zero_grad a third: first writes overwrite, later ones add."""
    plain = transformer(**MODELS[model])
    direct = copy.deepcopy(plain)
    flat = flatten(direct, True)
    for seeds in ((1, 2), (3,)):
        for seed in seeds:
            for built in (plain, direct):
                LOSSES[loss](built, torch.tensor([seed])).backward()
        errors = gradient_errors(gradients(direct), gradients(plain))
        assert max(errors.values()) < 1e-6, errors
        plain.zero_grad()
        flat.zero_grad()
        flat.buffers[0].grad.fill_(float("nan"))


def test_every_gradient_lies_in_its_slot():
    model = transformer()
    flat = flatten(model, True)
    fused_loss(model).backward()
    for buffer in flat.buffers:
        for parameter in buffer.params:
            assert parameter.grad is buffer.slot(parameter).tensor


def assert_joined(tensors):
    assert torch.equal(joined(tensors), torch.cat(tensors).detach())


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_multiplied_together_lies_together(named, copied):
    model = transformer()
    model = copy.deepcopy(model) if copied else model
    flat = FlatParameters(model.named_parameters() if named else model.parameters())
    assert flat.intact()
    for layer in [*model.encoder.layers, *model.decoder.layers]:
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        assert_joined([p.weight for p in projections])
        assert_joined([p.bias for p in projections])
    projections = [p for layer in model.decoder.layers for p in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)]
    assert_joined([p.weight for p in projections])
    assert_joined([p.bias for p in projections])


def test_flat_parameters_give_the_same_outputs():
    model = transformer()
    expected = loss_of(model)
    flat = flatten(model, False)
    torch.testing.assert_close(loss_of(model), expected)
    assert flat.intact()


def test_slots_of_unused_layers_stay_unwritten():
    model = transformer(encoder_layerdrop=1.0)
    flat = flatten(model, True)
    loss_of(model).backward()
    assert flat.intact()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("encoder.layers."), name


@pytest.mark.parametrize("frozen", ["self_attn.k_proj", "fc1.bias", "encoder_attn.v_proj.weight"])
def test_frozen_parameters_with_slots(frozen):
    """A frozen parameter between joined ones: the others still get theirs."""
    model = transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    direct = copy.deepcopy(model)
    flat = flatten(direct, True)
    for built in (model, direct):
        loss_of(built).backward()
    errors = gradient_errors(gradients(direct), gradients(model))
    assert max(errors.values()) < 1e-6, errors
    assert flat.intact()
    assert all(parameter.grad is None for parameter in direct.parameters() if not parameter.requires_grad)


def test_slots_written_unevenly():
    """One of two joined slots holds a gradient already, one operator writes both and a third without a slot."""
    first, second, third = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    flat = FlatParameters([first, second])
    flat.direct_grads = True
    slot = flat.buffers[0].slot(first)
    slot.tensor.fill_(1.0)
    slot.commit()
    tensors = (first, second, third)
    writer = GradientWriter({"a": 0, "b": 1, "c": 2}, tensors, tensors, (True, True, True))
    (joint, other), accumulate = writer.open("ab", "c")
    assert not accumulate
    joint.fill_(2.0)
    other.fill_(4.0)
    returned = writer.finish()
    assert returned[:2] == [None, None]
    assert torch.equal(first.grad, torch.full((2, 3), 3.0))
    assert torch.equal(second.grad, torch.full((2, 3), 2.0))
    assert torch.equal(returned[2], torch.full((2, 3), 4.0))


def test_one_written_slot_beside_a_fresh_gradient():
    """One operator writes both with one flag: what the slot holds is added afterwards."""
    first, second = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    flat = FlatParameters([first])
    flat.direct_grads = True
    slot = flat.buffers[0].slot(first)
    slot.tensor.fill_(1.0)
    slot.commit()
    writer = GradientWriter({"a": 0, "b": 1}, (first, second), (first, second), (True, True))
    (a, b), accumulate = writer.open("a", "b")
    assert not accumulate
    a.fill_(2.0)
    b.fill_(4.0)
    returned = writer.finish()
    assert torch.equal(first.grad, torch.full((2, 3), 3.0))
    assert torch.equal(returned[1], torch.full((2, 3), 4.0))


def test_one_parameter_opened_twice():
    """Two places of one layer share a parameter: the second write adds to the first."""
    shared = torch.nn.Parameter(torch.zeros(2, 3))
    flat = FlatParameters([shared])
    flat.direct_grads = True
    flat.buffers[0].grad.fill_(float("nan"))
    writer = GradientWriter({"a": 0, "b": 1}, (shared, shared), (shared, shared), (True, True))
    for name, value, adds in (("a", 2.0, False), ("b", 5.0, True)):
        (target,), accumulate = writer.open(name)
        assert accumulate == adds
        target.copy_(target + value if accumulate else torch.full((2, 3), value))
    writer.finish()
    assert torch.equal(shared.grad, torch.full((2, 3), 7.0))


def layer_inputs(model):
    """Return how many inputs autograd knows of each layer of ``model``, and of what makes keys and values."""
    found, todo, seen = {}, [loss_of(model).grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__.removesuffix("Backward")
        if kind in ("EncoderLayerFunction", "DecoderLayerFunction", "CrossKVFunction", "NormFunction"):
            found.setdefault(kind, set()).add(sum(after is not None for after, _ in node.next_functions))
        todo += [after for after, _ in node.next_functions]
    return found


FEW = {"EncoderLayerFunction": {1}, "DecoderLayerFunction": {2}, "CrossKVFunction": {1}, "NormFunction": {1}}


def test_autograd_does_not_see_parameters_with_slots():
    model = transformer()
    assert layer_inputs(model)["EncoderLayerFunction"] == {17}
    flat = flatten(model, True)
    assert layer_inputs(model) == FEW
    flat.direct_grads = False
    assert layer_inputs(model)["DecoderLayerFunction"] == {24}


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_autograd_sees_parameters_with_hooks(kind):
    model = transformer()
    flat = flatten(model, True)
    handle = getattr(model.encoder.layers[0].fc1.weight, kind)(lambda _: None)
    assert layer_inputs(model)["EncoderLayerFunction"] == {1, 17}
    handle.remove()
    assert layer_inputs(model) == FEW
    assert flat.intact()


def test_first_layer_of_frozen_embeddings_gets_its_gradients():
    """No input of the first layer needs a gradient: its parameters must keep it in the graph."""
    model = transformer(share_all_embeddings=False)
    model.encoder.embed_tokens.weight.requires_grad_(False)
    direct = copy.deepcopy(model)
    flat = flatten(direct, True)
    assert layer_inputs(direct)["EncoderLayerFunction"] == {1, 16}
    for built in (model, direct):
        loss_of(built).backward()
    errors = gradient_errors(gradients(direct), gradients(model))
    assert max(errors.values()) < 1e-6, errors
    assert flat.intact()


@pytest.mark.parametrize(
    "path", ["encoder.layers.0.fc1.weight", "decoder.layers.1.encoder_attn.k_proj.bias", "encoder.layer_norm.weight"]
)
def test_in_place_change_of_a_parameter_with_a_slot_is_noticed(path):
    model = transformer(pre_layer_norm=True)
    flat = flatten(model, True)
    loss = loss_of(model)
    with torch.no_grad():
        model.get_parameter(path).add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    assert flat.intact()


def switch_off(flat):
    flat.direct_grads = False


def lose_buffers(flat):
    flat.buffers.clear()


@pytest.mark.parametrize("change", [switch_off, lose_buffers])
def test_slots_that_go_between_forward_and_backward(change):
    """The parameters get ordinary gradients, added to those they have."""
    model = transformer()
    direct = copy.deepcopy(model)
    flat = flatten(direct, True)
    losses = loss_of(model), loss_of(direct)
    change(flat)
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    errors = gradient_errors(gradients(direct), gradients(model))
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}], ids=["kept", "checkpointed"])
def test_retained_graph_with_slots(options):
    model = transformer()
    direct = transformer(**options)
    flat = flatten(direct, True)
    for built in (model, direct):
        loss = loss_of(built)
        loss.backward(retain_graph=True)
        loss.backward()
    errors = gradient_errors(gradients(direct), gradients(model))
    assert max(errors.values()) < 1e-6, errors
    assert all(p.grad is flat.buffers[0].slot(p).tensor for p in flat.buffers[0].params)


@pytest.mark.parametrize("converted", ["x", "kv", "memory", "first parameter", "a parameter"])
@pytest.mark.parametrize("cross_attention", [True, False])
def test_types_are_checked_with_slots(converted, cross_attention):
    """Of parameters that have slots one stands for all, which must not hide one that was converted since."""
    layer = LSTransformerDecoderLayer(embed_dim=16, num_heads=4, cross_attention=cross_attention)
    flatten(layer, True)
    packing = Packing.from_lengths(torch.tensor([3, 2]), 3, torch.device("cpu"))
    tensors = {name: torch.randn(5, 16, requires_grad=True) for name in ("x", "memory")}

    def run():
        kv = cross_kv(tensors["memory"], packing, [layer]) if cross_attention else None
        kv = kv.double() if converted == "kv" and kv is not None else kv
        layer.forward_packed(tensors["x"], packing, kv, packing if cross_attention else None)

    if converted in tensors:
        tensors[converted] = tensors[converted].double()
    elif converted.endswith("parameter"):
        parameter = layer.self_attn.q_proj.weight if "first" in converted else layer.fc2.bias
        parameter.data = parameter.data.double()
    if not cross_attention and converted in ("kv", "memory"):
        run()
        return
    with pytest.raises(TypeError, match="input is torch.float(32|64) but a parameter or second input is"):
        run()
