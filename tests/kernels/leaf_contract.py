"""What every leaf operator promises, tested once for all: a test class inherits :class:`LeafContract`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_train import ops
from ls_train.testing import device_types, devices

assert ops  # declares the operators

Call = tuple[str, dict[str, Any]]
_ACCUMULATED = ("dweight", "dbias", "dnorm_bias", "gradients", "out")
on_every_type = pytest.mark.parametrize("device, dtype", device_types())
_without_gpu = pytest.param("cuda", torch.float32, marks=pytest.mark.skip(reason="needs a CUDA device"))
on_every_gpu_type = pytest.mark.parametrize(
    "device, dtype", [pair for pair in device_types() if pair[0] == "cuda"] or [_without_gpu]
)


def on_a_card(*shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return large shapes that choose a path of a kernel, or none without a card: the reference has one path."""
    return shapes if torch.cuda.is_available() else ()


def call(name: str, /, **arguments: Any) -> Call:
    """Return a call of operator ``name``; its outputs may hold anything."""
    return name, arguments


def operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.ls_train, name).default


@functools.cache
def outputs_of(name: str) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes, without its scratch."""
    arguments = operator(name)._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write and a.name != "workspace")


def run(name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Call an operator and return what it wrote."""
    operator(name)(**arguments)
    return written_by(name, arguments)


def written_by(name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that an operator writes."""
    written: dict[str, Tensor] = {}
    for out in outputs_of(name):
        if isinstance(arguments[out], list):
            written |= {f"{out}[{i}]": tensor for i, tensor in enumerate(arguments[out])}
        elif arguments[out] is not None:
            written[out] = arguments[out]
    return written


def _poison(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(97)


def _same_layout(tensor: Tensor, device: str | None = None) -> Tensor:
    """Return an empty tensor with the same strides, also where they leave gaps, as aligned as can be."""
    if tensor.is_contiguous():
        return tensor.new_empty(tensor.shape, device=device)
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.new_empty(elements, device=device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _map(arguments: dict[str, Any], function) -> dict[str, Any]:
    def mapped(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [mapped(key, item) for item in value]
        return function(key, value) if isinstance(value, Tensor) else value

    return {key: mapped(key, value) for key, value in arguments.items()}


def _shifted(tensor: Tensor) -> Tensor:
    """Return a copy that starts one element into its storage: no alignment beyond the element's."""
    if not tensor.is_contiguous():
        return tensor
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def shifted_call(case: Call) -> Call:
    """Return ``case`` with every tensor as little aligned as its elements are."""
    return case[0], _map(case[1], lambda _, tensor: _shifted(tensor))


def _strided(tensor: Tensor) -> Tensor:
    """Return a copy whose last dimension is not contiguous."""
    return tensor.new_zeros(*tensor.shape, 2)[..., 0].copy_(tensor)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = True) -> None:
    for name, value in expected.items():
        scale = float(value.nan_to_num(0, 0, 0).abs().max()) if value.is_floating_point() and value.numel() else 1.0
        close = 4 * torch.finfo(value.dtype).eps * scale if value.is_floating_point() and not exact else 0.0
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


