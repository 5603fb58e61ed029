from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ls_train.ops import embedding
from ls_train.testing import ROW_SHAPES, assert_accurate, assert_matches_torch
from tests.kernels.leaf_contract import (
    Call,
    LeafContract,
    call,
    on_every_gpu_type,
    on_every_type,
    row_count,
    run,
    seed_tensor,
)
from tests.kernels.test_dropout import kept

WORDS, PLACES = 17, 23


def random_ids(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Return tokens, most of them repeated, and positions."""
    return torch.randint(WORDS, (rows,)).to(device), torch.randint(PLACES, (rows,)).to(device)


class TestLeaf(LeafContract):
    # Not order and sorted_ids: which of them belong to unused rows depends on all ids.
    row_arguments = frozenset({"y", "tokens", "positions", "dy"})

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        rows, columns = 13, 24
        tokens, positions = random_ids(rows, device)
        weight, dweight = torch.randn(2, WORDS, columns, device=device).to(dtype)
        table = torch.randn(PLACES, columns, device=device).to(dtype)
        y, dy = torch.randn(2, rows, columns, device=device).to(dtype)
        sorted_ids, order = tokens.sort(stable=True)
        site = {"seed": seed_tensor(3, device), "rows": None, "scale": 4.0, "p": 0.3, "offset": 2}
        no_dropout = site | {"seed": None, "p": 0.0}
        forward = {"y": y, "tokens": tokens, "positions": positions, "weight": weight, "position_weight": table}
        backward = {"dweight": dweight, "dy": dy, "order": order, "sorted_ids": sorted_ids, "accumulate": False}
        return [
            call("embedding_fwd", **forward, **site),
            call("embedding_fwd", **forward | {"position_weight": None}, **no_dropout),
            call("embedding_bwd", **backward, **site, padding_idx=1),
            call("embedding_bwd", **backward, **no_dropout, padding_idx=-1),
        ]

    @on_every_type
    def test_unused_rows(self, device: str, dtype: torch.dtype) -> None:
        """As for every operator, with the ids of the gradient sorted anew for the short call."""
        used = 9
        forward, _, backward, _ = self.calls(device, dtype)
        short = {k: v[:used] if k in self.row_arguments else v for k, v in forward[1].items()}
        expected = run(*self.fresh(call("embedding_fwd", **short)))["y"]
        name, arguments = self.fresh(forward)
        for ids in ("tokens", "positions"):
            arguments[ids][used:] = 1 << 40
        actual = run(name, arguments | {"rows": row_count(used, device)})["y"]
        assert not actual[used:].any()
        assert torch.equal(actual[:used], expected)

        tokens = forward[1]["tokens"]
        sorted_ids, order = tokens[:used].sort(stable=True)
        name, arguments = self.fresh(backward)
        cut = {"dy": arguments["dy"][:used].clone(), "order": order, "sorted_ids": sorted_ids}
        expected = run(name, arguments | cut)["dweight"].clone()
        arguments["dy"][used:] = float("nan")
        actual = run(name, arguments | {"rows": row_count(used, device)})["dweight"]
        torch.testing.assert_close(actual, expected, rtol=0, atol=4 * torch.finfo(dtype).eps * 20)


@on_every_type
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_matches_torch(shape: tuple[int, int], p: float, device: str, dtype: torch.dtype) -> None:
    tokens, positions = random_ids(shape[0], device)
    weight = torch.randn(WORDS, shape[1], device=device).to(dtype)
    table = torch.randn(PLACES, shape[1], device=device).to(dtype)
    seed = seed_tensor(11, device)
    assert_matches_torch(
        lambda w, t: embedding(tokens, positions, w, t, 3.5, p, seed, 4, padding_idx=1, position_padding_idx=0),
        lambda w, t: kept(
            F.embedding(tokens, w, padding_idx=1) * 3.5 + F.embedding(positions, t, padding_idx=0), 11, 4, p
        ),
        (weight, table),
    )


@on_every_gpu_type
@pytest.mark.parametrize("p", [0.0, 0.3, 0.96875, 0.97])
@pytest.mark.parametrize("shape", [(5000, 1000), (300, 1024), (40, 1032), (40, 1280), (9, 4104), (5, 32768)])
def test_forward_of_wide_rows(shape: tuple[int, int], p: float, device: str, dtype: torch.dtype) -> None:
    """Rows of as many packs as a thread has under way, fewer and more, with ids outside the table in between."""
    tokens, positions = random_ids(shape[0], device)
    tokens[2::100] = WORDS
    positions[3::100] = -1
    weight = torch.randn(WORDS, shape[1], device=device).to(dtype)
    table = torch.randn(PLACES, shape[1], device=device).to(dtype)
    y = embedding(tokens, positions, weight, table, 3.5, p, seed_tensor(11, device), 4)
    valid = (tokens < WORDS) & (positions >= 0)
    assert y[~valid].isnan().all()
    rows = F.embedding(tokens * valid, weight.double()) * 3.5 + F.embedding(positions * valid, table.double())
    assert_accurate(y[valid], kept(rows, 11, 4, p)[valid], dtype)


@on_every_type
def test_one_id_everywhere(device: str, dtype: torch.dtype) -> None:
    """A thousand rows of one id are summed without losing the small ones to rounding."""
    tokens = torch.full((1000,), 3, device=device)
    weight = torch.randn(WORDS, 9, device=device).to(dtype)
    assert_matches_torch(lambda w: embedding(tokens, tokens, w), lambda w: F.embedding(tokens, w), (weight,))


@on_every_type
def test_frozen_position_table(device: str, dtype: torch.dtype) -> None:
    tokens, positions = random_ids(29, device)
    table = torch.randn(PLACES, 16, device=device).to(dtype)
    weight = torch.randn(WORDS, 16, device=device).to(dtype)
    assert_matches_torch(
        lambda w: embedding(tokens, positions, w, table.to(w.dtype), 2.0),
        lambda w: F.embedding(tokens, w) * 2.0 + F.embedding(positions, table.to(w.dtype)),
        (weight,),
    )


@on_every_type
def test_ids_out_of_range(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(WORDS, 8, device=device).to(dtype)
    for bad in (-1, WORDS, 1 << 40):
        tokens = torch.tensor([0, bad, 2], device=device)
        if device == "cpu":
            message = f"embedding_fwd: argument tokens holds {bad}; ids must be between 0 and {WORDS - 1}"
            with pytest.raises(IndexError, match=message):
                embedding(tokens, tokens, weight)
        else:
            y = embedding(tokens, tokens, weight)
            assert y.isnan().any(1).tolist() == [False, True, False]


@on_every_type
def test_gradient_is_exactly_zero_for_absent_and_padding_ids(device: str, dtype: torch.dtype) -> None:
    tokens = torch.tensor([1, 5, 1, 5, 7], device=device)
    weight = torch.randn(WORDS, 8, device=device).to(dtype).requires_grad_()
    (grad,) = torch.autograd.grad(embedding(tokens, tokens, weight, padding_idx=1).sum(), weight)
    assert grad.any(1).nonzero().flatten().tolist() == [5, 7]
    assert_accurate(grad[5], torch.full((8,), 2.0, dtype=torch.float64, device=device), dtype)


@on_every_type
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("columns", [9, 264, 1032])
def test_runs_of_every_length(columns: int, accumulate: bool, device: str, dtype: torch.dtype) -> None:
    """Runs of one id around the lengths that are summed in other ways; ids between and after them are absent."""
    lengths = torch.tensor([1, 7, 8, 9, 1, 31, 32, 33, 34, 2, 64, 300, 40, 1, 1, 5])
    ids, padding_idx = 2 * torch.arange(len(lengths)) + 1, 25  # the run of 40
    tokens = ids.repeat_interleave(lengths)
    tokens = tokens[torch.randperm(tokens.numel())].to(device)
    dy = torch.randn(tokens.numel(), columns, device=device).to(dtype)
    before = torch.randn(100, columns, device=device).to(dtype)
    sorted_ids, order = tokens.sort(stable=True)

    def gradient() -> Tensor:
        dweight = before.clone() if accumulate else torch.full_like(before, float("nan"))
        torch.ops.ls_train.embedding_bwd(
            dweight, dy, order, sorted_ids, None, None, 2.0, 0.0, 0, padding_idx, accumulate
        )
        return dweight

    expected = before.to(torch.float64, copy=True) if accumulate else torch.zeros_like(before, dtype=torch.float64)
    touched = tokens != padding_idx
    expected.index_add_(0, tokens[touched], dy[touched].double(), alpha=2.0)
    dweight = gradient()
    assert_accurate(dweight, expected, dtype)
    absent = torch.ones(100, dtype=torch.bool, device=device).index_fill_(0, tokens[touched], False)
    assert torch.equal(dweight[absent], before[absent] if accumulate else torch.zeros_like(before[absent]))
    assert torch.equal(dweight, gradient())


def assert_sums_rows(tokens: Tensor, columns: int, dtype: torch.dtype) -> None:
    """Assert that the gradient of a table, all of whose ids occur, is the sum of each id's rows."""
    dy = torch.randn(tokens.numel(), columns, device=tokens.device).to(dtype)
    dweight = torch.full((int(tokens.max()) + 1, columns), float("nan"), device=tokens.device).to(dtype)
    sorted_ids, order = tokens.sort(stable=True)
    torch.ops.ls_train.embedding_bwd(dweight, dy, order, sorted_ids, None, None, 1.0, 0.0, 0, -1, False)
    expected = torch.zeros(dweight.shape, dtype=torch.float64, device=tokens.device).index_add_(0, tokens, dy.double())
    assert_accurate(dweight, expected, dtype)


@on_every_type
@pytest.mark.parametrize("before", [0, 5, 206, 215, 255, 480, 505, 1016])
@pytest.mark.parametrize("columns", [9, 264, 1032])
def test_runs_across_blocks(columns: int, before: int, device: str, dtype: torch.dtype) -> None:
    """Runs that start in the positions of one block and end in those of another, behind ids that occur once."""
    lengths = torch.tensor([1] * before + [40, 9, 3, 33, 1, 20, 600, 2])
    tokens = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    assert_sums_rows(tokens[torch.randperm(tokens.numel(), device=device)], columns, dtype)


@on_every_type
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 255, 256, 257, 290])
def test_long_run_at_the_end(rows: int, accumulate: bool, device: str, dtype: torch.dtype) -> None:
    """The last ids are equal; wide rows, so that blocks sum parts of this run that have no other positions to sum."""
    tokens = (torch.arange(rows) // 2).clamp(max=max(0, rows - 40) // 2).to(device)
    dy = torch.randn(rows, 2056, device=device).to(dtype)
    before = torch.randn(rows, 2056, device=device).to(dtype)
    dweight = before.clone()
    torch.ops.ls_train.embedding_bwd(
        dweight, dy, torch.arange(rows, device=device), tokens, None, None, 1.0, 0.0, 0, -1, accumulate
    )
    expected = before.double() if accumulate else torch.zeros_like(before, dtype=torch.float64)
    assert_accurate(dweight, expected.index_add(0, tokens, dy.double()), dtype)


@on_every_gpu_type
@pytest.mark.parametrize("columns", [1031, 1032])
def test_blocks_that_look_for_long_runs_in_several_places(columns: int, device: str, dtype: torch.dtype) -> None:
    """Rows so many and wide that every block for long runs has up to three groups of positions, runs in each."""
    lengths = torch.tensor([40, 1, 3, 33, 64, 17, 100, 2] * 40)
    tokens = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
    assert_sums_rows(tokens, columns, dtype)


@on_every_type
@pytest.mark.parametrize("used", [0, 1, 2000, 6000])
@pytest.mark.parametrize("columns", [16, 19])
def test_long_runs_with_dropout_and_unused_rows(columns: int, used: int, device: str, dtype: torch.dtype) -> None:
    """Against float64 on the CPU: runs around the lengths that are summed in other ways, or in several passes."""
    lengths = torch.tensor([511, 1, 512, 32, 513, 33, 1024, 31, 1025, 64, 2, 1500])
    tokens = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = tokens[torch.randperm(len(tokens))]
    dy = torch.randn(len(tokens), columns).to(dtype)
    sorted_ids, order = tokens.sort(stable=True)
    seed, rows = seed_tensor(7, device), torch.tensor([used], dtype=torch.int32, device=device)

    def gradient(dy: torch.Tensor) -> torch.Tensor:
        dweight = torch.full((len(lengths), columns), float("nan"), dtype=dy.dtype, device=dy.device)
        inputs = [tensor.to(dy.device) for tensor in (dy, order, sorted_ids, seed, rows)]
        torch.ops.ls_train.embedding_bwd(dweight, *inputs, 2.0, 0.3, 5, -1, False)
        return dweight

    expected = gradient(dy.double()).to(device)
    dweight = gradient(dy.to(device))
    assert_accurate(dweight, expected, dtype)
    assert torch.equal(dweight, gradient(dy.to(device)))


@on_every_type
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1024, 1025, 33000])
def test_absent_ids_get_zeros(rows: int, device: str, dtype: torch.dtype) -> None:
    """Wherever they are among the ids of the batch, however many these are; every row of the table is written."""
    words = 3001
    tokens = (torch.randint(words // 7, (rows,)) * 7 + 3).to(device)
    dweight = torch.full((words, 8), float("nan"), device=device).to(dtype)
    sorted_ids, order = tokens.sort(stable=True)
    ones = torch.ones(rows, 8, device=device).to(dtype)
    torch.ops.ls_train.embedding_bwd(dweight, ones, order, sorted_ids, None, None, 1.0, 0.0, 0, -1, False)
    expected = torch.bincount(tokens, minlength=words)[:, None].expand(words, 8)
    assert torch.equal(dweight, expected.to(dtype))


@on_every_gpu_type
def test_gradient_of_ids_out_of_range(device: str, dtype: torch.dtype) -> None:
    """They reach no row, also where many are equal."""
    tokens = torch.randint(WORDS, (300,), device=device)
    bad = torch.tensor([-1, -7, WORDS, 1 << 40], device=device).repeat_interleave(50)
    weight = torch.randn(WORDS, 24, device=device).to(dtype).requires_grad_()
    dy = torch.randn(500, 24, device=device).to(dtype)
    (wanted,) = torch.autograd.grad(embedding(tokens, tokens, weight), weight, dy[:300])
    (got,) = torch.autograd.grad(embedding(torch.cat([tokens, bad]), torch.cat([tokens, bad]), weight), weight, dy)
    torch.testing.assert_close(got, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps * float(wanted.abs().max()))


def test_gradcheck() -> None:
    tokens, positions = random_ids(6, "cpu")
    weight = torch.randn(WORDS, 2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(PLACES, 1, dtype=torch.float64).repeat(1, 2).requires_grad_()
    seed = torch.tensor([3])
    assert torch.autograd.gradcheck(
        lambda w: embedding(tokens, positions, w, table.detach(), 2.0, 0.3, seed, padding_idx=1), (weight,)
    )
    assert torch.autograd.gradcheck(
        lambda t: embedding(tokens, positions, weight.detach(), t, 2.0, 0.3, seed, position_padding_idx=1), (table,)
    )


def test_errors() -> None:
    weight, ids = torch.randn(5, 4), torch.tensor([1, 2])
    with pytest.raises(TypeError, match="embedding: argument tokens has dtype torch.int32; convert it to torch.int64"):
        embedding(ids.int(), ids, weight)
    with pytest.raises(ValueError, match=r"argument positions has shape \(1,\); it needs \(2,\)"):
        embedding(ids, ids[:1], weight)
    with pytest.raises(ValueError, match=r"argument position_weight has shape \(9, 3\); it needs \(9, 4\)"):
        embedding(ids, ids, weight, torch.randn(9, 3))
