"""Products of the compiled library against float64 and torch's own: shapes, layouts, streams and graphs."""

import threading

import pytest
import torch

from ls_train import _library
from ls_train.ops._product import GEMM_WORKSPACE, gemm_workspace, product
from ls_train.testing import assert_accurate, gpus

needs_gpu = pytest.mark.skipif(not gpus(), reason="plans exist only in the compiled library")
TYPES = (torch.float16, torch.bfloat16)
# (inputs, outputs) of the linear layers of Transformer base and big.
LINEAR = [pair for size in (512, 1024) for pair in ((size, 3 * size), (size, size), (size, 4 * size), (4 * size, size))]
ROWS = (1, 511, 4096)


def random(*shape, dtype, start=0):
    """Return a matrix whose memory begins ``start`` elements behind an allocation of its own."""
    elements = torch.Size(shape).numel()
    return torch.randn(start + elements, device=gpus()[0]).to(dtype)[start:].view(shape)


def check(out, a, b, bias=None, accumulate=False):
    """Assert that two equal calls have the same bits, and that these obey the rule for errors."""
    before, native, again = out.clone(), out.clone(), out.clone()
    if accumulate:
        torch.addmm(native, a, b, out=native)
    elif bias is not None:
        torch.addmm(bias, a, b, out=native)
    else:
        torch.mm(a, b, out=native)
    reference = a.double() @ b.double()
    if bias is not None or accumulate:
        reference += before.double() if accumulate else bias.double()
    product(out, a, b, bias, accumulate)
    assert_accurate(out, reference, out.dtype, native)
    # As `out` lies: another alignment may mean another algorithm.
    result = out.clone()
    out.copy_(again)
    product(out, a, b, bias, accumulate)
    assert torch.equal(out, result)


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), LINEAR)
def test_products_of_linear_layers(inputs, outputs, rows, dtype):
    x, dy = random(rows, inputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    y = torch.empty_like(dy)
    check(y, x, weight.t())
    check(y, x, weight.t(), bias)
    for accumulate in (False, True):
        check(torch.randn_like(x), dy, weight, accumulate=accumulate)
        check(torch.randn_like(weight), dy.t(), x, accumulate=accumulate)


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [512, 1023, 3750])
def test_products_over_a_vocabulary(rows, dtype):
    """Many waves, where the first choice of the heuristic is not always taken; a plan of another thread is the same."""
    x, logits = random(rows, 256, dtype=dtype), random(rows, 40000, dtype=dtype)
    weight = random(40000, 256, dtype=dtype)
    check(torch.empty_like(logits), x, weight.t())
    check(torch.empty_like(x), logits, weight)
    for accumulate in (False, True):
        check(torch.randn_like(weight), logits.t(), x, accumulate=accumulate)
    outs = torch.zeros_like(logits), torch.zeros_like(logits)
    product(outs[0], x, weight.t())
    thread = threading.Thread(target=product, args=(outs[1], x, weight.t()))
    thread.start()
    thread.join()
    assert torch.equal(*outs)


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("start", [0, 1, 8], ids=["aligned", "2 bytes", "16 bytes"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 8, 8), (5, 7, 3), (33, 1, 9), (129, 65, 31), (64, 24, 1), (40, 96, 48)]
)
def test_odd_sizes_and_views(shape, start, dtype):
    m, n, k = shape
    bias = random(n, dtype=dtype, start=start)
    for a in (random(m, k, dtype=dtype, start=start), random(k, m, dtype=dtype, start=start).t()):
        for b in (random(k, n, dtype=dtype, start=start), random(n, k, dtype=dtype, start=start).t()):
            for added, accumulate in ((None, False), (bias, False), (None, True)):
                check(random(m, n, dtype=dtype, start=start), a, b, added, accumulate)
    wide = random(m, n + k + 9, dtype=dtype)
    check(wide[:, 3 : 3 + n], wide[:, 4 + n : 4 + n + k].clone(), random(k, n, dtype=dtype))
    check(random(m, n, dtype=dtype), wide[:, 5 : 5 + k], random(k, n, dtype=dtype))


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_what_plans_do_not_take_is_made_by_torch(dtype):
    """Neither rows nor columns contiguous, an output by columns, nothing to multiply."""
    check(random(7, 5, dtype=dtype).t(), random(5, 3, dtype=dtype), random(3, 7, dtype=dtype))
    check(random(5, 7, dtype=dtype), random(5, 6, dtype=dtype)[:, ::2], random(3, 7, dtype=dtype))
    out = random(5, 7, dtype=dtype)
    product(out, random(5, 0, dtype=dtype), random(0, 7, dtype=dtype))
    assert out.count_nonzero() == 0
    product(random(0, 7, dtype=dtype), random(0, 3, dtype=dtype), random(3, 7, dtype=dtype))


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 511, 1024, 3750])
def test_float32_results_of_16_bit_factors(rows, dtype):
    """The weight gradient of a projection, as autograd's form keeps it."""
    x, dlogits = random(rows, 1024, dtype=dtype), random(rows, 40000, dtype=dtype)
    space = torch.empty(GEMM_WORKSPACE, dtype=torch.uint8, device=gpus()[0])
    for accumulate in (False, True):
        out = torch.randn(40000, 1024, device=gpus()[0])
        reference = (dlogits.t().double() @ x.double()).add_(out.double() if accumulate else 0)
        results = []
        for _ in range(2):
            results.append(out.clone())
            torch.ops.ls_train.product(results[-1], dlogits.t(), x, None, space, accumulate)
        assert torch.equal(*results)
        assert_accurate(results[0], reference, torch.float32)


