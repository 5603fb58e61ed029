"""Argument checks shared by the operators: every message names operator, argument, value and what to do."""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ls_train import rng
from ls_train.packing import Packing, TokenOrder

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ROW_BLOCKS = 264
"""Largest number of row blocks whose partial column sums a CUDA kernel writes into its workspace."""

_REMEMBERED = 64  # combinations of types that the check of one function remembers


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of statistics and internal arithmetic for activations of type ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# What an argument with this annotation may be, and how a message calls it.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a torch.Tensor"),
    Packing: ((Packing,), "a Packing"),
    TokenOrder: ((TokenOrder,), "a TokenOrder"),
    float: ((float, int, numbers.Real), "a number"),  # abstract classes take a microsecond, and come last
    int: ((int, numbers.Integral), "an integer"),
    str: ((str,), "a string"),
    types.NoneType: ((types.NoneType,), "None"),
}


def check_kinds(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return ``function`` with a check that its arguments are what their annotations say, before it looks at them.

    Tensors, packings, numbers, strings and None are told apart; other annotations are not looked at. The wrong kind
    raises a TypeError that names function, argument and value. Code that ``torch.compile`` traces is not checked.
    """
    passed: set[tuple[type, ...]] = set()  # types of positional arguments that passed before

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not torch.compiler.is_compiling() and (kwargs or tuple(map(type, args)) not in passed):
            for index, name, kinds in _expected(function):
                if index < len(args):
                    value = args[index]
                elif name in kwargs:
                    value = kwargs[name]
                else:
                    continue
                if not isinstance(value, kinds):
                    raise TypeError(f"ls_train.{function.__qualname__}: argument {name} {_mismatch(value, kinds)}")
            if not kwargs and len(passed) < _REMEMBERED:
                passed.add(tuple(map(type, args)))
        return function(*args, **kwargs)

    return checked


@functools.cache
def _expected(function: Callable[..., Any]) -> tuple[tuple[int, str, tuple[type, ...]], ...]:
    """Return position, name and permitted types of the arguments of ``function`` whose annotations can be checked."""
    hints = typing.get_type_hints(function)
    found = []
    for index, name in enumerate(inspect.signature(function).parameters):
        hint = hints.get(name)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if all(kind in _KINDS for kind in kinds):
            found.append((index, name, tuple(one for kind in kinds for one in _KINDS[kind][0])))
    return tuple(found)


def _mismatch(value: Any, kinds: tuple[type, ...]) -> str:
    what = "is None" if value is None else f"= {value!r:.60} is of type {type(value).__name__}"
    return f"{what}; pass {' or '.join(text for known, text in _KINDS.values() if known[-1] in kinds)}"


class Arguments:
    """Checks the arguments of one call of operator ``op`` against the device and type of a leading tensor.

    Args:
        op: operator name for messages.
        name: name of the leading tensor.
        tensor: the leading tensor; it fixes device and activation type of all others.
        dimensions: number of dimensions it must have.
        contiguous: whether it must be contiguous.
    """

    def __init__(self, op: str, name: str, tensor: Tensor, dimensions: int, contiguous: bool = True) -> None:
        self.op = op
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.leader = name
        if tensor.dtype not in FLOAT_TYPES:
            self.fail(TypeError, name, f"has dtype {tensor.dtype}; use float32, float16, bfloat16 or float64")
        if tensor.dtype == torch.float64 and tensor.device.type == "cuda":
            self.fail(TypeError, name, "is float64, which works on the CPU only; convert it to float32")
        if tensor.dim() != dimensions:
            self.fail(ValueError, name, f"has shape {tuple(tensor.shape)}; it needs {dimensions} dimensions")
        if contiguous:
            self._contiguous(name, tensor)

    @property
    def statistics(self) -> torch.dtype:
        """Type of statistics: float32, or float64 for float64 activations."""
        return statistics_dtype(self.dtype)

    def fail(self, error: type[Exception], name: str, what: str) -> None:
        """Raise ``error`` about argument ``name``."""
        raise error(f"ls_train.{self.op}: argument {name} {what}")

    def tensor(
        self,
        name: str,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        contiguous: bool = True,
    ) -> None:
        """Check one tensor argument; None (an optional argument left out) passes.

        Args:
            name: argument name.
            tensor: the argument.
            shape: the shape it must have.
            dtype: the type it must have; None is the leading tensor's type.
            contiguous: whether it must be contiguous; otherwise only its last dimension.
        """
        if tensor is None:
            return
        expected = self.dtype if dtype is None else dtype
        if tensor.device != self.device:
            self.fail(
                ValueError,
                name,
                f"is on {tensor.device} but {self.leader} is on {self.device}; move both to one device",
            )
        if tensor.dtype != expected:
            self.fail(TypeError, name, f"has dtype {tensor.dtype}; convert it to {expected}")
        if tensor.shape != shape:
            self.fail(ValueError, name, f"has shape {tuple(tensor.shape)}; it needs {tuple(shape)}")
        if contiguous:
            self._contiguous(name, tensor)
        elif tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            self.fail(ValueError, name, f"has strides {tensor.stride()}; its last dimension must be contiguous")

    def rows(self, rows: Tensor | None) -> None:
        """Check the optional device row count."""
        self.tensor("rows", rows, (1,), torch.int32)

    def dropout(self, p: float, seed: Tensor | None, offset: int) -> None:
        """Check the dropout probability, seed and site constant."""
        if not 0.0 <= p <= 1.0:
            self.fail(ValueError, "p", f"= {p} must be between 0 and 1")
        if not 0 <= offset < 1 << 32:
            self.fail(ValueError, "offset", f"= {offset} must be between 0 and 2**32 - 1")
        if seed is None and rng.threshold(p) > 0:
            self.fail(ValueError, "seed", f"is missing with p = {p}; pass ls_train.rng.draw_seed(device)")
        self.tensor("seed", seed, (1,), torch.int64)

    def workspace(
        self, workspace: Tensor | None, needed: int, dtype: torch.dtype = torch.float32, name: str = "workspace"
    ) -> None:
        """Check that the scratch of ``dtype``, argument ``name``, holds ``needed`` numbers."""
        if workspace is None:
            self.fail(ValueError, name, f"is missing; pass a {dtype} tensor of {needed} elements")
        self.tensor(name, workspace, (workspace.numel(),), dtype)
        if workspace.numel() < needed:
            self.fail(ValueError, name, f"has {workspace.numel()} elements; it needs {needed}")

    def column_sums(self, workspace: Tensor | None, partial_rows: Tensor | None, needed: int) -> None:
        """Check the scratch for column sums and where the number of partial rows that stay in it is to go."""
        if partial_rows is None:
            self.workspace(workspace, needed)
            return
        self.workspace(workspace, needed, self.statistics)
        if partial_rows.device.type != "cpu":
            self.fail(ValueError, "partial_rows", f"is on {partial_rows.device}; it must be on the CPU")
        if partial_rows.shape != (1,) or partial_rows.dtype != torch.int64:
            what = f"has shape {tuple(partial_rows.shape)} and dtype {partial_rows.dtype}; it needs (1,) and int64"
            self.fail(ValueError, "partial_rows", what)

    def _contiguous(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            self.fail(ValueError, name, f"has strides {tensor.stride()}; call .contiguous() on it first")
