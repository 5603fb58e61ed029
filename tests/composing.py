"""fairseq's way from a command line to its configuration, without the work that is the same for every command line.

hydra composes the configuration anew from some 250 words and takes longer for it than a small model for five updates. A
test's process, and every fork of it, keeps what the grammar makes of a word, and does not copy what is only read.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser


def keep_what_is_composed() -> None:
    """Make hydra parse each word once, and share its store of dataclasses, of which each reader gets a copy anyway."""
    parse_rule = OverridesParser.parse_rule
    if parse_rule.__module__ == __name__:
        return
    parsed: dict[tuple[str, str], Any] = {}

    def kept(self: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in parsed:
            parsed[word, rule] = parse_rule(self, word, rule)
        return copy.copy(parsed[word, rule])  # its parser is entered later

    OverridesParser.parse_rule = kept
    StructuredConfigSource.__deepcopy__ = lambda source, memo: copy.copy(source)


def compose_once(words: Sequence[object]) -> None:
    """Compose the configuration of a training with ``words``, so that forks find its words parsed."""
    argv, sys.argv = sys.argv, ["command"]
    try:
        parser = options.get_training_parser()
        convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, [str(word) for word in words]))
    finally:
        sys.argv = argv
