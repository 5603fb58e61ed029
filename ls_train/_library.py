"""Operator registry of the namespace ``ls_train``.

An operator is declared once with :func:`define`, gets its CPU implementation (which is also its definition) from
:func:`reference`, and its CUDA implementation from the compiled library, which is loaded when the first CUDA tensor
reaches any operator. Every operator writes into tensors that its caller provides and returns nothing, so its fake
implementation is empty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "ls_train"

_definitions = torch.library.Library(NAMESPACE, "DEF")
_cuda_loaders: torch.library.Library | None = torch.library.Library(NAMESPACE, "IMPL", "CUDA")
_schemas: dict[str, str] = {}
_compiled_only: set[str] = set()
_load_lock = threading.RLock()


def define(name: str, schema: str, compiled_only: bool = False) -> None:
    """Declare operator ``name`` with ``schema``, for example ``"(Tensor(a!) y, Tensor x) -> ()"``.

    Args:
        name: operator name without namespace.
        schema: argument list and the return type ``-> ()``: outputs first, then inputs, then scalars.
        compiled_only: the operator has no :func:`reference`; :func:`compiled` says where it can be called.

    Raises:
        ValueError: the schema returns something; leaf operators write into their arguments.
    """
    if not schema.replace(" ", "").endswith("->()"):
        raise ValueError(f"operator {name}: schema {schema!r} must end with '-> ()', leaf operators return nothing")
    _definitions.define(name + schema)
    _schemas[name] = schema
    if compiled_only:
        _compiled_only.add(name)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake, lib=_definitions)
    if _cuda_loaders is not None:
        _cuda_loaders.impl(name, _loader(name))


def reference(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the CPU implementation of operator ``name``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _definitions.impl(name, function, "CPU")
        return function

    return register


def operator_names() -> tuple[str, ...]:
    """Return the names of all declared operators with a reference, in order of declaration."""
    return tuple(name for name in _schemas if name not in _compiled_only)


def compiled(name: str, like: Tensor) -> Callable[..., None] | None:
    """Return operator ``name`` if the compiled library implements it where ``like`` lies, else None."""
    if not like.is_cuda:
        return None
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def has_cuda_implementation(name: str) -> bool:
    """Return whether the loaded CUDA library implements operator ``name`` (False before it is loaded)."""
    return _cuda_loaders is None and torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CUDA")


def load_cuda_library() -> None:
    """Build the CUDA library if it is not built yet, and load it into this process.

    Raises:
        ls_train.build.BuildError: no compiler was found or the build failed; the message says what to do.
        OSError: the library was built but cannot be loaded; the next call tries again.
    """
    global _cuda_loaders
    with _load_lock:
        if _cuda_loaders is None:
            return
        from ls_train import build

        path = build.library_path()
        # The library registers its kernels where the loaders are: they have to go first.
        _cuda_loaders._destroy()
        _cuda_loaders = None
        try:
            torch.ops.load_library(path)
        except OSError:
            _cuda_loaders = torch.library.Library(NAMESPACE, "IMPL", "CUDA")
            for name in _schemas:
                _cuda_loaders.impl(name, _loader(name))
            raise


def _fake(*args: Any, **kwargs: Any) -> None:
    return None


def _loader(name: str) -> Callable[..., None]:
    def load_and_call(*args: Any, **kwargs: Any) -> None:
        load_cuda_library()
        getattr(getattr(torch.ops, NAMESPACE), name)(*args, **kwargs)

    return load_and_call