@needs_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_float32_results_that_plans_do_not_take(accumulate, dtype):
    """The same kinds as those that torch makes of 16-bit results, and odd sizes, which have plans."""
    device = gpus()[0]
    for out, a, b in (
        (torch.randn(7, 5, device=device).t(), random(5, 3, dtype=dtype), random(3, 7, dtype=dtype)),
        (torch.randn(5, 7, device=device), random(5, 6, dtype=dtype)[:, ::2], random(3, 7, dtype=dtype)),
        (torch.randn(5, 7, device=device), random(5, 0, dtype=dtype), random(0, 7, dtype=dtype)),
        (torch.randn(0, 7, device=device), random(0, 3, dtype=dtype), random(3, 7, dtype=dtype)),
        (torch.randn(129, 31, device=device), random(65, 129, dtype=dtype, start=1).t(), random(65, 31, dtype=dtype)),
    ):
        reference = a.double() @ b.double() + (out.double() if accumulate else 0)
        product(out, a, b, None, accumulate)
        assert_accurate(out, reference, torch.float32)


@needs_gpu
def test_two_streams():
    """Each stream has a workspace of its own: sums that are split do not mix."""
    sizes = (64, 96, 16384)  # few tiles and long sums, which are split
    problems = [
        [random(*shape, dtype=torch.float16) for shape in ((sizes[0], sizes[2]), (sizes[2], sizes[1]), sizes[:2])]
        for _ in range(2)
    ]
    expected = []
    for a, b, out in problems:
        product(out, a, b)
        expected.append(out.clone())
        out.zero_()
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (a, b, out) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                product(out, a, b)
    torch.cuda.synchronize()
    for (_, _, out), result in zip(problems, expected, strict=True):
        assert torch.equal(out, result)


@needs_gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_replayed_graph_has_the_bits_of_eager_calls(accumulate):
    weight, bias = random(3072, 1024, dtype=torch.bfloat16), random(3072, dtype=torch.bfloat16)
    x, y = random(777, 1024, dtype=torch.bfloat16), random(777, 3072, dtype=torch.bfloat16)
    dweight = torch.zeros_like(weight)

    def run():
        product(y, x, weight.t(), bias)
        product(dweight, y.t(), x, accumulate=accumulate)

    run()  # the library and cuBLAS are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        x.normal_()
        dweight.zero_()
        run()
        expected = y.clone(), dweight.clone()
        y.zero_()
        dweight.zero_()
        graph.replay()
        assert torch.equal(y, expected[0])
        assert torch.equal(dweight, expected[1])


@needs_gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda a: a[:, :-1]}, r"argument b has shape \(3, 7\); it needs \(K = 2, N = 7\)"),
        ({"b": lambda b: b.bfloat16()}, "argument b has dtype bfloat16"),
        ({"bias": lambda _: torch.ones(6, dtype=torch.float16, device=gpus()[0])}, "argument bias has shape"),
        ({"workspace": lambda w: w[1:]}, "argument workspace does not begin at a multiple of 256 bytes"),
        ({"accumulate": lambda _: True, "bias": lambda _: torch.ones(7).to(gpus()[0]).half()}, "bias must be None"),
        (
            {"out": lambda o: o.float(), "bias": lambda _: torch.ones(7).to(gpus()[0]).half()},
            "bias must be None with a fl",
        ),
        ({"out": lambda o: o.double()}, "argument out has dtype float64; convert it to float16"),
        ({"a": lambda a: a.float()}, "argument out has dtype float16; convert it to float32"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {
        **{
            name: random(*shape, dtype=torch.float16)
            for name, shape in {"out": (5, 7), "a": (5, 3), "b": (3, 7)}.items()
        },
        "bias": None,
        "workspace": torch.empty(1024, dtype=torch.uint8, device=gpus()[0]),
        "accumulate": False,
    }
    torch.ops.ls_train.product(**arguments)
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ls_train.product(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_torch_makes_them_without_a_compiled_library(dtype):
    a, b, bias, out = (torch.ones(shape, dtype=dtype) for shape in ((2, 3), (3, 4), (4,), (2, 4)))
    product(out, a, b, accumulate=True)
    assert torch.equal(out, torch.full_like(out, 4))
    product(out, a, b, bias)
    assert torch.equal(out, torch.full_like(out, 4))
    product(out, a, b)
    assert torch.equal(out, torch.full_like(out, 3))


def test_torch_makes_float32_results_without_a_compiled_library():
    a, b, out = torch.full((2, 3), 300.0).half(), torch.full((3, 4), 300.0).half(), torch.ones(2, 4)
    product(out, a, b, accumulate=True)
    assert torch.equal(out, torch.full_like(out, 270001))
    product(out, a, b)
    assert torch.equal(out, torch.full_like(out, 270000))


@pytest.mark.parametrize("types", [("float16", "float32", "float32"), ("float32", "float16", "bfloat16")])
def test_other_mixtures_are_refused_without_a_compiled_library(types):
    out, a, b = (torch.ones(size, dtype=getattr(torch, kind)) for kind, size in zip(types, ((2, 4), (2, 3), (3, 4))))
    with pytest.raises(RuntimeError, match="dtype"):
        product(out, a, b)


def test_a_bias_is_refused_with_accumulate():
    out, a, b, bias = torch.ones(2, 4), torch.ones(2, 3), torch.ones(3, 4), torch.ones(4)
    with pytest.raises(ValueError, match="argument bias must be None with accumulate"):
        product(out, a, b, bias, accumulate=True)


def test_workspace_is_for_16_bit_types_only():
    assert [gemm_workspace(dtype.itemsize) for dtype in (torch.float16, torch.bfloat16)] == [GEMM_WORKSPACE] * 2
    assert [gemm_workspace(dtype.itemsize) for dtype in (torch.float32, torch.float64)] == [0, 0]
    assert _library.compiled("product", torch.empty(1)) is None
