"""Checkpoints both ways with plain fairseq, of older versions, averaged, in ensembles; optimizer states by name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugin import average, checkpoint_io, cli, export, optimizer_state, resume
from fairseq_plugin.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OURS = ["--arch", "ls_transformer_tiny", "--criterion", "ls_label_smoothed_cross_entropy", "--optimizer", "ls_adam"]
FAIRSEQS = ["--arch", "transformer_tiny", "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam"]
STOP, UPDATES = 3, 5


def arguments(train_arguments, *extra):
    """Dropout 0, so that both systems compute the same; one thread."""
    return [
        *(*train_arguments, "--seed", 4, "--dropout", 0, "--max-tokens", 200, "--max-update", UPDATES),
        *("--save-interval-updates", STOP, "--no-epoch-checkpoints", "--disable-validation", *extra),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_cli, plain, train_arguments):
    """Folders of the same training under fairseq's names and under ours, with checkpoints of update 3 and 5."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for side, main, names in (("fairseq", plain["train"], FAIRSEQS), ("ours", cli.train, OURS)):
        run_cli(main, *arguments(train_arguments, *names, "--save-dir", folder / side)).check()
    return folder


def logits(path: Path, data_bin: Path) -> torch.Tensor:
    """Load the model of a checkpoint as generation does and run it on a fixed batch."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data_bin)})
    model.eval()
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, len(task.source_dictionary), (3, 7), generator=generator)
    source[0, :3] = task.source_dictionary.pad()
    target = torch.randint(4, len(task.target_dictionary), (3, 5), generator=generator)
    with torch.no_grad():
        return model(source, (source != task.source_dictionary.pad()).sum(1), target)[0]


def trained(model: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters in a saved model with all embeddings tied, in the optimizer's order."""
    tied = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    return [name for name in model if name not in tied and not name.endswith((".version", "_float_tensor"))]


def entries(path: Path) -> dict[str, torch.Tensor]:
    """Return the moments in a checkpoint by the name of their parameter."""
    state = checkpoint_io.read(str(path))
    saved, names = state["last_optimizer_state"]["state"], trained(state["model"])
    assert len(saved) == len(names)
    return {f"{name}:{key}": saved[i][key] for i, name in enumerate(names) for key in ("exp_avg", "exp_avg_sq")}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-3) -> None:
    """Compare by norm: biases whose gradient is truly zero have noise of any sign."""
    assert one.keys() == other.keys()
    scale = max(float(value.norm()) for value in one.values())
    for name, value in one.items():
        error, size = float((value - other[name]).norm()), float(value.norm())
        assert error <= tolerance * max(size, 1e-3 * scale), (name, error, size)


def assert_same_training(one: Path, other: Path) -> None:
    models = [checkpoint_io.read(str(path))["model"] for path in (one, other)]
    weights = [{name: value for name, value in m.items() if not name.endswith("k_proj.bias")} for m in models]
    assert_close(*weights, tolerance=1e-4)
    moments = [{k: v for k, v in entries(path).items() if "k_proj.bias" not in k} for path in (one, other)]
    assert_close(*moments)


