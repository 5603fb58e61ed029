"""``lightseq-export --to fairseq``: a checkpoint that plain fairseq reads, trains on and generates from.

The tensors have fairseq's names already. What changes: names of architecture, criterion, optimizer and their classes,
options only the plugin knows, the order of the optimizer's entries, and what the plugin saves on top.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from fairseq_plugin import checkpoint_io, checkpoint_match, optimizer_state, user_dir
from fairseq_plugin.checkpoint_io import State
from fairseq_plugin.errors import UserError, report
from fairseq_plugin.resume import KEY


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status. argv: arguments without the program's name."""
    parser = argparse.ArgumentParser(
        prog="lightseq-export", description="Write a checkpoint of ls_* names for a system that does not know them."
    )
    parser.add_argument("--to", required=True, choices=["fairseq"], help="the system that will read it")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="leave the optimizer's state out: a third of the size"
    )
    parser.add_argument("checkpoint", help="the checkpoint to read")
    parser.add_argument("output", help="the file to write")
    args = parser.parse_args(argv)
    try:
        if os.path.exists(args.output) and os.path.samefile(args.checkpoint, args.output):
            raise UserError(f"{args.output}: is the checkpoint itself; give another file to write to")
        state = to_fairseq(checkpoint_io.read(args.checkpoint), args.checkpoint)
        if args.no_optimizer:
            state.pop("last_optimizer_state", None)
        checkpoint_io.write(state, args.output)
    except UserError as error:
        return report(error)
    print(f"{args.output}: architecture {checkpoint_match.architecture(_model_options(state))}, for plain fairseq")
    return 0


def to_fairseq(state: State, path: str = "the checkpoint") -> State:
    """Return ``state`` as plain fairseq would have saved it; the tensors are shared with it.

    Args:
        state: as :func:`checkpoint_io.read` returns it.
        path: its name, for messages.

    Raises:
        UserError: an architecture without a twin in fairseq, or tensors that fairseq's model does not have.
    """
    options = _model_options(state)
    for entry in (state.get("args"), *(state.get("cfg") or {}).values()):
        if entry is not None:
            _rename(entry)
    for group in ("criterion", "optimizer"):
        _keep_fairseq_fields(group, (state.get("cfg") or {}).get(group))
    model = _fairseq_model(options, state["model"], path)
    order = optimizer_state.saved_order(state["model"])
    expected = model.state_dict()
    problem = checkpoint_match.first_difference(checkpoint_match.differences(state["model"], expected))
    if problem is not None:
        raise UserError(
            f"{path}: {checkpoint_match.architecture(options)} of plain fairseq has other tensors: "
            f"{checkpoint_match.sentence(problem)}"
        )
    result = dict(state, model={name: state["model"][name] for name in expected})
    result["optimizer_history"] = [_plain_classes(entry) for entry in state.get("optimizer_history", [])]
    result["extra_state"] = {key: value for key, value in state.get("extra_state", {}).items() if key != KEY}
    saved = state.get("last_optimizer_state")
    if saved and all("exp_avg" in entry for entry in saved["state"].values()):
        names = optimizer_state.parameters(model)
        flat = _has_flat_masters(result)
        counts = [torch.Size(shape).numel() for _, _, shape in names]
        result["last_optimizer_state"] = optimizer_state.convert(
            saved, order, names, [[sum(counts)] if flat else counts]
        )
        del result["last_optimizer_state"][KEY]
    return result


def _model_options(state: Mapping[str, Any]) -> Any:
    options = state.get("args") or (state.get("cfg") or {}).get("model")
    return Namespace(**options) if isinstance(options, Mapping) else options


def _rename(options: Any) -> None:
    """Replace the plugin's registered names in a group of options by fairseq's, in place; drop its folder and flags."""
    values: MutableMapping[str, Any] = vars(options) if isinstance(options, Namespace) else options
    if not isinstance(values, MutableMapping):
        return
    for key in ("_name", "arch", "criterion", "optimizer", "task"):
        if isinstance(values.get(key), str):
            values[key] = optimizer_state.fairseq_name(values[key])
    for key in [key for key in values if key.startswith("ls_")]:
        del values[key]
    folder = values.get("user_dir")
    if isinstance(folder, str) and os.path.basename(folder.rstrip("/")) == os.path.basename(user_dir.PLUGIN_DIR):
        values["user_dir"] = None


def _keep_fairseq_fields(group: str, options: Any) -> None:
    """Drop the options of a criterion or optimizer that fairseq's dataclass of that name does not have."""
    from fairseq.registry import REGISTRIES

    if not isinstance(options, MutableMapping):
        return
    known = REGISTRIES[group]["dataclass_registry"].get(options.get("_name"))
    for key in [key for key in options if known and key != "_name" and key not in known.__dataclass_fields__]:
        del options[key]


def _plain_classes(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = {key: optimizer_state.fairseq_name(entry[key]) for key in ("criterion_name",) if key in entry}
    twins = {"LSAdam": "FairseqAdam", "LSFP16Optimizer": "FP16Optimizer"}
    if entry.get("optimizer_name") in twins:
        names["optimizer_name"] = twins[entry["optimizer_name"]]
    return {**entry, **names}


def _has_flat_masters(state: Mapping[str, Any]) -> bool:
    """Return whether fairseq keeps one flat float32 copy of all weights in a run with the options of ``state``."""
    common = (state.get("cfg") or {}).get("common", {})
    flat = common.get("fp16") and not common.get("fp16_no_flatten_grads") and not common.get("bf16")
    return bool(flat) and state["optimizer_history"][-1].get("optimizer_name") == "FP16Optimizer"


class _Dictionaries:
    """The part of a task that a model needs to be built: dictionaries of given sizes."""

    def __init__(self, source: int, target: int) -> None:
        self.source_dictionary = self.dictionary = _dictionary(source)
        self.target_dictionary = self.source_dictionary if source == target else _dictionary(target)
        self.output_dictionary = self.target_dictionary


def _dictionary(size: int) -> Any:
    from fairseq.data import Dictionary

    result = Dictionary()
    for number in range(size - len(result)):
        result.add_symbol(f"symbol{number}")
    return result


def _fairseq_model(options: Any, tensors: Mapping[str, torch.Tensor], path: str) -> torch.nn.Module:
    """Build fairseq's model of ``options`` without memory for its weights: it knows names, order and shapes."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    name = optimizer_state.fairseq_name(checkpoint_match.architecture(options))
    if name not in ARCH_MODEL_REGISTRY:
        raise UserError(
            f"{path}: plain fairseq has no architecture {name}; only the ls_ twins of its archs can be exported"
        )
    sizes = [
        tensors[key].shape[0]
        for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        if key in tensors
    ]
    if not sizes:
        raise UserError(f"{path}: has no embedding encoder.embed_tokens.weight or decoder.embed_tokens.weight")
    options = Namespace(**vars(options))
    ARCH_CONFIG_REGISTRY[name](options)
    with torch.device("meta"):
        return ARCH_MODEL_REGISTRY[name].build_model(options, _Dictionaries(sizes[0], sizes[-1]))
