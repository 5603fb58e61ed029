"""Each option of the transformer: honoured by the fused layers, through fairseq's own layers, or refused."""

import argparse
import logging

import pytest
import torch
from fairseq import models
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerConfig
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

from fairseq_plugin import fused_model, model_options, step_options
from fairseq_plugin.criterion import LSCrossEntropyCriterion
from fairseq_plugin.errors import UserError
from tests.plugin.tiny_models import TINY, Task, batch, build, dictionary, loss_of, pair

# Options of the reference path that do nothing by themselves.
SAY_MORE = frozenset(
    {
        *("adaptive_softmax_dropout", "adaptive_softmax_factor", "tie_adaptive_proj", "tie_adaptive_weights"),
        *("base_shuffle", "base_sublayers", "min_params_to_wrap", "quant_noise_pq_block_size"),
    }
)


class StepTask(FairseqTask):
    """As much of a task as a training step asks."""

    target_dictionary = dictionary(29)


def step_arguments(model):
    """Return configuration, task, model and criterion of a run that nothing but the model keeps from our step."""
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": "ls_adam"}
    task = StepTask(None)
    return cfg, task, model, LSCrossEntropyCriterion(task, sentence_avg=False)


class TestReferencePath:
    """Options the fused layers do not cover: fairseq's modules, one line in the log."""

    @pytest.mark.parametrize(
        "options, sides",
        [
            ({"activation_fn": "tanh"}, "encoder decoder"),
            ({"quant_noise_pq": 0.1}, "encoder decoder"),
            ({"offload_activations": True}, "encoder decoder"),
            ({"cross_self_attention": True}, "decoder"),
            ({"decoder_input_dim": 16}, "decoder"),
            ({"adaptive_softmax_cutoff": "10,20"}, "decoder"),
        ],
    )
    def test_is_fairseqs_and_logged(self, options, sides, caplog):
        with caplog.at_level(logging.INFO):
            ours, theirs = pair(**options)
        (line,) = [line for line in caplog.messages if "fairseq's" in line]
        assert line.startswith("LSTransformerModel: runs on fairseq's ")
        option = "--" + next(iter(options)).replace("_", "-")
        assert [part for part in ("encoder", "decoder") if f"fairseq's {part} ({option}" in line] == sides.split()
        assert ours.supports_packed_features == ("decoder" not in sides)
        if not {"quant_noise_pq", "adaptive_softmax_cutoff"} & options.keys():
            sample = batch()
            torch.testing.assert_close(loss_of(ours, sample), loss_of(theirs, sample), rtol=1e-5, atol=1e-5)

    def test_one_line_names_every_cause(self, caplog):
        """That of the model, or that of the training step where there will be one."""
        options = {"activation_fn": "tanh", "quant_noise_pq": 0.1, "cross_self_attention": True}
        line = (
            "fairseq's encoder (--activation-fn tanh, --quant-noise-pq), "
            "fairseq's decoder (--activation-fn tanh, --quant-noise-pq, --cross-self-attention)"
        )
        caplog.set_level(logging.INFO)
        build("ls_transformer", **options)
        assert caplog.messages == [f"LSTransformerModel: runs on {line}"]
        caplog.clear()
        fused_model.expect_training_step(True)
        try:
            model = build("ls_transformer", **options)
        finally:
            fused_model.expect_training_step(False)
        assert caplog.messages == []
        assert ", ".join(step_options.obstacles(*step_arguments(model))) == line

    def test_packed_features_with_fairseqs_encoder(self):
        mixed, whole = build("ls_transformer"), build("ls_transformer")
        mixed.encoder = build("transformer").encoder
        sample = batch()["net_input"]
        expected, _, _ = whole(**sample, packed_features=True)
        torch.testing.assert_close(mixed(**sample, packed_features=True)[0], expected, rtol=1e-5, atol=1e-5)

    def test_refuses_packed_features_it_does_not_have(self):
        model = build("ls_transformer", cross_self_attention=True)
        with pytest.raises(ValueError, match="supports_packed_features"):
            model(**batch()["net_input"], packed_features=True)

    @pytest.mark.parametrize("arch", [name for name in ARCH_CONFIG_REGISTRY if name.startswith("ls_transformer")])
    def test_default_recipes_need_none(self, arch):
        """No architecture takes the reference path by default, but for the models with adaptive input and softmax."""
        args = argparse.Namespace()
        ARCH_CONFIG_REGISTRY[arch](args)
        cfg = TransformerConfig.from_namespace(args)
        adaptive = ["--adaptive-softmax-cutoff"] if "wiki103" in arch else []
        assert model_options.encoder_reasons(cfg) == []
        assert model_options.decoder_reasons(cfg) == adaptive


