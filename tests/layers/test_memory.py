"""The saved block, the shared workspace, and the number of allocations of a layer call."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ls_train import memory
from ls_train.layers.cross_kv import cross_kv
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.layers.memory_plan import memory_plan
from ls_train.layers.transformer import LSTransformer
from ls_train.memory import ALIGNMENT, Field, SavedBlock, Workspace, aligned, release_workspaces, round_size, workspace
from ls_train.packing import Packing
from ls_train.testing import devices
from tests.layers.comparison import gradients
from tests.layers.test_autograd import SEED, loss_of, transformer


def test_round_size_wastes_little_and_repeats():
    for size in range(1, 100_000, 37):
        assert size <= round_size(size) <= max(size + 511, size * 17 / 16)
    assert round_size(10_000_001) == round_size(10_000_500)
    assert len({round_size(size) for size in range(1 << 20, 1 << 21, 512)}) <= 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_saved_block(dtype, rows):
    layout = SavedBlock((Field("a", 5), Field("mean", 0, True), Field("lse", 3, True), Field("b", 8)), rows, dtype)
    block = layout.allocate(torch.empty(0, dtype=dtype))
    assert block.dtype == dtype
    views = layout.views(block)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    for i, (name, shape, kind) in enumerate(
        (
            ("a", (rows, 5), dtype),
            ("mean", (rows,), statistics),
            ("lse", (rows, 3), statistics),
            ("b", (rows, 8), dtype),
        )
    ):
        view = getattr(views, name)
        assert view.shape == shape
        assert view.dtype == kind
        assert (view.data_ptr() - block.data_ptr()) % ALIGNMENT == 0
        view.fill_(i)
    for i, view in enumerate(vars(views).values()):
        assert view.eq(i).all()


def test_workspace_is_a_stack_that_grows():
    space = Workspace(torch.device("cpu"))
    with space:
        first = space.take((3, 5), torch.float16).fill_(1)
        with space:
            inner = space.take((100,), torch.float32).fill_(2)
            address = inner.data_ptr()
        assert space.take((10,), torch.float64).data_ptr() == address
        big = space.take((1000, 1000), torch.float32).fill_(3)
        assert first.eq(1).all()
        assert big.eq(3).all()
    capacity = space.capacity
    with space:
        space.take((1000,), torch.float32)
    assert space.capacity == capacity


def test_workspace_recovers_from_an_error():
    space = Workspace(torch.device("cpu"))
    with space:
        address = space.take((10,), torch.float32).data_ptr()

    def fail():
        with space:
            space.take((5,), torch.float32)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with space:
        assert space.take((10,), torch.float32).data_ptr() == address


def test_retained_storage_stays():
    space = Workspace(torch.device("cpu"))
    space.retain = True
    with space:
        small = space.take((4,), torch.float32)
        space.take((10_000,), torch.float32)
        space.in_capture = True
        bigger = space.take((100_000,), torch.float32)
        space.take((1_000_000,), torch.float32)

    def retained(tensor):
        begins = [(storage.data_ptr(), storage.numel()) for storage in space._outgrown]
        return any(begin <= tensor.data_ptr() < begin + size for begin, size in begins)

    assert retained(small)
    assert not retained(bigger), "what was allocated during a capture is the graph's to keep"


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("pre_layer_norm", [True, False])
def test_results_do_not_depend_on_what_scratch_held(pre_layer_norm, device, monkeypatch):
    """Scratch, saved blocks and all other fresh memory are filled with NaN: nothing reads before it writes."""
    model = transformer(device, pre_layer_norm=pre_layer_norm, activation_fn="gelu")
    model.eval()
    logits = loss_of(model).detach()
    model.train()
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    take, allocate = Workspace.take, SavedBlock.allocate
    monkeypatch.setattr(Workspace, "take", lambda self, *arguments: take(self, *arguments).fill_(float("nan")))
    monkeypatch.setattr(SavedBlock, "allocate", lambda self, like: allocate(self, like).fill_(float("nan")))
    loss_of(model).backward()
    for name, value in gradients(model).items():
        assert torch.equal(value, expected[name]), name
    model.eval()
    with torch.no_grad():
        assert torch.equal(loss_of(model), logits)


def test_small_layer_then_big_layer():
    """Scratch sized by the first layer would overflow in the second; a third, small again, still works."""
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    memory._by_thread.__dict__.clear()
    for size in (8, 256, 8):
        layer = LSTransformerEncoderLayer(embed_dim=size, num_heads=2, dropout=0.0)
        x = torch.randn(6, size, requires_grad=True)
        layer.forward_packed(x, packing).sum().backward()
        assert x.grad.isfinite().all()
        assert workspace(x).capacity > 0


def test_released_scratch_is_made_again():
    x = torch.randn(4)
    first = workspace(x, 100)
    with first:
        release_workspaces()
        assert workspace(x) is first, "it is in use"
    first.retain = True
    release_workspaces()
    assert workspace(x) is first, "a graph writes to it"
    first.retain = False
    release_workspaces()
    assert workspace(x) is not first


def test_remembered_scratch_is_forgotten_when_it_grows():
    space = Workspace(torch.device("cpu"))
    with space:
        small = space.take((2, 3), torch.float32)
        turned = space.view(small, torch.t)
        assert space.view(small, torch.t) is turned
    with space:
        assert space.take((2, 3), torch.float32) is small
        space.take((1000, 1000), torch.float32)
        assert space.view(small, torch.t) is not turned
    with space:
        again = space.take((2, 3), torch.float32)
        assert again.data_ptr() == space.take((1000, 1000), torch.float32).data_ptr() - ALIGNMENT
        assert space.view(again, torch.t).data_ptr() == again.data_ptr()


def test_spare_scratch_is_what_the_next_call_takes():
    """Tensors for one operator call lie where scratch is free, after it has grown as well."""
    space = Workspace(torch.device("cpu"))
    for grown in (8_000, 20_000):
        space.reserve(grown)
        for sizes in ((100,), (1000, 40)):
            tensors = space.spare(sizes, torch.float32)
            assert [tensor.nbytes for tensor in tensors] == list(sizes)
            assert all(
                again is tensor for again, tensor in zip(space.spare(sizes, torch.float32), tensors, strict=True)
            )
            with space:
                taken = [space.take((size // 4,), torch.float32) for size in sizes]
                assert [tensor.data_ptr() for tensor in tensors] == [tensor.data_ptr() for tensor in taken]
                inner = space.spare(sizes, torch.float32)
                assert inner[0].data_ptr() == taken[-1].data_ptr() + aligned(sizes[-1])
            assert not space.in_use


def test_scratch_remembers_a_bounded_number_of_shapes():
    space = Workspace(torch.device("cpu"))
    for rows in range(1, 3000):
        with space:
            space.spare((rows * 4,), torch.float32)
            space.view(space.take((rows, 2), torch.float32), torch.t)
    assert len(space._taken) <= 1024
    assert len(space._spare) <= 1024
    assert len(space._views) <= 1024


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_backward_lets_go_of_the_saved_blocks(retain_graph):
    """While the loss is still there; a graph that is retained keeps them, and gives the same gradients again."""
    model = transformer()
    blocks = []
    allocate = SavedBlock.allocate

    def remember(self, like):
        block = allocate(self, like)
        blocks.append(StorageWeakRef(block.untyped_storage()))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedBlock, "allocate", remember)
        loss = loss_of(model)
    assert len(blocks) == 4
    assert not any(block.expired() for block in blocks)
    loss.backward(retain_graph=retain_graph)
    assert all(block.expired() != retain_graph for block in blocks)


def test_training_after_a_first_call_in_inference_mode():
    """Scratch and a longer table of positions that were made in inference mode serve training."""
    expected = loss_of(transformer().eval()).detach()
    model = transformer(max_seq_len=9).eval()
    memory._by_thread.__dict__.clear()
    source, target = torch.randint(4, 37, (1, 40)), torch.randint(4, 37, (1, 3))
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(model), expected)
        model(source, target)
    model.train()
    model(source, target).sum().backward()
    assert model.encoder.layers[0].fc1.weight.grad.isfinite().all()


class CountAllocations(TorchDispatchMode):
    """Counts fresh tensors that operators outside kernels make."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in ("empty", "new_empty", "empty_like", "zeros_like", "clone", "new_zeros", "empty_strided", "cat"):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("normalize_before", [True, False], ids=["pre", "post"])
