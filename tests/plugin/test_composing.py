"""Configurations that are composed from what is kept are those that hydra composes for fairseq."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import OmegaConf

from tests import composing

pytestmark = pytest.mark.usefixtures("imported_fairseq")

OURS = ["some where/{x}=,y", "--cpu", "--arch", "ls_transformer_tiny"]
LINES = {
    "usual": [*OURS, *composing.USUAL_CHOICES[0], "--warmup-updates", 7, "--label-smoothing", 0.3],
    "values of all kinds": [
        *(*OURS, "--optimizer", "ls_adam", "--adam-betas", "(0.8, 0.9)", "--lr", "0.1,0.2", "--fp16", "--save-dir", ""),
        *("--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 5}', "--valid-subset", "valid,test"),
    ],
    "unusual": ["data", "--arch", "transformer_tiny", "--optimizer", "sgd", "--lr-scheduler", "cosine", "--min-lr", 2],
    "language model": ["data", "--task", "language_modeling", "--arch", "ls_transformer_lm", "--optimizer", "adam"],
}


@pytest.fixture
def by_hydra(monkeypatch):
    """Return a function that calls another with hydra's own function in the place of ours."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(utils, "compose", composing.HYDRAS_COMPOSE)
            return function(*arguments, **options)

    return call


def described(config, path=""):
    """Return values, types and flags of all nodes."""
    found = {path: (config._metadata.flags, config._metadata.object_type, config._metadata.ref_type)}
    for key in config if OmegaConf.is_dict(config) and not config._is_none() else ():
        node = config._get_node(key)
        found |= described(node, f"{path}.{key}") if OmegaConf.is_config(node) else {f"{path}.{key}": str(node)}
    return found


@pytest.mark.parametrize("words", LINES.values(), ids=LINES)
def test_equals_hydras(by_hydra, words):
    found = [described(composing.configuration(words)) for _ in range(2)]
    expected = described(by_hydra(composing.configuration, words))
    assert len(expected) > 200
    assert found[0] == found[1] == expected


def composed(*words):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(utils.__file__).parents[1] / "config")):
        return utils.compose("config", overrides=list(words), strict=False)


@pytest.mark.parametrize(
    "word",
    ["common.nonsense=1", "common.seed=many", "common.seed=1,2", "task=nonsense", "common.seed=(", "+common.seed=3"],
)
def test_refuses_what_hydra_refuses(by_hydra, word):
    errors = []
    for call in (composed, lambda *words: by_hydra(composed, *words)):
        with pytest.raises((ConfigCompositionException, HydraException)) as error:
            call(word)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_values_do_not_stay():
    assert composed("common.seed=5").common.seed == 5
    changed = composed()
    assert changed.common.seed == 1
    changed.common.seed = 6
    assert composed().common.seed == 1


@dataclass
class First:
    size: int = 1


@dataclass
class Second:
    size: int = 2


def test_new_dataclasses_are_seen():
    """A user's module registers its own after fairseq's are composed."""
    store = ConfigStore.instance()
    try:
        for kind in (First, Second):
            store.store(name="users", group="criterion", node=kind)
            assert composed("criterion=users").criterion.size == kind.size
    finally:
        del store.repo["criterion"]["users.yaml"]
        composing._composed.clear()
