"""Why a checkpoint's tensors do not fit a model, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Shape = tuple[int, ...]
# (name of a tensor, its shape in the checkpoint, its shape in the model); None where there is no such tensor.
Difference = tuple[str, Shape | None, Shape | None]


def architecture(options: Any) -> str:
    """Return the architecture's name in the model options of a configuration or checkpoint."""
    return str(getattr(options, "arch", None) or getattr(options, "_name", None) or "unknown")


def explain(message: str, path: str, data: str, otherwise: str) -> str | None:
    """Return one sentence for the message of ``torch.nn.Module.load_state_dict``, None for any other error.

    Args:
        message: of the error.
        path: the checkpoint.
        data: the data folder, for a dictionary of another size.
        otherwise: the sentence that the first tensor that differs is added to, where it is not the dictionary.
    """
    first = first_difference(_listed(message))
    if first is None:
        return None
    name, there, mine = first
    if _is_dictionary(first):
        side = "source" if name.startswith("encoder") else "target"
        return (
            f"{path} was trained with a {side} dictionary of {there[0]} entries, the one in {data} has {mine[0]}: use "
            "the data folder it was trained with, or preprocess with its dictionaries (--srcdict, --tgtdict)"
        )
    return f"{otherwise}: {sentence(first)}"


def _listed(message: str) -> list[Difference]:
    if "Error(s) in loading state_dict" not in message:
        return []
    sizes = re.findall(
        r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, "
        r"the shape in current model is torch\.Size\(\[([\d, ]*)\]\)",
        message,
    )
    found: list[Difference] = [(name, _numbers(there), _numbers(here)) for name, there, here in sizes]
    for kind, names in re.findall(r"(Missing|Unexpected) key\(s\) in state_dict: (.*)", message):
        there, here = (None, ()) if kind == "Missing" else ((), None)
        found += [(name, there, here) for name in re.findall(r'"([^"]+)"', names)]
    return found


def _numbers(text: str) -> Shape:
    return tuple(int(number) for number in text.split(",") if number.strip())


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Difference]:
    """Return how the tensors of checkpoint ``there`` differ from those of model ``here`` in name and shape."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (there, here)]
    names = dict.fromkeys([*here, *there])
    pairs = [(name, shapes[0].get(name), shapes[1].get(name)) for name in names]
    return [(name, one, other) for name, one, other in pairs if one != other]


def first_difference(found: Iterable[Difference]) -> Difference | None:
    """Return the first difference, an embedding before others: a dictionary of another size explains them all."""
    return min(found, key=lambda difference: not _is_dictionary(difference), default=None)


def _is_dictionary(difference: Difference) -> bool:
    name, there, here = difference
    is_embedding = re.search(r"\.embed_tokens\.weight$", name) is not None
    return is_embedding and bool(there) and bool(here) and there[1:] == here[1:]


def sentence(difference: Difference) -> str:
    """Say what differs, ``there`` being the checkpoint and ``here`` the model."""
    name, there, here = difference
    if there is None:
        return f"{name} is missing there"
    if here is None:
        return f"{name} is not part of it here"
    return f"{name} is {list(there)} there and {list(here)} here"
