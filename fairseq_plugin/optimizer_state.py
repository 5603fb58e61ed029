"""Adam's state between fairseq's classes and layouts and the plugin's.

fairseq keeps an optimizer's state without names: entry i belongs to the i-th parameter of the model that was saved, or
entry 0 to all of them joined (``--fp16`` with flat gradients). The order of a model's parameters is the order of their
keys in its state dict, which lies in the same checkpoint; so entries find their parameters by name, in a model that
registers the same parameters in another order, under another optimizer of the family, flat or not.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_plugin.errors import UserError
from fairseq_plugin.resume import KEY, MASTERS

logger = logging.getLogger(__name__)

ORDER = "parameter_order"
MASTER = "master"
ADAM_NAMES = ("adam", "ls_adam")
# Wrappers of mixed precision and the optimizers themselves; what is inside decides whether the state can be used.
ADAM_CLASSES = (
    "FairseqAdam",
    "LSAdam",
    "FP16Optimizer",
    "LSFP16Optimizer",
    "MemoryEfficientFP16Optimizer",
    "AMPOptimizer",
)

Order = Sequence[tuple[str, tuple[int, ...]]]
Entry = dict[str, Any]


def fairseq_name(name: str) -> str:
    """Return fairseq's class or registered name for the plugin's twin of it, any other name as it is."""
    return re.sub(r"^(LS(?=[A-Z])|ls_)", "", name)


def remember_order(state: dict[str, Any]) -> None:
    """Write the order of the saved model's tensors into the optimizer's state, which reaches every rank."""
    optimizer = state.get("last_optimizer_state")
    if isinstance(optimizer, dict):
        optimizer[ORDER] = saved_order(state["model"])


def saved_order(model: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of every tensor of a saved model, in the order in which the model registered them."""
    return [(name, tuple(tensor.shape)) for name, tensor in model.items() if isinstance(tensor, Tensor)]


def match_names(trainer: Any) -> None:
    """Give the last entry of the optimizer history this run's class names where they mean the same.

    fairseq refuses a checkpoint whose criterion or optimizer class has another name. A criterion and the plugin's twin
    of it compute the same; the state of any Adam is converted by :func:`convert_at_load`.
    """
    last = trainer._optim_history[-1]
    here = {
        "criterion_name": type(trainer.get_criterion()).__name__,
        "optimizer_name": type(trainer.optimizer).__name__,
    }
    same = {
        "criterion_name": lambda a, b: fairseq_name(a) == fairseq_name(b),
        "optimizer_name": lambda a, b: _adams(trainer) and {a, b} <= set(ADAM_CLASSES),
    }
    for key, name in here.items():
        if last.get(key) != name and same[key](last.get(key, ""), name):
            logger.info(f"checkpoint of {last[key]} goes on under {name}")
            last[key] = name


def _adams(trainer: Any) -> bool:
    return getattr(trainer.cfg.optimizer, "_name", None) in ADAM_NAMES


def convert_at_load(trainer: Any) -> None:
    """Let the trainer's new optimizer convert the next state it loads to its own order and layout.

    Other optimizers than Adam and sharded states get what was saved.
    """
    if not _adams(trainer):
        return
    optimizer = trainer.optimizer
    load = optimizer.load_state_dict
    names = parameter_names(trainer)

    def load_state_dict(state: Any, overrides: Mapping[str, Any] | None = None) -> None:
        del optimizer.load_state_dict
        order = state.get(ORDER) if isinstance(state, Mapping) else None
        if order is not None and "state" in state:
            groups = optimizer.optimizer.param_groups
            sizes = [[p.numel() for p in group["params"]] for group in groups]
            state = convert(state, order, names, sizes, _keeps_masters(trainer))
            for group, saved in zip(groups, state["param_groups"]):
                # An option that the saved optimizer did not have keeps this one's value.
                saved.update({k: v for k, v in group.items() if k not in saved})
        load(state, overrides)

    optimizer.load_state_dict = load_state_dict


def _keeps_masters(trainer: Any) -> bool:
    first = trainer.optimizer.optimizer.param_groups[0]["params"][0]
    return trainer.cfg.optimizer._name == "ls_adam" and first.dtype in (torch.float16, torch.bfloat16)


def parameter_names(trainer: Any) -> list[tuple[str, set[str], tuple[int, ...]]]:
    """Return (name, all names, shape) of every parameter the trainer optimises, in its order."""
    return parameters(trainer.get_model(), trainer.get_criterion())


def parameters(
    model: torch.nn.Module, criterion: torch.nn.Module | None = None
) -> list[tuple[str, set[str], tuple[int, ...]]]:
    """Return (name, all names, shape) of every trained parameter, in fairseq's order; tied ones have several names."""
    criterion = criterion or torch.nn.Module()
    aliases: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), set()).add(name)
    for name, parameter in criterion.named_parameters():
        aliases.setdefault(id(parameter), set()).add(f"criterion.{name}")
    unique = {id(p): p for p in [*model.parameters(), *criterion.parameters()] if p.requires_grad}
    return [(min(aliases[key]), aliases[key], tuple(p.shape)) for key, p in unique.items()]


