"""``lightseq-hydra-train``: the yaml recipes are those of the command line, and the user's own folder is imported."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from fairseq_plugin import cli
from tests.plugin.conftest import Result
from tests.plugin.test_bad_input import assert_refused
from tests.plugin.training_log import losses, precise

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "wmt14"
UPDATES = 5
SIZES = {"encoder_layers": 1, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 48, "encoder_attention_heads": 2}
SIZES |= {name.replace("encoder", "decoder"): size for name, size in SIZES.items()}
LIMITS = {
    "common.cpu": True,
    "common.fp16": False,
    "common.log_format": "json",
    "common.log_interval": 1,
    "dataset.max_tokens": 400,
    "dataset.num_workers": 0,
    "dataset.disable_validation": True,
    "optimization.max_update": UPDATES,
    "checkpoint.no_save": True,
}


def small_run(size: str, data: Path, **more: object) -> list[str]:
    overrides = {"task.data": data, **LIMITS, **{f"+model.{name}": number for name, number in SIZES.items()}, **more}
    return ["--config-dir", EXAMPLE / "config", "--config-name", size, *(f"{k}={v}" for k, v in overrides.items())]


def with_configuration(main):
    """Return ``main`` that prints the configuration that reaches fairseq's training, and its losses in all digits."""

    def run():
        from fairseq.distributed import utils as distributed_utils

        call_main = distributed_utils.call_main

        def printing(cfg, function, **kwargs):
            groups = {
                name: OmegaConf.to_container(group, enum_to_str=True) if isinstance(group, DictConfig) else vars(group)
                for name, group in cfg.items()
                if group is not None and not isinstance(group, str)
            }
            print("\nconfiguration", json.dumps(groups, default=str), flush=True)
            return call_main(cfg, function, **kwargs)

        distributed_utils.call_main = printing
        return precise(main)()

    return run


def configuration(out: str) -> dict:
    (line,) = (line for line in out.splitlines() if line.startswith("configuration "))
    return json.loads(line.removeprefix("configuration "))