class TestOptions:
    """Every option of the transformer's parser is in exactly one list, and the lists say what happens."""

    @staticmethod
    def parsed() -> dict[str, argparse.Action]:
        parser = argparse.ArgumentParser(add_help=False)
        models.ARCH_MODEL_REGISTRY["ls_transformer"].add_args(parser)
        return {action.dest: action for action in parser._actions}

    def test_each_is_in_one_list(self):
        options = self.parsed().keys()
        assert not model_options.HONOURED & model_options.REFERENCE
        assert options == model_options.HONOURED | model_options.REFERENCE

    @pytest.mark.parametrize("name", sorted(model_options.HONOURED - {"activation_fn"}))
    def test_honoured_ones_keep_the_fused_layers(self, name):
        action = self.parsed()[name]
        kind = int if action.type is int else float if action.type is float else str
        value = True if action.nargs == 0 else kind(1)
        args = argparse.Namespace(**{**TINY, name: value})
        ARCH_CONFIG_REGISTRY["ls_transformer"](args)
        cfg = TransformerConfig.from_namespace(args)
        assert model_options.encoder_reasons(cfg) == model_options.decoder_reasons(cfg) == []

    @pytest.mark.parametrize("name", sorted(model_options.REFERENCE - SAY_MORE))
    def test_reference_ones_are_named(self, name):
        values = {"activation_fn": "tanh", "adaptive_softmax_cutoff": "10,20", "base_layers": 1}
        values |= {"decoder_output_dim": 16, "quant_noise_pq": 0.1, "quant_noise_scalar": 0.1}
        values |= {f"{side}_xformers_att_config": '{"name": "linformer"}' for side in ("encoder", "decoder")}
        args = argparse.Namespace(**{**TINY, name: values.get(name, True)})
        ARCH_CONFIG_REGISTRY["ls_transformer"](args)
        cfg = TransformerConfig.from_namespace(args)
        reasons = {*model_options.encoder_reasons(cfg), *model_options.decoder_reasons(cfg)}
        assert [reason.split()[0] for reason in reasons] == [f"--{name.replace('_', '-')}"]

    def test_the_others_only_say_more(self):
        args = argparse.Namespace(**TINY, **dict.fromkeys(SAY_MORE, 1))
        ARCH_CONFIG_REGISTRY["ls_transformer"](args)
        cfg = TransformerConfig.from_namespace(args)
        assert model_options.encoder_reasons(cfg) == model_options.decoder_reasons(cfg) == []

    @pytest.mark.parametrize("side", ["encoder", "decoder"])
    def test_embeddings_of_a_file(self, side, tmp_path):
        numbers = [[float(10 * row + column) for column in range(32)] for row in range(2)]
        lines = [f"w{row} {' '.join(map(str, values))}" for row, values in enumerate(numbers)]
        (tmp_path / "table").write_text("\n".join(["2 32", *lines]) + "\n")
        ours, theirs = pair(**{f"{side}_embed_path": str(tmp_path / "table")})
        tables = [getattr(model, side).embed_tokens.weight for model in (ours, theirs)]
        assert torch.equal(*tables)
        assert tables[0][4:6].tolist() == numbers

    @pytest.mark.parametrize(
        "name, advice", [("tpu", "fairseq's arch"), ("pipeline_model_parallel", "pipeline_parallel_transformer")]
    )
    def test_refused_ones_are_named(self, name, advice):
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')}: .*{advice}"):
            build("ls_transformer", **{name: True})

    def test_layers_to_keep(self):
        """A checkpoint is pruned while it loads, as fairseq does it."""
        whole = build("ls_transformer", seed=1)
        args = argparse.Namespace(
            arch="ls_transformer", **TINY, encoder_layers_to_keep="1", decoder_layers_to_keep="0,2"
        )
        pruned = models.build_model(args, Task(dictionary(23), dictionary(29)))
        pruned.load_state_dict(
            whole.state_dict(), model_cfg=OmegaConf.create({**vars(args), "_name": "ls_transformer"})
        )
        assert (len(pruned.encoder.layers), len(pruned.decoder.layers)) == (1, 2)
        assert torch.equal(pruned.encoder.layers[0].fc1.weight, whole.encoder.layers[1].fc1.weight)
        assert torch.equal(pruned.decoder.layers[1].fc1.weight, whole.decoder.layers[2].fc1.weight)