class LeafContract:
    """Tests of the operators whose calls :meth:`calls` gives.

    Attributes:
        read_write: names of arguments that are read before they are written.
        row_arguments: names of arguments whose rows beyond ``rows`` are poisoned; None for all with N rows.
    """

    read_write: frozenset[str] = frozenset()
    row_arguments: frozenset[str] | None = None

    def calls(self, device: str, dtype: torch.dtype) -> list[Call]:
        """Return the calls under test; the first dimension of row tensors is N = 13, which no other size equals."""
        raise NotImplementedError

    def fresh(self, case: Call) -> Call:
        """Return a call with copies of all tensors, those that are only written holding NaN."""
        name, arguments = case
        written = set(outputs_of(name)) - self.read_write | {"workspace"}

        def copy(key: str, tensor: Tensor) -> Tensor:
            clone = _same_layout(tensor).copy_(tensor)
            return _poison(clone) if key in written else clone

        return name, _map(arguments, copy)

    @pytest.mark.parametrize("device", devices())
    def test_schema(self, device: str) -> None:
        for case in self.calls(device, torch.float32):
            name, arguments = self.fresh(case)
            torch.library.opcheck(operator(name), (), arguments, test_utils=("test_schema", "test_faketensor"))

    @on_every_type
    def test_twice_the_same_bits(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            assert_same(run(*self.fresh(case)), run(*self.fresh(case)))

    @on_every_type
    def test_misaligned_tensors(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            assert_same(run(*shifted_call(self.fresh(case))), run(*self.fresh(case)), exact=False)

    @on_every_gpu_type
    def test_other_stream(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            expected = run(*self.fresh(case))
            name, arguments = self.fresh(case)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # The inputs arrive late on the side stream: a kernel on another stream would read zeros.
                torch.cuda._sleep(20_000_000)
                late = _map(arguments, lambda _, t: _same_layout(t).zero_().copy_(t))
                actual = run(name, late)
            side.synchronize()
            assert_same(actual, expected)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @on_every_gpu_type
    def test_other_device(self, device: str, dtype: torch.dtype) -> None:
        """Tensors of the second card while the first is current; tensors of both are refused."""
        for case in self.calls(device, dtype):
            expected = run(*self.fresh(case))
            name, arguments = self.fresh(case)
            moved = _map(arguments, lambda _, t: _same_layout(t, "cuda:1").copy_(t) if t.is_cuda else t)
            actual = run(name, moved)
            assert torch.cuda.current_device() == 0
            torch.cuda.synchronize(1)
            assert_same({key: value.to("cuda:0") for key, value in actual.items()}, expected)
            for key, tensor in arguments.items():
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    with pytest.raises((ValueError, RuntimeError), match=name):
                        run(name, moved | {key: tensor})

    @on_every_gpu_type
    def test_graph_replay(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            expected = run(*self.fresh(case))
            name, arguments = self.fresh(case)
            pristine = _map(arguments, lambda _, t: t.clone())
            run(name, arguments)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                actual = run(name, arguments)
            for key, tensor in arguments.items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(pristine[key])
            graph.replay()
            assert_same(actual, expected)

    @on_every_type
    def test_wrong_tensors_are_refused(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            name, arguments = self.fresh(case)
            if "rows" in arguments:
                arguments["rows"] = row_count(13, device)
            for key, tensor in arguments.items():
                if not isinstance(tensor, Tensor):
                    continue
                wrong = {"dtype": torch.empty_like(tensor, dtype=torch.int8)}
                wrong["shape"] = tensor[:0] if key == "workspace" else tensor.new_empty((*tensor.shape, 1))
                if tensor.numel() > 1 and tensor.shape[-1] > 1:
                    wrong["strides"] = _strided(tensor)
                if device == "cuda":
                    wrong["device"] = tensor.cpu() if tensor.is_cuda else tensor.cuda()
                for kind, bad in wrong.items():
                    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
                        run(name, arguments | {key: bad})
                    message = str(error.value)
                    assert name in message, f"{kind} of {key}: {message}"
                    # The message may name the tensor that the wrong one was compared with.
                    assert any(other in message for other in arguments), f"{kind} of {key}: {message}"

    @on_every_type
    def test_unused_rows(self, device: str, dtype: torch.dtype) -> None:
        """Rows beyond ``rows`` are poisoned: they contribute nothing and come out as zeros."""
        total, used = 13, 9
        for case in self.calls(device, dtype):
            name, arguments = self.fresh(case)
            if "rows" not in arguments:
                continue

            def is_row_tensor(key: str, tensor: Tensor) -> bool:
                chosen = self.row_arguments is None or key in self.row_arguments
                return chosen and tensor.dim() > 0 and tensor.shape[0] == total

            short = _map(arguments, lambda k, t: t[:used].clone() if is_row_tensor(k, t) else t.clone())
            expected = run(name, short | {"rows": None})
            for key, tensor in arguments.items():
                if isinstance(tensor, Tensor) and is_row_tensor(key, tensor):
                    _poison(tensor[used:])
            arguments["rows"] = torch.tensor([used], dtype=torch.int32, device=device)
            actual = run(name, arguments)
            for key, value in actual.items():
                if is_row_tensor(key, value):
                    assert not value[used:].any(), f"{name}: {key} is not zero beyond the used rows"
                    actual[key] = value[:used]
            assert_same(actual, expected, exact=False)

    @on_every_type
    def test_accumulate(self, device: str, dtype: torch.dtype) -> None:
        for case in self.calls(device, dtype):
            name, arguments = self.fresh(case)
            if "accumulate" not in arguments:
                continue
            expected = run(name, arguments | {"accumulate": False})

            def held(key: str, tensor: Tensor) -> Tensor:
                values = torch.linspace(-1, 1, tensor.numel(), device=device).view(tensor.shape).to(tensor.dtype)
                return values if key in _ACCUMULATED else tensor

            again = _map(self.fresh(case)[1], held)
            for key, value in written_by(name, again).items():
                if key.split("[")[0] in _ACCUMULATED:
                    expected[key] = value + expected[key]
            assert_same(run(name, again | {"accumulate": True}), expected, exact=False)


def row_count(n: int, device: str) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


def seed_tensor(value: int, device: str) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)