def test_allocations_of_a_layer_call(normalize_before):
    """Forward: output and block. Backward: input gradient, numbers of partial rows, groups of parameter gradients."""
    packing = Packing.from_lengths(torch.tensor([4, 2]), 4, torch.device("cpu"))
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    arguments = {"embed_dim": 16, "num_heads": 4, "normalize_before": normalize_before, **rates}
    encoder, decoder = LSTransformerEncoderLayer(**arguments), LSTransformerDecoderLayer(**arguments)
    x = torch.randn(6, 16, requires_grad=True)
    kv = cross_kv(torch.randn(6, 16), packing, [decoder])

    def encode():
        return encoder.forward_packed(x, packing, SEED)

    def decode():
        return decoder.forward_packed(x, packing, kv, packing, 0, SEED)[0]

    for run, groups in ((encode, 12), (decode, 20)):
        run().sum().backward(retain_graph=True)  # the workspace has its size now
        with torch.no_grad():
            run()
        with CountAllocations() as forward:
            y = run()
        dy = torch.ones_like(y)
        with CountAllocations() as backward:
            inputs = [x, *(p for p in (encoder if run is encode else decoder).parameters() if p.requires_grad)]
            torch.autograd.grad(y, inputs, dy, allow_unused=True)
        assert len(forward.calls) == 2, forward.calls
        # The decoder layer makes zeros for the gradient of keys and values, its CrossKV numbers and two more groups.
        assert len(backward.calls) == 2 + groups + 2 * (run is decode), backward.calls
        with torch.no_grad(), CountAllocations() as evaluation:
            run()
        assert len(evaluation.calls) == 1, evaluation.calls