class TestBothWays:
    def test_fairseqs_continues_under_our_names(self, runs, run_cli, train_arguments, data_bin, tmp_path):
        start = runs / "fairseq" / f"checkpoint_1_{STOP}.pt"
        command = arguments(train_arguments, *OURS, "--restore-file", start, "--save-dir", tmp_path)
        log = run_cli(cli.train, *command).check().out
        assert "checkpoint of LabelSmoothedCrossEntropyCriterion goes on under LS" in log
        assert "checkpoint of FairseqAdam goes on under LSAdam" in log
        assert_same_training(runs / "fairseq/checkpoint_last.pt", tmp_path / "checkpoint_last.pt")
        torch.testing.assert_close(
            logits(runs / "fairseq/checkpoint_last.pt", data_bin),
            logits(tmp_path / "checkpoint_last.pt", data_bin),
            atol=2e-4,
            rtol=1e-4,
        )

    def test_ours_continues_under_fairseqs_names(self, runs, train_arguments, data_bin, tmp_path):
        """The exported file under plain fairseq in an interpreter that never sees the plugin nor knows our arch."""
        out = tmp_path / "exported.pt"
        assert export.main(["--to", "fairseq", str(runs / "ours" / f"checkpoint_1_{STOP}.pt"), str(out)]) == 0
        twins = dict(zip(OURS, FAIRSEQS))
        command = [twins.get(argument, argument) for argument in train_arguments]
        command = arguments(command, "--restore-file", out, "--save-dir", tmp_path / "save")
        code = (
            "import sys\nfrom fairseq_cli.train import cli_main\n"
            "words = sys.argv\nsys.argv = [*words[:2], '--cpu', '--arch', 'ls_transformer']\n"
            "try: cli_main()\nexcept SystemExit as error: assert error.code == 2\nelse: raise AssertionError\n"
            "sys.argv = words\ncli_main()\nassert 'fairseq_plugin' not in sys.modules\n"
        )
        env = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True, timeout=150, env=env
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        refusal = "error: argument --arch/-a: invalid choice: 'ls_transformer' (choose from 'transformer_tiny', "
        assert refusal in result.stderr
        assert "Traceback" not in result.stderr
        assert f"@ {STOP} updates)" in result.stdout
        assert_same_training(runs / "ours/checkpoint_last.pt", tmp_path / "save/checkpoint_last.pt")

    def test_exported_file(self, runs, data_bin, tmp_path):
        out = tmp_path / "exported.pt"
        assert export.main(["--to", "fairseq", str(runs / "ours/checkpoint_last.pt"), str(out)]) == 0
        state = checkpoint_io.read(str(out))
        theirs = checkpoint_io.read(str(runs / "fairseq/checkpoint_last.pt"))
        assert list(state["model"]) == list(theirs["model"])
        assert state["cfg"]["model"].arch == "transformer_tiny"
        assert state["cfg"]["model"].user_dir is None
        for group in ("criterion", "optimizer", "task", "lr_scheduler"):
            assert state["cfg"][group] == theirs["cfg"][group]
        assert "ls_" not in str(state["cfg"])
        last = [checkpoint["optimizer_history"][-1] for checkpoint in (state, theirs)]
        assert last[0] == last[1]
        assert resume.KEY not in state["extra_state"]
        assert set(state["last_optimizer_state"]) == set(theirs["last_optimizer_state"])
        assert_close(entries(out), entries(runs / "ours/checkpoint_last.pt"))
        torch.testing.assert_close(
            logits(out, data_bin), logits(runs / "ours/checkpoint_last.pt", data_bin), atol=1e-5, rtol=1e-5
        )

    def test_ensemble(self, runs, run_cli, data_bin):
        """fairseq's and ours generate together."""
        paths = [runs / side / "checkpoint_last.pt" for side in ("fairseq", "ours")]
        command = [data_bin, "--cpu", "--beam", 2, "--max-len-b", 5, "--gen-subset", "valid", "--quiet"]
        command += ["--required-batch-size-multiple", 1]
        log = run_cli(cli.generate, *command, "--path", ":".join(map(str, paths))).check().out
        assert "Translated 60 sentences" in log

    def test_export_refuses(self, runs, tmp_path, capsys):
        last = str(runs / "ours/checkpoint_last.pt")
        before = Path(last).read_bytes()
        assert export.main(["--to", "fairseq", last, last]) == 1
        assert "give another file to write to" in capsys.readouterr().err
        assert Path(last).read_bytes() == before
        assert export.main(["--to", "fairseq", str(tmp_path / "none.pt"), str(tmp_path / "out.pt")]) == 1
        assert "none.pt: no such checkpoint" in capsys.readouterr().err
        state = checkpoint_io.read(last)
        del state["model"]["encoder.layers.0.fc1.bias"]
        checkpoint_io.write(state, str(tmp_path / "lacking.pt"))
        assert export.main(["--to", "fairseq", str(tmp_path / "lacking.pt"), str(tmp_path / "out.pt")]) == 1
        assert "encoder.layers.0.fc1.bias is missing there" in capsys.readouterr().err
        assert not (tmp_path / "out.pt").exists()


