"""Values of options that fairseq would stumble over late, with a traceback or a crash, refused in one line."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from fairseq.data import plasma_utils
from omegaconf import OmegaConf

from fairseq_plugin.errors import UserError

# Smallest value, and a smaller one that means "off" where there is one. Values below that fairseq takes for "off" as
# well (--max-tokens, --clip-norm and others) are left to it.
_MINIMA: dict[tuple[float, float | None], str] = {
    (1, None): "beam nbest required_batch_size_multiple required_seq_len_multiple num_shards log_interval "
    "save_interval validate_interval max_source_positions max_target_positions encoder_embed_dim decoder_embed_dim "
    "encoder_ffn_embed_dim decoder_ffn_embed_dim tokens_per_sample distributed_world_size update_freq fp16_init_scale "
    "fp16_scale_window checkpoint_shard_count workers padding_factor softmax_batch",
    (0, None): "seed num_workers max_len_a max_len_b min_len prefix_size no_repeat_ngram_size encoder_layers "
    "decoder_layers lr max_epoch max_update shard_id context_window ignore_prefix_size encoder_layerdrop "
    "decoder_layerdrop warmup_updates",
    (1, -1): "sampling_topk",
    (0, -1): "sampling_topp diverse_beam_groups patience keep_interval_updates keep_last_epochs keep_best_checkpoints",
}
_MINIMUM = {name: limits for limits, names in _MINIMA.items() for name in names.split()}
_PROBABILITIES = ("sampling_topp", "encoder_layerdrop", "decoder_layerdrop")
_SEED_LIMIT = 1 << 32


def install() -> None:
    """Check what fairseq's commands parse; a second call does nothing."""
    from fairseq import options

    if getattr(options.get_parser, "checks", False):
        return
    get_parser = options.get_parser

    @functools.wraps(get_parser)
    def checking(*args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = get_parser(*args, **kwargs)
        parser.parse_args = _checked(parser.parse_args)
        return parser

    checking.checks = True
    options.get_parser = checking


def _checked(parse_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse_args)
    def parse(*args: Any, **kwargs: Any) -> Any:
        options = parse_args(*args, **kwargs)
        check([options])
        if not getattr(options, "path", True):
            raise UserError("--path is missing: give the checkpoint, or several with ':' between them")
        if getattr(options, "constraints", None) and not hasattr(options, "buffer_size"):
            raise UserError(
                f"--constraints {options.constraints}: constraints come with the input lines of lightseq-interactive, "
                "other commands have none"
            )
        return options

    return parse


def check(sections: Iterable[Any]) -> None:
    """Raise an error for the first option whose value makes no sense.

    Args:
        sections: Namespaces of fairseq's parsers, or sections of its configuration; options they lack pass.

    Raises:
        UserError: naming the option, its value and what it may be.
    """
    for section in sections:
        options = vars(section) if isinstance(section, argparse.Namespace) else section
        for name in list(options):
            _check_option(name, options[name])


def _check_option(name: str, value: Any) -> None:
    if value is None:
        return
    if name == "use_plasma_view" and value and not plasma_utils.PYARROW_AVAILABLE:
        raise UserError(
            "--use-plasma-view: needs pyarrow.plasma, which is not installed; drop the flag, or install 'pyarrow<12', "
            "the last versions that have it"
        )
    parse = _TEXTS.get(name)
    if parse is not None and isinstance(value, str):
        try:
            parse[0](value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise _error(name, value, f"give {parse[1]}") from None
    for number in value if isinstance(value, list) or OmegaConf.is_list(value) else [value]:
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            _check_number(name, number)


def _check_number(name: str, value: float) -> None:
    if math.isnan(value):
        raise _error(name, value, "give a number")
    minimum, off = _MINIMUM.get(name, (-math.inf, None))
    if value < minimum and value != off:
        unless = "" if off is None else f", or {off:g} for none"
        raise _error(name, value, f"must be at least {minimum:g}{unless}")
    if name in _PROBABILITIES and value > 1:
        raise _error(name, value, "must be at most 1")
    if name == "temperature" and value <= 0:
        raise _error(name, value, "must be above 0")
    if name == "seed" and value >= _SEED_LIMIT:
        raise _error(name, value, f"must be below {_SEED_LIMIT}")


def _error(name: str, value: Any, what: str) -> UserError:
    return UserError(f"--{name.replace('_', '-')} {value}: {what}")


def _betas(text: str) -> None:
    first, second = ast.literal_eval(text)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError


def _dictionary(text: str) -> None:
    dict(ast.literal_eval(text))


def _integers(text: str) -> None:
    for part in text.split(","):
        int(part)


_ADVICE_INTEGERS = "whole numbers with commas between them, '0,2' for example"
_TEXTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "adam_betas": (_betas, "two numbers from 0 to below 1, '(0.9, 0.98)' for example"),
    "model_overrides": (_dictionary, "a Python dictionary, \"{'dropout': 0.1}\" for example"),
    "optimizer_overrides": (_dictionary, "a Python dictionary, \"{'lr': [0.001]}\" for example"),
    "eval_bleu_args": (json.loads, "a JSON object, '{\"beam\": 4}' for example"),
    "eval_bleu_detok_args": (json.loads, "a JSON object, '{}' for example"),
    "adaptive_softmax_cutoff": (_integers, _ADVICE_INTEGERS),
    "encoder_layers_to_keep": (_integers, _ADVICE_INTEGERS),
    "decoder_layers_to_keep": (_integers, _ADVICE_INTEGERS),
}
