"""Whether a checkpoint's tensors fit a model, and one sentence that says why not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fairseq_plugin.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]


def architecture(options: Any) -> str:
    """Return the architecture's name in the model options of a configuration or checkpoint."""
    return str(getattr(options, "arch", None) or getattr(options, "_name", None) or "unknown")


def check_model(state: Mapping[str, Any], model: torch.nn.Module, cfg: Any, path: str) -> None:
    """Refuse the checkpoint ``state``, read from ``path``, if its tensors do not fit ``model``.

    Older key names are understood, as the model's own upgrade does. A run that prunes layers while loading is left to
    fairseq.

    Raises:
        UserError: naming both dictionary sizes, or both architectures and the first tensor that differs.
    """
    if getattr(cfg.model, "encoder_layers_to_keep", None) or getattr(cfg.model, "decoder_layers_to_keep", None):
        return
    tensors = dict(state["model"])
    model.upgrade_state_dict(tensors)
    saved = state.get("cfg")
    problem = difference(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
    )
    if problem is None:
        return
    name = _dictionary(problem)
    if name is not None:
        raise UserError(_dictionary_message(path, name, problem, getattr(cfg.task, "data", "the data folder")))
    held = architecture(saved.model) if saved is not None and "model" in saved else "unknown"
    raise UserError(
        f"{path} holds a model of architecture {held}, --arch {architecture(cfg.model)} with these options builds "
        f"another one: {_sentence(problem)}; give the options of the checkpoint's run or another --save-dir"
    )


def explain_load_error(message: str, path: str) -> str | None:
    """Return one sentence for the message of ``torch.nn.Module.load_state_dict``, None for any other error."""
    if "Error(s) in loading state_dict" not in message:
        return None
    sizes = re.findall(
        r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, "
        r"the shape in current model is torch\.Size\(\[([\d, ]*)\]\)",
        message,
    )
    for name, there, here in sizes:
        problem = (name, _numbers(there), _numbers(here))
        if _dictionary(problem) is not None:
            return _dictionary_message(path, name, problem, "the data folder")
    if sizes:
        name, there, here = sizes[0]
        return f"{path} does not fit its own model options: {_sentence((name, _numbers(there), _numbers(here)))}"
    names = re.findall(r'(Missing|Unexpected) key\(s\) in state_dict: "([^"]+)"', message)
    if not names:
        return None
    kind, name = names[0]
    return f"{path} does not fit its own model options: {name} is {kind.lower()} there"


Problem = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]


def difference(there: Shapes, here: Shapes) -> Problem | None:
    """Return (name, shape there, shape here) of a tensor that differs, None for a missing one; None if all are equal.

    Embeddings come first, because a dictionary of another size explains every tensor that has its length.
    """
    problems = [
        (name, there.get(name), here.get(name)) for name in _ordered(there, here) if there.get(name) != here.get(name)
    ]
    return min(problems, key=lambda problem: _dictionary(problem) is None, default=None)


def _ordered(there: Iterable[str], here: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*here, *there]))


def _dictionary(problem: Problem) -> str | None:
    name, there, here = problem
    embedding = re.search(r"(\w+)\.embed_tokens\.(?:embeddings\.0\.0\.)?weight$", name)
    if embedding is None or there is None or here is None or there[1:] != here[1:]:
        return None
    return name


def _dictionary_message(path: str, name: str, problem: Problem, data: str) -> str:
    side = "source" if name.startswith("encoder") else "target"
    return (
        f"{path} was trained with a {side} dictionary of {problem[1][0]} entries, the one in {data} has "
        f"{problem[2][0]}: use the data folder it was trained with, or preprocess with its dictionaries "
        "(--srcdict, --tgtdict)"
    )


def _sentence(problem: Problem) -> str:
    name, there, here = problem
    if there is None:
        return f"{name} is missing there"
    if here is None:
        return f"{name} is not part of it here"
    return f"{name} is {list(there)} there and {list(here)} here"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