@pytest.mark.parametrize("pre_layer_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("activation_fn", ["relu", "gelu"])
def test_memory_plan(pre_layer_norm, activation_fn):
    """Bytes of parameters, of what a forward saves, and of the workspace."""
    sizes = {"hidden_size": 32, "intermediate_size": 128, "nhead": 4, "vocab_size": 50}
    layers = {"num_encoder_layer": 3, "num_decoder_layer": 2}
    config = LSTransformer.get_config(**sizes, **layers, pre_layer_norm=pre_layer_norm, activation_fn=activation_fn)
    model = LSTransformer(config)
    source, target = torch.randint(4, 50, (5, 30)), torch.randint(4, 50, (5, 41))
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    memory._by_thread.__dict__.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features, _ = model.features(source, target)
    features.sum().backward()
    plan = memory_plan(config, 5 * 41, 5 * 30, torch.float32)
    for tensor in (*model.parameters(), *model.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    assert plan.parameters == plan.gradients == sum(p.numel() * 4 for p in model.parameters())
    assert plan.saved == pytest.approx(sum(size for _, size in saved.values()), rel=0.02)
    assert plan.workspace == workspace(features).capacity
    assert plan.total > plan.saved + plan.workspace


@pytest.mark.parametrize("pre_layer_norm", [True, False], ids=["pre", "post"])
def test_memory_of_transformer_big(pre_layer_norm):
    """Six plus six layers, 15000 tokens, 16 bit: parameters, optimiser, activations and loss in 9 GiB."""
    layers = {"num_encoder_layer": 6, "num_decoder_layer": 6, "share_all_embeddings": True}
    config = LSTransformer.get_config(
        "transformer-big", vocab_size=40000, pre_layer_norm=pre_layer_norm, activation_fn="relu", **layers
    )
    assert memory_plan(config, 15000, dtype=torch.bfloat16).total <= 9.0 * 2**30


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_outputs_made_again_have_the_same_bits(dtype, device):
    """The backward multiplies with what the forward multiplied with."""
    x, residual, weight, bias = (torch.randn(*s, device=device).to(dtype) for s in [(37, 64)] * 2 + [(64,)] * 2)
    used, seed = torch.tensor([33], dtype=torch.int32, device=device), SEED.to(device)
    y, total, again = (torch.empty_like(x) for _ in range(3))
    mean, rstd = (torch.empty(37, device=device) for _ in range(2))
    torch.ops.ls_train.bias_dropout_add_layer_norm_fwd(
        y, total, mean, rstd, x, bias, residual, weight, bias, seed, used, 1e-5, 0.1, 3
    )
    torch.ops.ls_train.layer_norm_fwd(
        again, torch.empty_like(mean), torch.empty_like(rstd), total, weight, bias, used, 1e-5
    )
    assert torch.equal(again, y)
