"""Every tensor argument of every public layer and operator, replaced by something else: an error that names it."""

import inspect

import numpy as np
import pytest
import torch

import ls_train
from ls_train import ops
from ls_train.layers.cross_kv import cross_kv
from ls_train.ops._arguments import check_kinds
from ls_train.packing import Packing, TokenOrder

ROWS, SIZE, WORDS, HEADS = 6, 8, 11, 2


def operators():
    """Return arguments that each operator takes, all tensors given."""
    torch.manual_seed(0)
    rows, seed = torch.tensor([ROWS], dtype=torch.int32), torch.tensor([5])
    x, vector, one = torch.randn(ROWS, SIZE), torch.randn(SIZE), torch.ones(1)
    drops = {"p": 0.5, "seed": seed, "offset": 3}
    labels = {"target": torch.arange(ROWS), "label_smoothing": 0.1, "ignore_index": 1, "rows": rows}
    flat, slots, cu = torch.randn(ROWS), torch.tensor([0, 4, ROWS]), torch.tensor([0, 2, ROWS], dtype=torch.int32)
    active, update, steps = torch.ones(2, dtype=torch.uint8), torch.tensor([0, 0]), torch.tensor([1, 1])
    heads = torch.randn(ROWS, HEADS, SIZE)
    norm = {"weight": vector, "bias": vector, "eps": 1e-5, "rows": rows}
    return {
        "adam": {
            **{name: flat.clone() for name in ("param", "exp_avg", "exp_avg_sq", "grad")},
            "master": None,
            "segments": slots,
            "segment_group": torch.zeros(2, dtype=torch.int32),
            "segment_step": steps,
            "active": active,
            "hyper": torch.rand(1, 6, dtype=torch.float64),
            "update": update,
            "grad_scale": one,
            "found_inf": torch.zeros(1),
        },
        "adam_prepare": {
            "segment_step": steps,
            "update": update,
            "grad_scale": one,
            "active": active,
            "norm": one.clone(),
            "found_inf": torch.zeros(1),
            "multiplier": one.clone(),
            "max_norm": 1.0,
        },
        "attention": {"q": heads, "k": heads, "v": heads, "cu_q": cu, "cu_k": cu, "max_q": 4, "max_k": 4, **drops},
        "bias_activation_dropout": {"x": x, "bias": vector, "activation": "relu", "rows": rows, **drops},
        "bias_dropout_add": {"x": x, "bias": vector, "residual": x, "rows": rows, **drops},
        "bias_dropout_add_layer_norm": {
            "x": x,
            "bias": vector,
            "residual": x,
            "weight": vector,
            "norm_bias": vector,
            "rows": rows,
            **drops,
        },
        "column_sum": {"partials": torch.randn(2, ROWS, SIZE)},
        "cross_entropy": {"logits": torch.randn(ROWS, WORDS), **labels},
        "dropout": {"x": x, "rows": rows, **drops},
        "embedding": {
            "tokens": torch.arange(ROWS),
            "positions": torch.arange(ROWS),
            "weight": torch.randn(WORDS, SIZE),
            "position_weight": torch.randn(WORDS, SIZE),
            "rows": rows,
            **drops,
        },
        "grad_norm": {"grad": flat, "segments": slots, "active": active},
        "layer_norm": {"x": x, **norm},
        "layer_norm_residual": {"x": x, **norm},
        "linear_cross_entropy": {"x": x, "weight": torch.randn(WORDS, SIZE), **labels},
        "linear_cross_entropy_gradients": {"x": x, "weight": torch.randn(WORDS, SIZE), "gradient": one, **labels},
        "loss_scale_update": {
            "scale": one,
            "counters": torch.zeros(4, dtype=torch.int64),
            "exhausted": torch.zeros(1),
            "found_inf": torch.zeros(1),
            "factor": 2.0,
            "window": 5,
            "min_scale": 1e-4,
        },
        "scale_cast": {"x": x, "factor": one},
        "softmax_dropout": {
            "x": torch.randn(2, HEADS, 3, 4),
            "key_padding_mask": torch.zeros(2, 4, dtype=torch.bool),
            **drops,
        },
    }


