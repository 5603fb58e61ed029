"""Layers on random shapes: right results at each, and reserved memory that stays flat over ten thousand of them."""

import random

import pytest
import torch

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device, dtype", [("cuda", torch.bfloat16)])
def test_reserved_memory_stays_flat(device, dtype):
    """Forward and backward of a small model: after the first shapes no new one makes the allocator ask for more.

    The largest shape comes first, as a training set's largest batch decides about memory. Decoder and loss join in for
    every fifth shape: with them in all the test takes minutes, most of it Python.
    """
    chooser = random.Random(20)
    model = transformer(
        device, hidden_size=64, intermediate_size=128, nhead=4, num_encoder_layer=1, num_decoder_layer=1
    ).to(dtype)
    criterion, weight = LSCrossEntropyLayer(), model.decoder.output_projection.weight
    finite = torch.ones((), dtype=torch.bool, device=device)

    def step(source_lengths: torch.Tensor, target_lengths: torch.Tensor | None) -> None:
        nonlocal finite
        source = Packing.from_lengths(source_lengths, MAX_LENGTH, torch.device(device))
        memory = model.encoder.forward_packed(torch.randint(4, 37, source.positions.shape, device=device), source)
        if target_lengths is None:
            loss = memory.float().square().sum()
        else:
            target = Packing.from_lengths(target_lengths, MAX_LENGTH, torch.device(device))
            tokens, labels = torch.randint(4, 37, (2, *target.positions.shape), device=device)
            features = model.decoder.forward_packed(tokens, target, memory, source)
            loss, _ = criterion(features, labels, weight)
        loss.backward()
        finite = finite & loss.detach().isfinite()
        model.zero_grad(set_to_none=True)

    step(*(torch.full((MAX_SENTENCES,), MAX_LENGTH) for _ in range(2)))
    reserved = 0
    for number in range(SHAPES_FOR_MEMORY):
        if number == WARM_UP:
            reserved = torch.cuda.memory_reserved()
        sentences = chooser.randint(1, MAX_SENTENCES)
        source, target = (random_lengths(chooser, sentences, chooser.randint(1, MAX_LENGTH)) for _ in range(2))
        step(source, target if number % 5 == 0 else None)
    assert finite
    assert reserved > 0
    growth = torch.cuda.memory_reserved() - reserved
    assert growth <= SEGMENT, f"{growth} bytes more after {SHAPES_FOR_MEMORY - WARM_UP} further shapes"