def older(state: dict, version: str) -> dict:
    """Return a current checkpoint of fairseq as an older version would have written it."""
    state = dict(state, args=state["cfg"]["model"])
    del state["cfg"], state["task_state"]
    del state["args"].task  # the translation task was the only one
    if version == "0.8":
        pack_attention(state)
    for side in ("encoder", "decoder"):
        state["model"][f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    if version == "0.10":
        return state
    del state["model"]["decoder.output_projection.weight"]
    vars(state["args"]).update(min_lr=-1, lr=1e-3, max_positions=1024)
    state["optimizer_history"][-1].update(optimizer=state.pop("last_optimizer_state"), best_loss=None)
    iterator = state["extra_state"].pop("train_iterator")
    state["extra_state"].update(epoch=iterator["epoch"], batch_offset=iterator["iterations_in_epoch"], val_loss=None)
    return state


NUMBERED = {
    "encoder": {"self_attn_layer_norm": "0", "final_layer_norm": "1"},
    "decoder": {"self_attn_layer_norm": "0", "encoder_attn_layer_norm": "1", "final_layer_norm": "2"},
}


def pack_attention(state: dict) -> None:
    """Join q, k and v and number the layer norms, in the model and in the optimizer's entries, as before 0.9."""
    model, saved = state["model"], state["last_optimizer_state"]
    moments = dict(zip(trained(model), saved["state"].values()))
    packed, entries = {}, []
    for name, value in model.items():
        joined = re.fullmatch(r"(.*attn\.)([kvq])_proj\.(weight|bias)", name)
        norm = re.fullmatch(r"(\w+)(\.layers\.\d+\.)(\w*layer_norm)(\..*)", name)
        if joined and joined[2] != "k":
            continue
        if joined:
            parts = [f"{joined[1]}{letter}_proj.{joined[3]}" for letter in "qkv"]
            packed[f"{joined[1]}in_proj_{joined[3]}"] = torch.cat([model[part] for part in parts])
            tensors = {key: torch.cat([moments[part][key] for part in parts]) for key in ("exp_avg", "exp_avg_sq")}
            entries.append({"step": moments[name]["step"], **tensors})
            continue
        old = f"{norm[1]}{norm[2]}layer_norms.{NUMBERED[norm[1]][norm[3]]}{norm[4]}" if norm else name
        packed[old] = value
        if name in moments:
            entries.append(moments[name])
    state["model"] = packed
    groups = [{**saved["param_groups"][0], "params": list(range(len(entries)))}]
    state["last_optimizer_state"] = {**saved, "state": dict(enumerate(entries)), "param_groups": groups}


@pytest.mark.parametrize("version", ["0.10", "0.9", "0.8"])
def test_older_checkpoints(runs, run_cli, train_arguments, data_bin, tmp_path, version):
    """Weights and optimizer state go on under our names as those of fairseq's current file do."""
    start = checkpoint_io.read(str(runs / "fairseq" / f"checkpoint_1_{STOP}.pt"))
    torch.save(older(start, version), tmp_path / "old.pt")
    fresh = logits(runs / "fairseq" / f"checkpoint_1_{STOP}.pt", data_bin)
    state = checkpoint_io.read(str(tmp_path / "old.pt"))
    state["args"].arch, state["args"].data = "ls_transformer_tiny", str(data_bin)
    torch.save(state, tmp_path / "named.pt")
    torch.testing.assert_close(logits(tmp_path / "named.pt", data_bin), fresh, atol=1e-5, rtol=1e-5)
    if version != "0.8":
        return  # which differs in all that the later ones do
    command = arguments(train_arguments, *OURS, "--restore-file", tmp_path / "old.pt", "--save-dir", tmp_path / "save")
    run_cli(cli.train, *command).check()
    assert_same_training(runs / "fairseq/checkpoint_last.pt", tmp_path / "save/checkpoint_last.pt")


class TestAverage:
    def test_as_fairseqs_script(self, runs, tmp_path):
        """Also of a checkpoint under fairseq's names and one under ours, and of float16 weights."""
        paths = [str(runs / side / "checkpoint_last.pt") for side in ("fairseq", "ours")]
        out = tmp_path / "average.pt"
        assert average.main(["--inputs", *paths, "--output", str(out)]) == 0
        models = [checkpoint_io.read(path)["model"] for path in paths]
        result = checkpoint_io.read(str(out))
        assert set(result["model"]) == set(models[0])
        for name, value in result["model"].items():
            assert torch.equal(value, (models[0][name] + models[1][name]).div(2))
        assert checkpoint_io.updates(result) == UPDATES

    def test_selection(self, tmp_path):
        for name in (
            "checkpoint1",
            "checkpoint2",
            "checkpoint10",
            "checkpoint_1_5",
            "checkpoint_2_40",
            "checkpoint_last",
        ):
            (tmp_path / f"{name}.pt").touch()
        for value in ("1.2", "3.4"):
            (tmp_path / f"checkpoint.best_loss_{value}.pt").touch()
        folder = [str(tmp_path)]

        def names(**kinds):
            return [Path(path).stem for path in average.select(folder, **kinds)]

        assert names(epochs=2) == ["checkpoint10", "checkpoint2"]
        assert names(epochs=2, upper_bound=9) == ["checkpoint2", "checkpoint1"]
        assert names(updates=2) == ["checkpoint_2_40", "checkpoint_1_5"]
        assert names(best=1) == ["checkpoint.best_loss_1.2"]
        with pytest.raises(UserError, match="3 checkpoints of that kind, fewer than the 4"):
            average.select(folder, epochs=4)
        with pytest.raises(UserError, match="give one folder"):
            average.select([*folder, *folder], epochs=1)
        with pytest.raises(UserError, match="--checkpoint-upper-bound needs"):
            average.select(folder, upper_bound=1)

    def test_other_model(self, tmp_path, capsys):
        for name, size in (("one", 3), ("other", 2)):
            checkpoint_io.write({"model": {"weight": torch.ones(size)}}, str(tmp_path / f"{name}.pt"))
        inputs = ["--inputs", *(str(tmp_path / f"{name}.pt") for name in ("one", "other"))]
        inputs += ["--output", str(tmp_path / "out.pt")]
        assert average.main(inputs) == 1
        assert "other.pt: its tensors are not those of" in capsys.readouterr().err
        assert not (tmp_path / "out.pt").exists()


class TestConversion:
    """Optimizer entries by name: another order, flat or not, masters."""

    names = [("b", {"b"}, (2,)), ("a", {"a", "tied"}, (2, 2))]
    order = [("version", (1,)), ("a", (2, 2)), ("tied", (2, 2)), ("b", (2,))]

    def saved(self, flat: bool) -> dict:
        a, b = torch.arange(4.0).view(2, 2), torch.tensor([10.0, 11.0])
        tensors = [torch.cat([a.reshape(-1), b])] if flat else [a, b]
        state = {i: {"step": 3, "exp_avg": t, "exp_avg_sq": t + 100} for i, t in enumerate(tensors)}
        groups = [{"lr": 0.1, "params": list(range(len(tensors)))}]
        extras = {resume.MASTERS: [t + 200 for t in tensors], "scaler": {"loss_scale": 4.0}}
        return {"state": state, "param_groups": groups, "loss_scale": 4.0, resume.KEY: extras}

    @pytest.mark.parametrize("flat", [False, True])
    def test_to_tensors(self, flat):
        result = optimizer_state.convert(self.saved(flat), self.order, self.names, [[2, 4]])
        assert result["state"][0]["exp_avg"].tolist() == [10, 11]
        assert result["state"][1]["exp_avg_sq"].tolist() == [[100, 101], [102, 103]]
        assert result["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
        assert [entry["step"] for entry in result["state"].values()] == [3, 3]
        assert result["loss_scale"] == 4.0
        assert [master.tolist() for master in result[resume.KEY][resume.MASTERS]] == [
            [210, 211],
            [[200, 201], [202, 203]],
        ]
        assert result[resume.KEY]["scaler"] == {"loss_scale": 4.0}
        assert "master" not in result["state"][0]
        kept = optimizer_state.convert(self.saved(flat), self.order, self.names, [[2, 4]], keep_masters=True)
        assert kept["state"][0]["master"].tolist() == [210, 211]

    @pytest.mark.parametrize("flat", [False, True])
    def test_to_flat(self, flat):
        result = optimizer_state.convert(self.saved(flat), self.order, self.names, [[6]])
        assert result["state"][0]["exp_avg"].tolist() == [10, 11, 0, 1, 2, 3]
        assert result[resume.KEY][resume.MASTERS][0].tolist() == [210, 211, 200, 201, 202, 203]

    def test_parameter_without_an_update(self):
        saved = self.saved(False)
        del saved["state"][1], saved[resume.KEY]
        assert list(optimizer_state.convert(saved, self.order, self.names, [[2, 4]])["state"]) == [1]
        flat = optimizer_state.convert(saved, self.order, self.names, [[6]])
        assert flat["state"][0]["exp_avg"].tolist() == [0, 0, 0, 1, 2, 3]

    def test_other_parameters(self):
        with pytest.raises(UserError, match="2 entries for 1 parameters"):
            optimizer_state.convert(self.saved(False), self.order[:3], self.names, [[2, 4]])
        saved = self.saved(False)
        saved["state"][1]["exp_avg"] = torch.zeros(3)
        with pytest.raises(UserError, match="3 elements for b, which has 2"):
            optimizer_state.convert(saved, self.order, self.names, [[2, 4]])
