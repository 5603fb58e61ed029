"""fairseq's way from a command line to its configuration, without the work that is the same for every command line.

hydra composes the configuration anew from some 250 words and takes longer for it than a small model for five updates. A
test's process, and every fork of it, keeps what the grammar makes of a word and the configuration of each choice of
groups (task, criterion, optimizer, ...); the words that set values are applied by hydra to a copy of that.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

from fairseq import options
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

HYDRAS_COMPOSE = utils.compose
USUAL_CHOICES = [
    choice.split()
    for choice in (
        "--optimizer ls_adam --criterion ls_label_smoothed_cross_entropy --lr-scheduler inverse_sqrt",
        "--optimizer adam --criterion label_smoothed_cross_entropy --lr-scheduler inverse_sqrt",
        "--optimizer ls_adam --criterion ls_cross_entropy",
        "--optimizer adam --criterion cross_entropy",
        "--optimizer ls_adam",
    )
]
"""What most command lines of the tests have; a fork composes what is not among them."""

_parsed: dict[tuple[str, str], Any] = {}
_composed: dict[tuple[str, ...], DictConfig] = {}


def keep_what_is_composed() -> None:
    """Make hydra parse each word once, and fairseq compose each choice of groups once."""
    if utils.compose is not HYDRAS_COMPOSE:
        return
    parse_rule, store = OverridesParser.parse_rule, ConfigStore.store

    def parse_once(self: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in _parsed:
            _parsed[word, rule] = parse_rule(self, word, rule)
        return copy.copy(_parsed[word, rule])  # its parser is entered later

    def store_anew(self: ConfigStore, *args: Any, **kwargs: Any) -> None:
        _composed.clear()
        store(self, *args, **kwargs)

    OverridesParser.parse_rule, ConfigStore.store, utils.compose = parse_once, store_anew, _compose
    # Each composition copies hydra's sources, with them the store of dataclasses, of which readers get copies anyway.
    # The class is not that of the module: hydra's search for plugins executes it once more.
    Plugins.instance()
    SourcesRegistry.instance().resolve("structured").__deepcopy__ = lambda source, memo: copy.copy(source)


def _compose(config_name: str, overrides: list[str], strict: bool) -> DictConfig:
    """Do what hydra's function does for fairseq, which never has another name, nor is strict."""
    assert (config_name, strict) == ("config", False)
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create().parse_overrides(overrides)
    loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
    names = [override.key_or_group for override in parsed]
    are_groups = ["." not in name and loader.repository.group_exists(name) for name in names]
    groups = tuple(word for word, is_group in zip(overrides, are_groups) if is_group)
    if groups not in _composed:
        _composed[groups] = HYDRAS_COMPOSE(config_name, overrides=list(groups))
    config = copy.deepcopy(_composed[groups])
    values = [override for override, is_group in zip(parsed, are_groups) if not is_group]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    OmegaConf.set_struct(config, False)
    return config


def configuration(words: Sequence[object]) -> DictConfig:
    """Return the configuration of a training with ``words``."""
    argv, sys.argv = sys.argv, ["command"]
    try:
        parser = options.get_training_parser()
        return utils.convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [str(word) for word in words]))
    finally:
        sys.argv = argv