def layers():
    """Return a call of every public layer and arguments that it takes, all tensors given; dropout is on."""
    torch.manual_seed(0)
    x, tokens = torch.randn(2, 3, SIZE), torch.randint(2, WORDS, (2, 3))
    packing, seed, mask = Packing.from_lengths(torch.tensor([3, 3]), 3, x.device), torch.tensor([5]), tokens.eq(1)
    packed = x.view(ROWS, SIZE)
    config = ls_train.LSTransformer.get_config(
        vocab_size=WORDS, hidden_size=SIZE, intermediate_size=16, nhead=2, num_encoder_layer=1, num_decoder_layer=1
    )
    encoder_layer = ls_train.LSTransformerEncoderLayer(embed_dim=SIZE, num_heads=2)
    decoder_layer = ls_train.LSTransformerDecoderLayer(embed_dim=SIZE, num_heads=2)
    embedding_config = ls_train.LSTransformerEmbeddingLayer.get_config(
        vocab_size=WORDS, embedding_dim=SIZE, padding_idx=1, dropout=0.5
    )
    embedding = ls_train.LSTransformerEmbeddingLayer(embedding_config)
    encoder, decoder = ls_train.LSTransformerEncoder(config), ls_train.LSTransformerDecoder(config)
    kv, rows = cross_kv(packed, packing, [decoder_layer]), {"packing": packing, "seed": seed}
    memory = {"memory": packed, "memory_packing": packing}
    ordered = {"tokens": tokens.view(-1), **rows, "order": TokenOrder(*tokens.view(-1).sort(stable=True))}
    return {
        "LSCrossEntropyLayer": (
            ls_train.LSCrossEntropyLayer().forward,
            {"inputs": x, "targets": tokens, "weight": torch.randn(WORDS, SIZE)},
        ),
        "LSTransformer": (ls_train.LSTransformer(config).forward, {"source": tokens, "target": tokens, "seed": seed}),
        "LSTransformerDecoder": (
            decoder.forward,
            {"tokens": tokens, "memory": x, "memory_padding_mask": mask, "seed": seed},
        ),
        "LSTransformerDecoder packed": (decoder.forward_packed, {**ordered, **memory}),
        "LSTransformerDecoder start": (decoder.start, {"batch": 2, "memory": packed, "memory_packing": packing}),
        "LSTransformerDecoderLayer": (
            decoder_layer.forward,
            {"x": x, "encoder_out": x, "encoder_padding_mask": mask, "padding_mask": mask, "seed": seed},
        ),
        "LSTransformerDecoderLayer packed": (
            decoder_layer.forward_packed,
            {"x": packed, "kv": kv, "memory": packing, **rows},
        ),
        "LSTransformerEmbeddingLayer": (embedding.forward, {"tokens": tokens, "seed": seed}),
        "LSTransformerEmbeddingLayer packed": (embedding.forward_packed, ordered),
        "LSTransformerEncoder": (encoder.forward, {"tokens": tokens, "seed": seed}),
        "LSTransformerEncoder packed": (encoder.forward_packed, ordered),
        "LSTransformerEncoderLayer": (encoder_layer.forward, {"x": x, "padding_mask": mask, "seed": seed}),
        "LSTransformerEncoderLayer packed": (encoder_layer.forward_packed, {"x": packed, **rows}),
    }


CALLS = {**{name: (getattr(ops, name), kwargs) for name, kwargs in operators().items()}, **layers()}
SPOILED = [
    (name, argument)
    for name, (_, kwargs) in CALLS.items()
    for argument, value in kwargs.items()
    if isinstance(value, (torch.Tensor, Packing, TokenOrder))
]


def test_every_public_name_is_here():
    assert set(ops.__all__) == set(operators())
    modules = {name for name in ls_train.__all__ if is_module(getattr(ls_train, name))}
    assert modules == {name.split()[0] for name in layers()}


def is_module(value):
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_themselves_work(name):
    function, kwargs = CALLS[name]
    function(**kwargs)


@pytest.mark.parametrize(("name", "argument"), SPOILED)
def test_something_that_is_no_tensor(name, argument):
    function, kwargs = CALLS[name]
    optional = "None" in str(inspect.signature(function).parameters[argument].annotation)
    values = ["text", [[1, 0]], np.zeros((2, 3)), 2.5, *([] if optional else [None])]
    for value in values:
        with pytest.raises(TypeError) as caught:
            function(**{**kwargs, argument: value})
        kind = "None" if value is None else type(value).__name__
        assert f"argument {argument} " in str(caught.value)
        assert kind in str(caught.value)
        assert "; pass a " in str(caught.value)


@pytest.mark.parametrize(("name", "argument"), SPOILED)
def test_a_tensor_that_does_not_fit(name, argument):
    """Of another dtype, device or shape. The first tensor sets the measure, so the message may name the next one."""
    function, kwargs = CALLS[name]
    value = kwargs[argument]
    if isinstance(value, Packing):
        spoiled = [Packing.from_lengths(torch.tensor([3, 2]), 3, value.cu_seqlens.device)]
    elif isinstance(value, TokenOrder):
        ids, at = value
        spoiled = [TokenOrder(ids[1:], at), TokenOrder(ids, at.int()), TokenOrder(ids, at.to("meta"))]
    else:
        spoiled = [value.unsqueeze(0), value.to(torch.complex64)]
        if sum(isinstance(given, torch.Tensor) for given in kwargs.values()) > 1:
            spoiled.append(value.to("meta"))
    for other in spoiled:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**{**kwargs, argument: other})
        is_tensor = isinstance(other, torch.Tensor)
        parts = ("shape", "batch", "meta", str(other.dtype)) if is_tensor else ("shape", "batch")
        assert any(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("name", CALLS)
def test_something_that_is_no_number(name):
    function, kwargs = CALLS[name]
    for argument, value in kwargs.items():
        if isinstance(value, (int, float)):
            with pytest.raises(TypeError, match=rf"argument {argument} = 'x' is of type str; pass an? "):
                function(**{**kwargs, argument: "x"})


def test_what_was_right_before_hides_nothing_wrong():
    """Types of positional arguments are remembered; others in their places, or by name, are checked all the same."""

    @check_kinds
    def called(x: torch.Tensor, rows: int, seed: torch.Tensor | None = None) -> int:
        return rows

    x = torch.ones(1)
    wrong = ([(x, "x"), {}], [(1, 1), {}], [(x, None), {}], [(x, 1, 1), {}], [(x,), {"rows": "x"}])
    for _ in range(2):
        for args in ((x, 1), (x, 1, None), (x, 1, x)):
            assert called(*args) == 1
            assert called(x, rows=1) == 1
            for wrong_args, kwargs in wrong:
                with pytest.raises(TypeError, match="pass a"):
                    called(*wrong_args, **kwargs)
