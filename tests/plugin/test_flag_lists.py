"""Every flag of fairseq's parsers is in exactly one of the plugin's lists, and the lists say true."""

import argparse
import ast
import collections
from pathlib import Path

import pytest
from fairseq import models, options, tasks
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES
from omegaconf import OmegaConf

from fairseq_plugin import flags, step_options
from fairseq_plugin.criterion import LSCrossEntropyCriterion
from tests.plugin.tiny_models import build, dictionary

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "optimizer": ("adam", "ls_adam"),
    "lr_scheduler": ("fixed", "inverse_sqrt", "cosine", "polynomial_decay"),
    "criterion": (
        *("cross_entropy", "ls_cross_entropy", "adaptive_loss", "label_smoothed_cross_entropy"),
        *("ls_label_smoothed_cross_entropy", "label_smoothed_cross_entropy_with_alignment"),
    ),
    "scoring": ("bleu", "sacrebleu"),
}


def parser_of(add_args) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_args(parser)
    return parser


def part_parser(registry: str, name: str) -> argparse.ArgumentParser:
    entries = REGISTRIES[registry]
    part = entries["registry"][name]
    if hasattr(part, "add_args"):
        return parser_of(part.add_args)
    return parser_of(lambda parser: gen_parser_from_dataclass(parser, entries["dataclass_registry"][name]()))


def parsers() -> list[argparse.ArgumentParser]:
    """The parsers of all commands, and of the models, tasks, optimizers, schedulers and criteria that matter here."""
    commands = [
        options.get_training_parser(),
        options.get_generation_parser(interactive=True),
        options.get_validation_parser(),
        options.get_eval_lm_parser(),
        options.get_preprocessing_parser(),
    ]
    names = ("transformer", "ls_transformer", "transformer_lm", "ls_transformer_lm")
    return [
        *commands,
        *(parser_of(models.ARCH_MODEL_REGISTRY[name].add_args) for name in names),
        *(parser_of(tasks.TASK_REGISTRY[name].add_args) for name in ("translation", "language_modeling")),
        *(part_parser(registry, name) for registry, parts in PARTS.items() for name in parts),
    ]


def spellings() -> list[frozenset[str]]:
    """Every option of the parsers as the set of its long names; names of one option in two parsers are joined."""
    found: dict[str, frozenset[str]] = {}
    for parser in parsers():
        for action in parser._actions:
            names = frozenset(name for name in action.option_strings if name.startswith("--")) - {"--help"}
            joined = names.union(*(found.get(name, frozenset()) for name in names))
            found.update(dict.fromkeys(joined, joined))
    return list(set(found.values()))


def listed() -> list[str]:
    return [flag for groups, _ in flags.OUTCOMES.values() for group in groups for flag in group.flags]


def test_each_flag_is_in_exactly_one_list():
    twice = [flag for flag, count in collections.Counter(listed()).items() if count > 1]
    assert twice == []
    known = set(listed())
    every = spellings()
    assert [sorted(names) for names in every if not names & known] == [], "in no list"
    assert [sorted(names & known) for names in every if len(names & known) > 1] == [], "two names of one option"
    assert sorted(known - frozenset().union(*every)) == [], "in no parser any more"


def test_named_tests_exist():
    for name in {group.test.split(",")[0] for groups, _ in flags.OUTCOMES.values() for group in groups}:
        path, *nodes = name.split("::")
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        assert nodes, name
        for node in nodes:
            (found,) = [part for part in body if getattr(part, "name", None) == node] or pytest.fail(f"no {name}")
            body = found.body


def test_page_is_current():
    page = ROOT / "docs" / "flags.md"
    assert page.read_text(encoding="utf-8") == flags.table(), "python -m fairseq_plugin.flags > docs/flags.md"


STEP = {
    "--debug-param-names": ("optimization", True),
    "--use-bmuf": ("optimization", True),
    "--empty-cache-freq": ("common", 5),
    "--amp": ("common", True),
    "--heartbeat-timeout": ("distributed_training", 60),
    "--bucket-cap-mb": ("distributed_training", 100),
    "--ddp-comm-hook": ("distributed_training", "fp16"),
    "--zero-sharding": ("distributed_training", "os"),
    "--store-ema": ("ema", True),
}


class Task(tasks.FairseqTask):
    """As much of a task as a criterion needs."""

    target_dictionary = dictionary(29)


def obstacles(cfg, quantizer=None) -> list[str]:
    task = Task(None)
    criterion = LSCrossEntropyCriterion(task, sentence_avg=False)
    return step_options.obstacles(cfg, task, build("ls_transformer"), criterion, quantizer)


def configuration():
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": "ls_adam"}
    return cfg


@pytest.mark.parametrize("flag", [*STEP, *(f"--ddp-backend {name}" for name in ("fully_sharded", "slowmo"))])
def test_steps_aside(flag):
    """The configuration alone sends the run to fairseq's training step, for this flag's sake."""
    assert obstacles(configuration()) == []
    cfg = configuration()
    name, _, value = flag.partition(" ")
    section, value = STEP.get(flag, ("distributed_training", value))
    cfg[section][name[2:].replace("-", "_")] = value
    (reason,) = obstacles(cfg)
    assert reason.startswith(flag)


def test_quantization_steps_aside():
    assert obstacles(configuration(), quantizer=object()) == ["quantization"]


def test_alignment_criterion(caplog):
    caplog.set_level("INFO")
    name = "label_smoothed_cross_entropy_with_alignment"
    model = build("ls_transformer", criterion=name)
    assert not model.supports_packed_features
    assert caplog.messages == [f"LSTransformerModel: runs on fairseq's decoder (--criterion {name})"]
