"""Layers on random shapes: right results at each, and reserved memory that stays flat over ten thousand of them."""

import gc
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ls_train.layers.criterion import LSCrossEntropyLayer
from ls_train.layers.decoder_layer import LSTransformerDecoderLayer
from ls_train.layers.encoder_layer import LSTransformerEncoderLayer
from ls_train.packing import Packing
from ls_train.testing import devices
from tests.layers.test_autograd import transformer
from tests.layers.test_layers import compare

SHAPES_COMPARED = 200
SHAPES_FOR_MEMORY = 10_000
WARM_UP = 2_000
MAX_SENTENCES, MAX_LENGTH = 48, 96
SEGMENT = 20 << 20
"""Bytes of the allocator's segments for tensors of 1 to 10 MiB: one more may be opened where free blocks lie badly."""
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "swish")


def random_lengths(chooser: random.Random, sentences: int, longest: int) -> torch.Tensor:
    """Return lengths from 0 to ``longest``, the first of them ``longest`` and most of them far below."""
    return torch.tensor([longest, *(int(longest * chooser.random() ** 2 + 0.5) for _ in range(sentences - 1))])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", [LSTransformerEncoderLayer, LSTransformerDecoderLayer])
def test_results_at_random_shapes(kind, device):
    """Sizes of the model, of heads and of the batch at random, dropout and activation too.

    Not fewer than 14 columns: the norm of a few nearly equal numbers multiplies every rounding error.
    """
    chooser = random.Random(20)
    for _ in range(SHAPES_COMPARED // 2):
        heads = chooser.choice((2, 3, 4))
        settings = {
            "embed_dim": heads * chooser.choice((7, 8, 13, 16, 32)),
            "num_heads": heads,
            "ffn_dim": chooser.randint(1, 70),
            "activation": chooser.choice(ACTIVATIONS),
            "normalize_before": chooser.random() < 0.5,
        }
        for rate in ("dropout", "attention_dropout", "activation_dropout"):
            settings[rate] = chooser.choice((0.0, 0.3))
        sentences, longest = chooser.randint(1, 5), chooser.randint(1, 40)
        target, source = (
            Packing.from_lengths(random_lengths(chooser, sentences, longest), longest, torch.device(device))
            for _ in range(2)
        )
        layer = kind(**settings).to(device)
        x, memory = (
            torch.randn(int(packing.cu_seqlens[-1]), settings["embed_dim"], device=device)
            for packing in (target, source)
        )
        seed = torch.tensor([chooser.randint(0, 1 << 40)], device=device)
        compare(layer, x, memory if kind is LSTransformerDecoderLayer else None, seed, target, source)


def growth(shapes: int, warm_up: int, step: Callable[[random.Random, int], None], held: Callable[[], int]) -> int:
    """Return how many bytes more are ``held`` after ``shapes`` steps than after the first ``warm_up``."""
    chooser = random.Random(20)
    before = 0
    for number in range(shapes):
        if number == warm_up:
            before = held()
        step(chooser, number)
    return held() - before


def small_model_step(
    device: str, dtype: torch.dtype, longest: int, dropout: float = 0.1
) -> tuple[Callable[[random.Random, int], None], Tensor]:
    """Return a step of a small model on a random shape, and the sum of its losses.

    The first step takes the largest shape, as a training set's largest batch decides about memory. Decoder and loss
    join in for every tenth shape: with them in all the test takes minutes, most of it Python.
    """
    rates = dict.fromkeys(("attn_prob_dropout_ratio", "activation_dropout_ratio", "hidden_dropout_ratio"), dropout)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "nhead": 4, "num_encoder_layer": 1, "num_decoder_layer": 1}
    model = transformer(device, **sizes, **rates).to(dtype)
    criterion, weight = LSCrossEntropyLayer(), model.decoder.output_projection.weight
    parameters, place = list(model.parameters()), weight.device
    words, sum_of_losses = (
        torch.randint(4, 37, (MAX_SENTENCES * longest,), device=device),
        torch.zeros((), device=device),
    )
    seed = torch.tensor([3], device=device)

    def step(chooser: random.Random, number: int) -> None:
        if number:
            sentences = chooser.randint(1, MAX_SENTENCES)
            sides = [random_lengths(chooser, sentences, chooser.randint(1, longest)) for _ in range(2)]
        else:
            sides = [torch.full((MAX_SENTENCES,), longest)] * 2
        source = Packing.from_lengths(sides[0], longest, place)
        memory = model.encoder.forward_packed(words[: source.positions.shape[0]], source, seed)
        if number % 10:
            loss = memory.sum(dtype=torch.float32)
        else:
            target = Packing.from_lengths(sides[1], longest, place)
            labels = words[: target.positions.shape[0]]
            features = model.decoder.forward_packed(labels, target, memory, source, seed)
            loss, _ = criterion(features, labels, weight)
        loss.backward()
        sum_of_losses.add_(loss.detach())
        for parameter in parameters:
            parameter.grad = None

    return step, sum_of_losses


def living_bytes() -> int:
    """Return the bytes of all tensors that Python knows, but for sparse ones that another test left."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter)]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def allocated_bytes() -> int:
    """Return the bytes of the allocator's blocks that are in use."""
    time.sleep(0.1)  # autograd's thread may still be letting go of what the last backward held
    return torch.cuda.memory_allocated()


def test_living_tensors_stay_few():
    """Without a GPU, in few shapes: no tensor of a step outlives it."""
    step, total = small_model_step("cpu", torch.float32, 5, 0.0)
    assert growth(40, 20, step, living_bytes) <= 0
    assert total.isfinite()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device, dtype", [("cuda", torch.bfloat16)])
def test_reserved_memory_stays_flat(device, dtype):
    """Forward and backward of a small model: after the first shapes no new one makes the allocator ask for more."""
    gc.collect()
    torch.cuda.empty_cache()
    step, total = small_model_step(device, dtype, MAX_LENGTH)
    assert growth(SHAPES_FOR_MEMORY, WARM_UP, step, torch.cuda.memory_reserved) <= SEGMENT
    assert total.isfinite()
    # What a step leaves behind would first fill the cache of free blocks.
    assert growth(20, 10, step, allocated_bytes) <= 0