def log_of(result) -> str:
    """Return the log in fairseq's format; hydra has one of its own."""
    return re.sub(r"^\[([^\]]*)\]\[([^\]]*)\]\[([^\]]*)\] - ", r"\1 | \3 | \2 | ", result.out, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def hydra_cli(run_cli):
    """The launcher with hydra and fairseq's module of it imported before the fork."""
    import fairseq_cli.hydra_train  # noqa: F401

    return run_cli


@pytest.mark.parametrize("size", ["base", "big"])
def test_recipe(hydra_cli, data_bin, tmp_path, size):
    """The yaml and flags.sh say the same, and five updates of a small model have the same losses."""
    script = f'source flags.sh; select_engine ls; wmt_flags {size}; printf "%s\\n" "${{FLAGS[@]}}"'
    bash = ["bash", "-euc", script]
    flags = subprocess.run(bash, cwd=EXAMPLE, capture_output=True, text=True, check=True).stdout.splitlines()
    small = [value for name, number in SIZES.items() for value in (f"--{name.replace('_', '-')}", number)]
    limits = ["--cpu", "--log-format", "json", "--log-interval", 1, "--max-tokens", 400, "--num-workers", 0]
    limits += ["--disable-validation", "--max-update", UPDATES, "--no-save", "--seed", 1, "--keep-last-epochs", 10]
    flag_run = hydra_cli(with_configuration(cli.train), data_bin, *flags, *small, *limits).check()

    yaml_run = hydra_cli(with_configuration(cli.hydra_train), *small_run(size, data_bin), cwd=tmp_path).check()

    expected, found = configuration(flag_run.out), configuration(yaml_run.out)
    for group in ("task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset", "checkpoint"):
        assert found[group] == expected[group], group
    assert {name: expected["model"][name] for name in found["model"]} == found["model"]
    expected, found = losses(flag_run.out), losses(log_of(yaml_run))
    assert len(expected) == UPDATES
    assert found == expected


USER_MODULE = """
from fairseq.models import register_model_architecture
from fairseq.models.transformer import tiny_architecture

register_model_architecture("ls_transformer", "hydra_users_transformer")(tiny_architecture)
"""


def test_user_dir(hydra_cli, data_bin, tmp_path):
    """A folder in ``common.user_dir`` is imported beside the plugin, which needs no mention."""
    (tmp_path / "hydra_users").mkdir()
    (tmp_path / "hydra_users" / "__init__.py").write_text(USER_MODULE)
    more = {"common.user_dir": tmp_path / "hydra_users", "model._name": "hydra_users_transformer"}
    more["optimization.max_update"] = 1
    result = hydra_cli(cli.hydra_train, *small_run("base", data_bin, **more), cwd=tmp_path).check()
    assert "model: LSTransformerModel" in log_of(result)


def test_groups(hydra_cli, data_bin, tmp_path):
    """Without a yaml file: the parts chosen by their names in hydra's groups, as fairseq-hydra-train's README does."""
    groups = {"task": "translation", "criterion": "ls_cross_entropy", "optimizer": "ls_adam", "lr_scheduler": "fixed"}
    overrides = {**groups, "task.data": data_bin, **LIMITS, "optimization.max_update": 1, "optimization.lr": "[0.001]"}
    overrides["+model._name"] = "ls_transformer_tiny"
    del overrides["common.fp16"]
    arguments = [f"{name}={value}" for name, value in overrides.items()]
    result = hydra_cli(cli.hydra_train, *arguments, cwd=tmp_path).check()
    assert "criterion: LSCrossEntropyCriterion" in log_of(result)


def test_error(hydra_cli, tmp_path):
    """One line and exit code 1, without hydra's traceback."""
    result = hydra_cli(cli.hydra_train, *small_run("base", tmp_path / "missing"), cwd=tmp_path)
    assert_refused(result, f"error: {tmp_path / 'missing'}: the data folder does not exist")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["task.nonsense=3"], ["Could not override 'task.nonsense'", "+task.nonsense=3"]),
        (["optimization.max_update=abc"], ["optimization.max_update=abc", "'abc' of type 'str'", "Integer"]),
        (["nonsense"], ["override 'nonsense'"]),
        (["optimization.lr=[1,"], ["'[1,'"]),
        (["+model.encoder_layers=2"], ["'++model.encoder_layers=2'"]),
        (["optimization.max_update=???"], ["optimization.max_update"]),
        (["--config-dir", "/nonsense"], ["/nonsense"]),
        (["model._name=nonsense"], ["architecture 'nonsense' is not registered"]),
        (["common.fp16=true", "common.cpu=true"], ["--fp16 needs a GPU"]),
        (["dataset.max_tokens=null"], ["--max-tokens or --batch-size"]),
        (["optimization.update_freq=[0]"], ["--update-freq 0: must be at least 1"]),
        (["common.use_plasma_view=true"], ["--use-plasma-view: needs pyarrow.plasma"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_configuration(hydra_cli, data_bin, tmp_path, words, parts):
    """Overrides, yaml files and values that are not valid: one line, not hydra's several, and nothing is saved."""
    result = hydra_cli(cli.hydra_train, *small_run("base", data_bin), *words, cwd=tmp_path)
    assert_refused(result, *parts)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.soak
def test_bad_configuration_in_a_process_of_its_own(launcher_script, data_bin, tmp_path):
    """Nor are there warnings of Python around the line, which forks of the tests' process would not show."""
    words = [*launcher_script("lightseq-hydra-train", "fairseq_plugin.cli:hydra_train"), *small_run("base", data_bin)]
    words += ["optimization.max_update=abc", "optimization.lr=[1e-3]"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=170, env=env, cwd=tmp_path)
    line = assert_refused(Result(run.returncode, run.stdout, run.stderr), "'abc' of type 'str'")
    assert line.startswith("error: the configuration is not valid: Error merging override optimization.max_update=abc")
