from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_train.ops import column_sum
from ls_train.ops._arguments import ROW_BLOCKS, statistics_dtype
from ls_train.ops.bias_activation_dropout import bias_activation_dropout_workspace
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm_workspace
from ls_train.ops.column_sum import partial_row_counts
from ls_train.ops.layer_norm import layer_norm_workspace
from tests.kernels.leaf_contract import Call, LeafContract, call, on_every_type, operator, run, seed_tensor


class TestLeaf(LeafContract):
    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        gradients = [torch.empty(24, device=device, dtype=dtype) for _ in range(3)]
        gradients.append(torch.empty(7, device=device, dtype=dtype))
        partials = [torch.randn(size, device=device, dtype=statistics_dtype(dtype)) for size in (3 * 5 * 24 + 1, 9 * 7)]
        counts = partial_row_counts(2).copy_(torch.tensor([5, 9]))
        arguments = {"gradients": gradients, "partials": partials, "partial_rows": counts}
        return [call("column_sum", **arguments, sums=[3, 1], accumulate=False)]


@on_every_type
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("rows", [0, 1, 2, 31, 33, ROW_BLOCKS])
def test_matches_torch(rows: int, columns: int, device: str, dtype: torch.dtype) -> None:
    partials = torch.randn(3, rows, columns, device=device, dtype=statistics_dtype(dtype))
    actual, expected = column_sum(partials, dtype), partials.double().sum(1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=max(eps, 1e-6) * max(1, rows) ** 0.5)


def backward_calls(device: str, dtype: torch.dtype, rows: int, columns: int) -> list[tuple[Call, tuple[str, ...], int]]:
    """Return calls of all operators with column sums, the names of these, and the size of the workspace."""
    seed, used = seed_tensor(3, device), torch.tensor([max(rows - 1, 0)], dtype=torch.int32, device=device)
    x, dy = torch.randn(2, rows, columns, device=device).to(dtype)
    mean, rstd = torch.rand(2, rows, device=device, dtype=statistics_dtype(dtype)) + 0.5
    weight, bias = torch.randn(2, columns, device=device).to(dtype)

    def call_of(name: str, sums: tuple[str, ...], size: int, **arguments: Any) -> tuple[Call, tuple[str, ...], int]:
        return call(name, dy=dy, rows=used, **arguments), sums, size

    dropped = {"seed": seed, "p": 0.3, "offset": 2, "dx": torch.empty_like(x)}
    norm = {"mean": mean, "rstd": rstd, "weight": weight}
    activation = {"saved": x, "bias": bias, **dropped}
    return [
        call_of("bias_dropout_add_bwd", ("dbias",), bias_dropout_add_workspace(rows, columns), **dropped),
        call_of(
            "layer_norm_bwd", ("dweight", "dbias"), layer_norm_workspace(rows, columns),
            **norm, x=x, dx=torch.empty_like(x), dresidual=None,
        ),
        call_of(
            "bias_dropout_add_layer_norm_bwd", ("dweight", "dnorm_bias", "dbias"),
            bias_dropout_add_layer_norm_workspace(rows, columns),
            **norm, **dropped, sum=x, dresidual=torch.empty_like(x), dsum=None,
        ),
        *(
            call_of(
                "bias_activation_dropout_bwd", ("dbias",), bias_activation_dropout_workspace(rows, columns),
                **activation, activation=name,
            )
            for name in ("relu", "gelu")
        ),
    ]  # fmt: skip


@on_every_type
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("columns", [24, 33, 1024])
@pytest.mark.parametrize("rows", [0, 1, 13, 700])
def test_sums_that_operators_leave(rows: int, columns: int, accumulate: bool, device: str, dtype: torch.dtype) -> None:
    """Partial rows of all operators, added up together: the same bits as when each adds up its own."""
    expected: list[Tensor] = []
    gradients: list[Tensor] = []
    partials: list[Tensor] = []
    counted: list[int] = []
    cases = backward_calls(device, dtype, rows, columns)
    counts = partial_row_counts(len(cases)).fill_(-1)
    for i, ((name, arguments), sums, size) in enumerate(cases):
        before = {key: torch.randn(columns, device=device).to(dtype) for key in sums}
        own = {key: value.clone() for key, value in before.items()}
        scratch = torch.full((size,), float("nan"), device=device)
        operator(name)(**arguments, **own, workspace=scratch, partial_rows=None, accumulate=accumulate)
        written = {
            key: value.clone() for key, value in arguments.items() if key in ("dx", "dresidual") and value is not None
        }
        left = torch.full((size,), float("nan"), device=device, dtype=statistics_dtype(dtype))
        operator(name)(**arguments, **before, workspace=left, partial_rows=counts[i : i + 1], accumulate=False)
        for key, value in written.items():
            assert torch.equal(arguments[key], value)
        expected += own.values()
        gradients += before.values()
        partials.append(left)
        counted.append(len(sums))
    assert all(0 <= count <= ROW_BLOCKS for count in counts.tolist())
    run(
        "column_sum",
        {
            "gradients": gradients,
            "partials": partials,
            "partial_rows": counts,
            "sums": counted,
            "accumulate": accumulate,
        },
    )
    for actual, value in zip(gradients, expected, strict=True):
        assert torch.equal(actual, value)


