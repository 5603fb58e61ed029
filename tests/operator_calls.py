"""A mode that remembers which of our operators are called, and with what."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ls_train import _library


class OperatorCalls(TorchDispatchMode):
    """Remembers the calls of our operators: name, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.calls}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == _library.NAMESPACE:
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._opname, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))