def convert(
    saved: Mapping[str, Any],
    order: Order,
    names: Sequence[tuple[str, set[str], tuple[int, ...]]],
    sizes: Sequence[Sequence[int]],
    keep_masters: bool = False,
) -> dict[str, Any]:
    """Return the Adam state ``saved`` for parameters ``names`` of another order or layout.

    Args:
        saved: ``last_optimizer_state`` of a checkpoint.
        order: name and shape of the tensors of the saved model.
        names: (name, all names, shape) of the parameters of the new optimizer, in its order.
        sizes: number of elements of each entry of the new optimizer, by parameter group.
        keep_masters: leave float32 masters in the entries too, where the plugin's Adam has them for 16-bit parameters.

    Raises:
        UserError: the entries are not those of these parameters.
    """
    if len(sizes) != 1 or len(saved["param_groups"]) != 1:
        return dict(saved)
    mine = dict(zip((name for name, _, _ in names), names))
    known = {alias: name for name, aliases, _ in names for alias in aliases}
    pieces = list(_pieces(order, known))
    entries = _by_name(saved, pieces)
    flat = len(sizes[0]) == 1 and len(names) > 1
    if not flat and len(sizes[0]) != len(names):
        return dict(saved)
    ordered = [
        {key: _shaped(value, mine[name][2]) for key, value in entries.get(name, {}).items()} for name, _, _ in names
    ]
    if flat:
        ordered = [_join(ordered, [math.prod(shape) for _, _, shape in names])]
    masters = [entry.get(MASTER) if keep_masters else entry.pop(MASTER, None) for entry in ordered]
    result = {key: value for key, value in saved.items() if key not in ("state", "param_groups", ORDER)}
    result["state"] = {index: entry for index, entry in enumerate(ordered) if "exp_avg" in entry}
    result["param_groups"] = [{**saved["param_groups"][0], "params": list(range(len(ordered)))}]
    extras = {key: value for key, value in saved.get(KEY, {}).items() if key != MASTERS}
    if all(master is not None for master in masters):
        extras[MASTERS] = masters
    result[KEY] = extras
    return result


def _pieces(order: Order, known: Mapping[str, str]) -> Iterable[tuple[list[str], tuple[int, ...]]]:
    """Yield, for every parameter of the saved model in its order, the names it has now and its shape.

    Tied parameters count once, buffers and dropped keys not at all. In fairseq 0.6 to 0.8 attention kept q, k and v in
    one tensor, and layer norms had numbers.
    """
    seen: set[str] = set()
    for key, shape in order:
        names = [known[name] for name in _current_names(key) if name in known]
        if names and not seen & set(names):
            seen.update(names)
            yield names, shape


def _current_names(key: str) -> list[str]:
    packed = re.fullmatch(r"(.*attn\.)in_proj_(weight|bias)", key)
    if packed:
        return [f"{packed[1]}{part}_proj.{packed[2]}" for part in "qkv"]
    numbered = re.fullmatch(r"((?:en|de)coder)(\.layers\.\d+\.)layer_norms\.(\d)\.(weight|bias)", key)
    if numbered:
        norms = ["self_attn_layer_norm", "final_layer_norm"]
        if numbered[1] == "decoder":
            norms.insert(1, "encoder_attn_layer_norm")
        return [f"{numbered[1]}{numbered[2]}{norms[int(numbered[3])]}.{numbered[4]}"]
    return [key]


def _by_name(saved: Mapping[str, Any], pieces: Sequence[tuple[list[str], tuple[int, ...]]]) -> dict[str, Entry]:
    """Return the saved entries by parameter name, tensors flattened, masters among them."""
    keys = list(saved["param_groups"][0]["params"])
    state = {index: dict(saved["state"].get(key, {})) for index, key in enumerate(keys)}
    for index, master in enumerate(saved.get(KEY, {}).get(MASTERS, [])):
        state[index][MASTER] = master
    counts = [math.prod(shape) for _, shape in pieces]
    if len(keys) == 1 and len(pieces) > 1:
        state = _split(state[0], counts)
    if len(state) != len(pieces):
        raise UserError(
            f"the checkpoint's optimizer state has {len(state)} entries for {len(pieces)} parameters of its model; "
            "continue with --reset-optimizer"
        )
    result: dict[str, Entry] = {}
    for (names, _), entry, count in zip(pieces, state.values(), counts):
        for value in entry.values():
            if isinstance(value, Tensor) and value.numel() not in (1, count):
                raise UserError(
                    f"the checkpoint's optimizer state has {value.numel()} elements for {names[0]}, which has {count}; "
                    "continue with --reset-optimizer"
                )
        parts = _split(entry, [count // len(names)] * len(names))
        result.update({name: parts[index] for index, name in enumerate(names)})
    return result


def _split(entry: Entry, counts: Sequence[int]) -> dict[int, Entry]:
    """Cut the tensors of ``entry`` with one element a weight into consecutive parts; other values go to each part."""
    total = sum(counts)
    cut = {
        key: value.reshape(-1).split(list(counts))
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.numel() == total and value.dim() > 0
    }
    return {i: {key: cut[key][i] if key in cut else value for key, value in entry.items()} for i in range(len(counts))}


def _join(entries: Sequence[Entry], counts: Sequence[int]) -> Entry:
    """Join per-tensor entries into one; a parameter that was never updated has moments of zero."""
    started = [entry for entry in entries if "exp_avg" in entry]
    if not started:
        return {}
    result: Entry = {"step": max(int(entry["step"]) for entry in started)}
    for key in ("exp_avg", "exp_avg_sq", MASTER):
        if key == MASTER and not all(key in entry for entry in entries):
            continue
        zeros = [torch.zeros(count) for count in counts]
        result[key] = torch.cat([entry.get(key, zero).reshape(-1) for entry, zero in zip(entries, zeros)])
    return result


def _shaped(value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0 and value.numel() == math.prod(shape):
        return value.reshape(shape)
    return value
