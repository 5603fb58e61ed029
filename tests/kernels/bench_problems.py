"""What the kernel benchmark times: each operator on fresh buffers, and the same mathematics in plain PyTorch.

The bytes of a problem are those that its kernel must move at least, as the header comment of the kernel counts them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ls_train import rng
from ls_train.ops.attention import attention_workspace
from ls_train.ops.bias_activation_dropout import bias_activation_dropout_workspace
from ls_train.ops.bias_dropout_add import bias_dropout_add_workspace
from ls_train.ops.bias_dropout_add_layer_norm import bias_dropout_add_layer_norm_workspace
from ls_train.ops.grad_norm import grad_norm_workspace
from ls_train.ops.layer_norm import layer_norm_workspace

P = 0.1  # dropout probability of every problem that has dropout
SMOOTHING = 0.1
_OFFSET = 3


@dataclass(frozen=True)
class Problem:
    """One operator at one size, with its own buffers.

    Attributes:
        inputs: arguments of ``formula``, the first ``differentiable`` of them with gradients.
        formula: the forward in plain PyTorch.
        ours: name of the timed part (``fwd``, ``bwd``, ``sort_bwd``, ``step``, ``autograd_step``) to the call of our
            operator.
        moved: name of the part to the bytes it must move.
        peers: other libraries' form of the forward.
        calls: name of the part to further peers of it, by name, that are called as they are.
    """

    inputs: tuple[Tensor, ...]
    formula: Callable[..., Tensor | tuple[Tensor, ...]]
    differentiable: int
    ours: dict[str, Callable[[], None]]
    moved: dict[str, int]
    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    calls: dict[str, dict[str, Callable[[], object]]] = field(default_factory=dict)


class Buffers:
    """Random tensors of one type on one device.

    Args:
        dtype: type of activations and parameters.
        device: where they live.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.size = dtype.itemsize
        self.seed = rng.draw_seed(device)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def ids(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, device=self.device)