@on_every_type
def test_more_sums_than_one_launch_takes(device: str, dtype: torch.dtype) -> None:
    partials = torch.randn(40, 3, 5, device=device, dtype=statistics_dtype(dtype))
    torch.testing.assert_close(column_sum(partials, dtype), partials.sum(1).to(dtype))


def change(**changes: Any) -> dict[str, Any]:
    arguments = {
        "gradients": [torch.zeros(4), torch.zeros(4), torch.zeros(2)],
        "partials": [torch.zeros(24), torch.zeros(6)],
        "partial_rows": torch.tensor([3, 3]),
        "sums": [2, 1],
        "accumulate": False,
    }
    return arguments | {name: function(arguments[name]) for name, function in changes.items()}


BAD = [
    (change(partial_rows=lambda c: c[:1]), r"argument partial_rows has shape \(1,\); it needs \(2,\)", "has length 1"),
    (change(partial_rows=lambda c: c + 500), "argument partial_rows holds 503", "holds 503"),
    (change(partial_rows=lambda c: c - 4), "argument partial_rows holds -1", "holds -1"),
    (change(partial_rows=lambda c: c.int()), "argument partial_rows has dtype torch.int32", "has dtype int32"),
    (change(sums=lambda s: [2]), "argument sums has length 1", "argument sums has length 1"),
    (change(sums=lambda s: [2, 2]), "argument gradients has 3 tensors, but sums says 4", "are fewer than sums says"),
    (change(sums=lambda s: [1, 1]), "argument gradients has 3 tensors, but sums says 2", "has 6 elements"),
    (change(partials=lambda p: [p[0], p[1][:5]]), "argument partials has 5 elements; it needs 6", "has 5 elements"),
    (change(partials=lambda p: [p[0], p[1].half()]), "argument partials has dtype torch.float16", "has dtype float16"),
    (change(gradients=lambda g: [*g[:2], g[2].half()]), "argument gradients has dtype", "argument gradients has dtype"),
    (change(gradients=lambda g: [g[0], g[0], g[2]]), "argument gradients overlap", "argument gradients overlap"),
]


@pytest.mark.parametrize(("arguments", "message", "compiled"), BAD, ids=[case[1] for case in BAD])
def test_errors(arguments: dict[str, Any], message: str, compiled: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"column_sum: {message}"):
        run("column_sum", arguments)
    if torch.cuda.is_available():
        known: dict[int, Tensor] = {}  # what is one tensor stays one
        moved = {key: [known.setdefault(id(t), t.cuda()) for t in arguments[key]] for key in ("gradients", "partials")}
        with pytest.raises(RuntimeError, match=f"column_sum: .*{compiled}"):
            run("column_sum", arguments | moved)


def test_wrapper_errors() -> None:
    with pytest.raises(TypeError, match="column_sum: argument partials has dtype torch.float16"):
        column_sum(torch.zeros(1, 2, 3, dtype=torch.float16), torch.float16)
    with pytest.raises(ValueError, match="column_sum: argument partials has shape"):
        column_sum(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="column_sum: argument partial_rows holds 265"):
        column_sum(torch.zeros(1, 265, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("rows, columns", [(64, 4096), (4096, 1024)])
def test_sums_wait_for_the_rows_they_add(rows: int, columns: int, captured: bool) -> None:
    """One workspace for calls that follow each other: each adds its own partial rows, not those of the call before."""
    cases = [backward_calls("cuda", torch.float16, rows, columns) for _ in range(2)]
    size = max(size for case in cases for _, _, size in case)
    workspace = torch.full((size,), float("nan"), device="cuda")
    turns = [(call, sums) for pair in zip(*cases, strict=True) for call, sums, _ in pair]

    def backward(into: list[dict[str, Tensor]]) -> None:
        for ((name, arguments), _), gradients in zip(turns, into, strict=True):
            operator(name)(**arguments, **gradients, workspace=workspace, partial_rows=None, accumulate=False)

    def gradients() -> list[dict[str, Tensor]]:
        return [{key: torch.empty(columns, device="cuda", dtype=torch.float16) for key in sums} for _, sums in turns]

    expected, actual = gradients(), [gradients() for _ in range(20)]
    for i, turn in enumerate(expected):
        ((name, arguments), _) = turns[i]
        operator(name)(**arguments, **turn, workspace=workspace, partial_rows=None, accumulate=False)
        torch.cuda.synchronize()
        workspace.fill_(float("nan"))
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for into in actual:
                backward(into)
        graph.replay()
    else:
        for into in actual:
            backward(into)
    for into in actual:
        for turn, wanted in zip(into, expected, strict=True):
            assert all(torch.equal(turn[key], wanted[key]) for key in wanted)