def layer_norm(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``layer_norm`` on (rows, columns)."""
    x, weight, bias, dy = b(rows, columns), b(columns), b(columns), b(rows, columns)
    y, dx, dweight, dbias = b.empty(rows, columns), b.empty(rows, columns), b.empty(columns), b.empty(columns)
    mean, rstd = b.floats(2, rows)
    scratch = b.floats(layer_norm_workspace(rows, columns))
    leaf = torch.ops.ls_train
    tensor = rows * columns * b.size
    return Problem(
        (x, weight, bias),
        lambda x, weight, bias: F.layer_norm(x, x.shape[1:], weight, bias),
        3,
        {
            "fwd": lambda: leaf.layer_norm_fwd(y, mean, rstd, x, weight, bias, None, 1e-5),
            "bwd": lambda: leaf.layer_norm_bwd(
                dx, dweight, dbias, scratch, None, dy, None, x, mean, rstd, weight, None, False
            ),
        },
        {"fwd": 2 * tensor, "bwd": 3 * tensor},
        _layer_norm_peers(),
    )


def bias_dropout_add(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``bias_dropout_add`` on (rows, columns)."""
    x, bias, residual, dy = b(rows, columns), b(columns), b(rows, columns), b(rows, columns)
    y, dx, dbias = b.empty(rows, columns), b.empty(rows, columns), b.empty(columns)
    scratch = b.floats(bias_dropout_add_workspace(rows, columns))
    leaf = torch.ops.ls_train
    tensor = rows * columns * b.size
    return Problem(
        (x, bias, residual),
        lambda x, bias, residual: residual + F.dropout(x + bias, P),
        3,
        {
            "fwd": lambda: leaf.bias_dropout_add_fwd(y, x, bias, residual, b.seed, None, P, _OFFSET),
            "bwd": lambda: leaf.bias_dropout_add_bwd(dx, dbias, scratch, None, dy, b.seed, None, P, _OFFSET, False),
        },
        {"fwd": 3 * tensor, "bwd": 2 * tensor},
    )


def bias_gradient(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of a bias's gradient alone, as ``bias_dropout_add_bwd`` makes it without dropout."""
    x, bias, dy = b(rows, columns), b(columns), b(rows, columns)
    dbias, scratch = b.empty(columns), b.floats(bias_dropout_add_workspace(rows, columns))
    leaf = torch.ops.ls_train
    return Problem(
        (bias, x),
        lambda bias, x: x + bias,
        1,
        {"bwd": lambda: leaf.bias_dropout_add_bwd(None, dbias, scratch, None, dy, None, None, 0.0, 0, False)},
        {"bwd": rows * columns * b.size},
    )


def bias_dropout_add_layer_norm(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``bias_dropout_add_layer_norm`` on (rows, columns), with a gradient of the sum too."""
    x, residual, dy, dsum = (b(rows, columns) for _ in range(4))
    bias, weight, norm_bias = (b(columns) for _ in range(3))
    y, total, dx, dresidual = (b.empty(rows, columns) for _ in range(4))
    dbias, dweight, dnorm_bias = (b.empty(columns) for _ in range(3))
    mean, rstd = b.floats(2, rows)
    scratch = b.floats(bias_dropout_add_layer_norm_workspace(rows, columns))
    leaf = torch.ops.ls_train
    tensor = rows * columns * b.size

    def formula(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + F.dropout(x + bias, P)
        return F.layer_norm(total, total.shape[1:], weight, norm_bias), total

    return Problem(
        (x, bias, residual, weight, norm_bias),
        formula,
        5,
        {
            "fwd": lambda: leaf.bias_dropout_add_layer_norm_fwd(
                y, total, mean, rstd, x, bias, residual, weight, norm_bias, b.seed, None, 1e-5, P, _OFFSET
            ),
            "bwd": lambda: leaf.bias_dropout_add_layer_norm_bwd(
                dx, dresidual, dbias, dweight, dnorm_bias, scratch, None, dy, dsum, total, mean, rstd, weight, b.seed,
                None, P, _OFFSET, False,
            ),
        },
        {"fwd": 4 * tensor, "bwd": 5 * tensor},
    )  # fmt: skip


def bias_activation_dropout(b: Buffers, rows: int, columns: int, activation: str = "relu") -> Problem:
    """Return the problem of ``bias_activation_dropout`` on (rows, columns)."""
    x, bias, dy = b(rows, columns), b(columns), b(rows, columns)
    y, dx, dbias = b.empty(rows, columns), b.empty(rows, columns), b.empty(columns)
    scratch = b.floats(bias_activation_dropout_workspace(rows, columns))
    saved = y if activation == "relu" else x
    function = {"relu": F.relu, "gelu": F.gelu}[activation]
    leaf = torch.ops.ls_train
    tensor = rows * columns * b.size
    return Problem(
        (x, bias),
        lambda x, bias: F.dropout(function(x + bias), P),
        2,
        {
            "fwd": lambda: leaf.bias_activation_dropout_fwd(y, x, bias, b.seed, None, P, _OFFSET, activation),
            "bwd": lambda: leaf.bias_activation_dropout_bwd(
                dx, dbias, scratch, None, dy, saved, bias, b.seed, None, P, _OFFSET, activation, False
            ),
        },
        {"fwd": 2 * tensor, "bwd": 3 * tensor},
    )


def bias_gelu_dropout(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``bias_activation_dropout`` with the exact GELU."""
    return bias_activation_dropout(b, rows, columns, "gelu")


def dropout(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``dropout`` on (rows, columns); its backward is the same operator."""
    x, y = b(rows, columns), b.empty(rows, columns)
    return Problem(
        (x,),
        lambda x: F.dropout(x, P),
        1,
        {"fwd": lambda: torch.ops.ls_train.dropout_fwd(y, x, b.seed, None, P, _OFFSET)},
        {"fwd": 2 * rows * columns * b.size},
    )


def scale_cast(b: Buffers, rows: int, columns: int) -> Problem:
    """Return the problem of ``scale_cast`` on (rows, columns) in float32, such as a weight's gradient."""
    x, y, factor = torch.randn(rows, columns, device=b.device), b.empty(rows, columns), b.floats(1).fill_(64)
    return Problem(
        (x,),
        lambda x: (factor * x).to(b.dtype),
        0,
        {"fwd": lambda: torch.ops.ls_train.scale_cast(y, x, factor, False)},
        {"fwd": rows * columns * (x.itemsize + b.size)},
        calls={"fwd": {"torch_mul_out": lambda: torch.mul(x, factor, out=y)}},
    )


def softmax_dropout(b: Buffers, rows: int, keys: int) -> Problem:
    """Return the problem of ``softmax_dropout`` on ``rows`` rows of 16 heads."""
    shape = (max(1, rows // (16 * keys)), 16, keys, keys)
    x, dy = b(*shape), b(*shape)
    y, probs, dx = (b.empty(*shape) for _ in range(3))
    leaf = torch.ops.ls_train
    tensor = x.numel() * b.size
    return Problem(
        (x,),
        lambda x: F.dropout(x.softmax(-1), P),
        1,
        {
            "fwd": lambda: leaf.softmax_dropout_fwd(y, probs, x, None, b.seed, False, P, _OFFSET),
            "bwd": lambda: leaf.softmax_dropout_bwd(dx, dy, probs, b.seed, P, _OFFSET),
        },
        {"fwd": 3 * tensor, "bwd": 3 * tensor},
    )


def embedding(b: Buffers, rows: int, columns: int, vocabulary: int = 40000) -> Problem:
    """Return the problem of ``embedding``: ``rows`` tokens, one in twenty the same, of a 40k vocabulary."""
    vocabulary = min(vocabulary, 4 * rows)
    tokens = b.ids(vocabulary, rows).masked_fill_(b.ids(20, rows) == 0, 5)
    positions = b.ids(64, rows)
    weight, table, dy = b(vocabulary, columns), b(64, columns), b(rows, columns)
    y, dweight = b.empty(rows, columns), b.empty(vocabulary, columns)
    sorted_ids, order = tokens.sort(stable=True)
    leaf = torch.ops.ls_train

    def backward(order: Tensor, sorted_ids: Tensor) -> None:
        leaf.embedding_bwd(dweight, dy, order, sorted_ids, b.seed, None, 4.0, P, _OFFSET, -1, False)

    def sort_and_backward() -> None:
        sorted_ids, order = tokens.sort(stable=True)
        backward(order, sorted_ids)

    moved = (rows + vocabulary) * columns * b.size
    return Problem(
        (weight, table, tokens, positions),
        lambda weight, table, tokens, positions: F.dropout(
            4.0 * F.embedding(tokens, weight) + F.embedding(positions, table), P
        ),
        1,
        {
            "fwd": lambda: leaf.embedding_fwd(y, tokens, positions, weight, table, b.seed, None, 4.0, P, _OFFSET),
            "bwd": lambda: backward(order, sorted_ids),
            "sort_bwd": sort_and_backward,  # PyTorch's backward sorts too
        },
        {"fwd": 2 * rows * columns * b.size, "bwd": moved, "sort_bwd": moved},
        calls={
            # By itself, without the dropout and the scale that ours and the formula have.
            "sort_bwd": {
                "torch_embedding_backward": lambda: torch.ops.aten.embedding_dense_backward(
                    dy, tokens, vocabulary, -1, False
                )
            }
        },
    )


def cross_entropy(b: Buffers, rows: int, classes: int) -> Problem:
    """Return the problem of ``cross_entropy`` on (rows, classes); ``step`` is loss and gradient in one pass."""
    logits, dlogits, target = b(rows, classes), b.empty(rows, classes), b.ids(classes, rows)
    loss, nll, lse, dloss = b.floats(4, rows)
    leaf = torch.ops.ls_train
    tensor = rows * classes * b.size
    return Problem(
        (logits, target),
        lambda logits, target: F.cross_entropy(logits, target, reduction="none", label_smoothing=SMOOTHING),
        1,
        {
            "fwd": lambda: leaf.cross_entropy_fwd(loss, nll, lse, None, logits, target, None, SMOOTHING, -100),
            "bwd": lambda: leaf.cross_entropy_bwd(dlogits, dloss, logits, lse, target, None, SMOOTHING, -100),
            "step": lambda: leaf.cross_entropy_inplace(logits, loss, nll, None, target, None, None, SMOOTHING, -100),
        },
        {"fwd": tensor, "bwd": 2 * tensor, "step": 2 * tensor},
        _cross_entropy_peers(),
    )


def attention(b: Buffers, rows: int, length: int) -> Problem:
    """Return the problem of ``attention``: ``rows`` tokens in sequences of ``length``, 16 heads of 64."""
    batch, heads, width = max(1, rows // length), 16, 64
    rows = batch * length
    packed, dout = b(rows, 3, heads, width), b(rows, heads, width)
    gradient, out = torch.empty_like(packed), b.empty(rows, heads, width)
    lse = b.floats(rows, heads)
    cu = torch.arange(0, rows + 1, length, dtype=torch.int32, device=b.device)
    scratch = b.floats(attention_workspace(rows, heads, width, rows))
    (q, k, v), (dq, dk, dv) = packed.unbind(1), gradient.unbind(1)
    scale = width**-0.5
    leaf = torch.ops.ls_train

    def formula(packed: Tensor) -> Tensor:
        q, k, v = packed.view(batch, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=P)

    tensor = rows * heads * width * b.size
    return Problem(
        (packed,),
        formula,
        1,
        {
            "fwd": lambda: leaf.attention_fwd(
                out, lse, q, k, v, cu, cu, b.seed, length, length, False, scale, P, _OFFSET
            ),
            "bwd": lambda: leaf.attention_bwd(
                dq, dk, dv, scratch, dout, q, k, v, out, lse, cu, cu, b.seed, length, length, False, scale, P, _OFFSET
            ),
        },
        {"fwd": 4 * tensor, "bwd": 8 * tensor},
    )


def grad_norm(b: Buffers, parameters: int, _: int) -> Problem:
    """Return the problem of ``grad_norm`` over ``parameters`` elements."""
    grad = b(parameters)
    norm, found_inf, scratch = b.floats(1), b.floats(1), b.floats(grad_norm_workspace())
    segments = torch.tensor([0, parameters], device=b.device)
    return Problem(
        (grad,),
        lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float32),
        0,
        {"step": lambda: torch.ops.ls_train.grad_norm(norm, found_inf, scratch, grad, segments, None)},
        {"step": parameters * b.size},
    )


def adam(b: Buffers, parameters: int, _: int) -> Problem:
    """Return the problem of ``adam`` over ``parameters`` elements; the peer is torch's fused AdamW in float32."""
    param, grad = b(parameters), b(parameters)
    master = None if b.dtype == torch.float32 else param.float()
    moments = b.floats(2, parameters)
    segments = torch.tensor([0, parameters], device=b.device)
    group = torch.zeros(1, dtype=torch.int32, device=b.device)
    step, update = torch.ones(1, dtype=torch.int64, device=b.device), torch.ones(2, dtype=torch.int64, device=b.device)
    hyper = torch.tensor([[0.9, 0.98, 1e-8, 1e-4, 5e-4, 5e-4]], dtype=torch.float64, device=b.device)
    state = (param, master, None, *moments, grad, segments, group, step, None, hyper, update, None, None)
    wide = param.float(), grad.float(), torch.zeros_like(moments[0]), torch.zeros_like(moments[0])
    count = torch.ones((), device=b.device)

    def formula(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
        torch._fused_adamw_(
            [param], [grad], [exp_avg], [exp_avg_sq], [], [count], lr=5e-4, beta1=0.9, beta2=0.98, weight_decay=1e-4,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return param

    return Problem(
        wide,
        formula,
        0,
        {"step": lambda: torch.ops.ls_train.adam(*state, True, True, False)},
        {"step": 28 * parameters},
    )


def _layer_norm_peers() -> dict[str, Callable[..., Tensor]]:
    peers = {}
    if importlib.util.find_spec("apex") and importlib.util.find_spec("apex.normalization"):
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        peers["apex"] = lambda x, weight, bias: fused_layer_norm_affine(x, weight, bias, x.shape[1:])
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        peers["liger"] = lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
    return peers


def _cross_entropy_peers() -> dict[str, Callable[..., Tensor]]:
    if not importlib.util.find_spec("liger_kernel"):
        return {}
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    # It overwrites the logits by their gradient, so its forward is our one-pass step.
    return {"liger": LigerCrossEntropyLoss(label_smoothing=SMOOTHING)}
