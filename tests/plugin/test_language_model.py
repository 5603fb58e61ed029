"""Language models: the weights, outputs, losses and checkpoints of fairseq's ``transformer_lm``."""

import importlib
import re

import pytest
import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import OmegaConf

from fairseq_plugin import cli, export
from fairseq_plugin.language_model import LSTransformerLanguageModel
from tests.plugin.training_log import losses, precise

UPDATES = 50
OURS = {"arch": "ls_transformer_lm", "criterion": "ls_cross_entropy", "optimizer": "ls_adam"}
FAIRSEQS = {"arch": "transformer_lm", "criterion": "cross_entropy", "optimizer": "adam"}
TINY = {
    "decoder_embed_dim": 32,
    "decoder_input_dim": 32,
    "decoder_output_dim": 32,
    "decoder_ffn_embed_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "max_target_positions": 40,
    "tokens_per_sample": 40,
}
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"decoder_normalize_before": True, "share_decoder_input_output_embed": True},
    "no final norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "learned positions": {"decoder_learned_pos": True, "activation_fn": "gelu"},
    "norm of embeddings": {"layernorm_embedding": True, "no_scale_embedding": True},
    "no positions": {"no_token_positional_embeddings": True, "decoder_layers_to_keep": "0"},
}


class Task:
    """As much of a language-modelling task as building a model needs."""

    def __init__(self):
        self.source_dictionary = self.target_dictionary = Dictionary()
        for number in range(20):
            self.source_dictionary.add_symbol(f"w{number}")


def build(arch: str, **options) -> torch.nn.Module:
    torch.manual_seed(4)
    cfg = OmegaConf.create({**vars(TransformerLanguageModelConfig()), **TINY, **options, "_name": arch})
    cfg.add_bos_token = cfg.tpu = False
    return models.ARCH_MODEL_REGISTRY[arch].build_model(cfg, Task())


@pytest.mark.parametrize("variant", ["", "_big", "_gpt", "_wiki103"])
def test_defaults_are_fairseqs(variant):
    name = f"transformer_lm{variant}"
    assert models.ARCH_MODEL_REGISTRY[f"ls_{name}"] is LSTransformerLanguageModel
    if not variant:
        registry = models.MODEL_DATACLASS_REGISTRY
        assert registry[f"ls_{name}"] is registry[name] is TransformerLanguageModelConfig
    else:
        assert ARCH_CONFIG_REGISTRY[f"ls_{name}"] is ARCH_CONFIG_REGISTRY[name]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_equals_fairseq(options):
    """The same first weights from the same seed, the same logits at once, packed and token by token."""
    ours, theirs = build("ls_transformer_lm", **options), build("transformer_lm", **options)
    state, reference = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(reference)
    assert all(torch.equal(state[name], reference[name]) for name in reference)
    assert ours.max_positions() == theirs.max_positions() == 40
    tokens = torch.tensor([[2, 5, 6, 7, 8], [2, 9, 10, 1, 1]])
    real = tokens != 1
    for model in (ours, theirs):
        model.eval()
    logits, expected = (model(tokens, src_lengths=real.sum(1))[0] for model in (ours, theirs))
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)
    features, packing, weight = ours(tokens, packed_features=True)
    torch.testing.assert_close(features @ weight.t(), packing.pack(logits))
    with torch.no_grad():
        state = {}
        for length in range(1, 6):
            step = ours(tokens[:1, :length], incremental_state=state)[0]
            torch.testing.assert_close(step[0, 0], expected[0, length - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"adaptive_input": True, "adaptive_input_cutoff": "8,16"},
        {"adaptive_softmax_cutoff": "8,16"},
        {"character_embeddings": True},
        {"decoder_input_dim": 16},
        *({name: True} for name in ("scale_fc", "scale_attn", "scale_heads", "scale_resids")),
    ],
    ids=lambda options: next(iter(options)),
)
def test_reference_path(options, caplog):
    with caplog.at_level("INFO"):
        model = build("ls_transformer_lm", **options)
    option = next(iter(options))
    (line,) = caplog.messages
    assert line.startswith("LSTransformerLanguageModel: runs on fairseq's decoder (")
    assert option.replace("_", "-") in line or option in line
    assert not model.supports_packed_features
    with pytest.raises(ValueError, match="supports_packed_features"):
        model(torch.tensor([[2, 5]]), packed_features=True)


def test_draws_one_seed_a_forward():
    """With dropout a forward takes one number of torch's generator; without it none, as in evaluation."""
    model, tokens = build("ls_transformer_lm", dropout=0.3), torch.tensor([[2, 5, 6]])
    before = torch.get_rng_state()
    outputs = [model(tokens)[0] for _ in range(2)]
    assert not torch.equal(*outputs)
    torch.set_rng_state(before)
    assert torch.equal(model(tokens)[0], outputs[0])
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def lm_data(tmp_path_factory, text_dir, run_cli, plain):
    folder = tmp_path_factory.mktemp("lm")
    splits = (f"--{split}pref={text_dir / split}.en" for split in ("train", "valid", "test"))
    arguments = ["--only-source", *splits, "--destdir", folder, "--nwordssrc", 1000, "--workers", 1]
    run_cli(plain["preprocess"], *arguments).check()
    return folder


def command(data, save_dir, names, *extra: object) -> list[object]:
    return [
        *(data, "--task", "language_modeling", "--cpu", "--save-dir", save_dir, "--seed", 2),
        *(value for key, name in names.items() for value in (f"--{key}", name)),
        *("--decoder-embed-dim", 64, "--decoder-ffn-embed-dim", 64, "--decoder-layers", 2),
        *("--decoder-input-dim", 64, "--decoder-output-dim", 64, "--decoder-attention-heads", 2, "--dropout", 0),
        *("--tokens-per-sample", 32, "--sample-break-mode", "eos", "--max-tokens", 256, "--update-freq", 2),
        *("--lr", 2e-3, "--clip-norm", 1, "--no-epoch-checkpoints", "--num-workers", 0),
        *("--log-format", "json", "--log-interval", 1, "--required-batch-size-multiple", 1),
        *extra,
    ]


@pytest.fixture(scope="module")
def runs(run_cli, plain, lm_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_runs")
    extra = ["--share-decoder-input-output-embed", "--decoder-normalize-before", "--max-update", UPDATES]
    jobs = {}
    for side, main, names in (("ours", cli.train, OURS), ("fairseqs", plain["train"], FAIRSEQS)):
        jobs[side] = run_cli.start(precise(main), *command(lm_data, folder / side, names, *extra))
    return folder, {side: job.wait(150).check().out for side, job in jobs.items()}


def test_fifty_updates(runs):
    _, logs = runs
    ours, fairseqs = losses(logs["ours"]), losses(logs["fairseqs"])
    assert len(fairseqs) == UPDATES
    assert fairseqs[-1] < fairseqs[0] - 1
    assert ours == pytest.approx(fairseqs, rel=1e-4)
    assert "model: LSTransformerLanguageModel" in logs["ours"]
    assert "model: TransformerLanguageModel" in logs["fairseqs"]
    assert "own layers" not in logs["ours"]


def with_exact_loss(main):
    """Return ``main`` of an eval-lm command with its loss printed in all digits."""

    def run():
        module = importlib.import_module("fairseq_cli.eval_lm")
        evaluate = module.eval_lm

        def eval_lm(*args, **kwargs):
            results = evaluate(*args, **kwargs)
            print("exact loss", float(results["loss"]))
            return results

        module.eval_lm = eval_lm
        return main()

    return run


@pytest.mark.parametrize(
    "side, extra",
    [("fairseqs", ["--context-window", 8]), ("ours", ["--sample-break-mode", "eos"])],
    ids=["context", "eos"],
)
def test_eval_lm(runs, run_cli, lm_data, side, extra):
    """Either side's checkpoint with fairseq's model and with ours: the same loss to 1e-5."""
    folder, _ = runs
    arguments = [lm_data, "--cpu", "--gen-subset", "valid", "--max-tokens", 512, "--tokens-per-sample", 32, *extra]
    arguments += ["--path", folder / side / "checkpoint_last.pt", "--required-batch-size-multiple", 1]
    jobs = []
    plain_eval_lm = importlib.import_module("fairseq_cli.eval_lm").cli_main
    for main, name in ((plain_eval_lm, FAIRSEQS["arch"]), (cli.eval_lm, OURS["arch"])):
        overrides = ["--model-overrides", f"{{'model': {{'_name': '{name}'}}}}"]
        jobs.append(run_cli.start(with_exact_loss(main), *arguments, *overrides))
    fairseqs, ours = (float(re.search(r"exact loss (\S+)", job.wait(90).check().out)[1]) for job in jobs)
    assert 1 < fairseqs < 9
    assert ours == pytest.approx(fairseqs, rel=1e-5)


@pytest.mark.parametrize(
    "extra", [["--beam", 3], ["--sampling", "--sampling-topk", 5, "--beam", 2]], ids=lambda x: x[0]
)
def test_interactive(runs, run_cli, plain, lm_data, extra):
    """Continuations of prompts of several lengths, cached token by token: those of fairseq's model."""
    folder, _ = runs
    arguments = [lm_data, "--task", "language_modeling", "--cpu", "--max-len-b", 12, "--seed", 3, "--nbest", 2]
    arguments += ["--path", folder / "fairseqs" / "checkpoint_last.pt", "--buffer-size", 3, "--batch-size", 3, *extra]
    overrides = ["--model-overrides", "{'model': {'_name': 'ls_transformer_lm'}}"]
    text = "the\nthis is the\nthe package system\n"
    jobs = [
        run_cli.start(plain["interactive"], *arguments, stdin=text),
        run_cli.start(cli.interactive, *arguments, *overrides, stdin=text),
    ]
    fairseqs, ours = (re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", job.wait(60).check().out, re.MULTILINE) for job in jobs)
    assert len(fairseqs) == 6
    assert [(number, words) for number, _, words in ours] == [(number, words) for number, _, words in fairseqs]
    assert [float(score) for _, score, _ in ours] == pytest.approx([float(score) for _, score, _ in fairseqs], abs=1e-4)


def test_scores_of_the_reference(runs, run_cli, plain, lm_data):
    """``generate --score-reference`` gives each token the probability that fairseq's model gives it."""
    folder, _ = runs
    arguments = [lm_data, "--task", "language_modeling", "--cpu", "--score-reference", "--gen-subset", "valid"]
    arguments += ["--sample-break-mode", "eos", "--path", folder / "fairseqs" / "checkpoint_last.pt"]
    arguments += ["--required-batch-size-multiple", 1, "--max-tokens", 512]
    overrides = ["--model-overrides", "{'model': {'_name': 'ls_transformer_lm'}}"]
    jobs = [
        run_cli.start(plain["generate"], *arguments),
        run_cli.start(cli.generate, *arguments, *overrides),
    ]
    fairseqs, ours = (
        {
            (number, place): float(score)
            for number, scores in re.findall(r"^P-(\d+)\t(.*)$", job.wait(60).check().out, re.MULTILINE)
            for place, score in enumerate(scores.split())
        }
        for job in jobs
    )
    assert len(fairseqs) > 500
    assert ours == pytest.approx(fairseqs, abs=2e-4)


def test_checkpoints_go_both_ways(runs, run_cli, plain, lm_data, tmp_path):
    """fairseq's checkpoint under our names and ours exported under fairseq's, optimizer included: the same losses."""
    folder, _ = runs
    exported = tmp_path / "exported.pt"
    run_cli(export.main, "--to", "fairseq", folder / "ours" / "checkpoint_last.pt", exported).check()
    extra = ["--share-decoder-input-output-embed", "--decoder-normalize-before", "--max-update", UPDATES + 3]
    # Continued in a later epoch, a run of ours keeps its batches and fairseq makes new ones: all start with the first.
    extra += ["--disable-validation", "--no-save", "--reset-dataloader"]
    jobs = {
        side: run_cli.start(precise(main), *command(lm_data, tmp_path, names, *extra, "--restore-file", start))
        for side, main, names, start in (
            ("fairseq on", plain["train"], FAIRSEQS, folder / "fairseqs" / "checkpoint_last.pt"),
            ("ours from fairseq's", cli.train, OURS, folder / "fairseqs" / "checkpoint_last.pt"),
            ("ours on", cli.train, OURS, folder / "ours" / "checkpoint_last.pt"),
            ("fairseq from ours", plain["train"], FAIRSEQS, exported),
        )
    }
    found = {side: losses(job.wait(120).check().out) for side, job in jobs.items()}
    assert len(found["fairseq on"]) == 3
    assert found["ours from fairseq's"] == pytest.approx(found["fairseq on"], rel=1e-5)
    assert found["fairseq from ours"] == pytest.approx(found["ours on"], rel=1e-5)


def test_wiki103(run_cli, plain, lm_data, tmp_path):
    """Adaptive input and softmax, tied, with their criterion: fairseq's losses through the reference path, one line."""
    logs = []
    for main, prefix in ((plain["train"], ""), (cli.train, "ls_")):
        names = {
            "arch": f"{prefix}transformer_lm_wiki103",
            "criterion": "adaptive_loss",
            "optimizer": f"{prefix}adam",
        }
        extra = ["--adaptive-input-cutoff", "200,500", "--adaptive-softmax-cutoff", "200,500", "--max-update", 4]
        extra += [
            "--ddp-backend",
            "legacy_ddp",
            "--adaptive-softmax-dropout",
            0,
            "--attention-dropout",
            0,
            "--activation-dropout",
            0,
        ]
        arguments = command(lm_data, tmp_path, names, *extra, "--no-save", "--disable-validation")
        logs.append(run_cli(precise(main), *arguments).check().out)
    fairseqs, ours = (losses(log) for log in logs)
    assert len(fairseqs) == 4
    assert ours == pytest.approx(fairseqs, rel=1e-4)
    (line,) = [line for line in logs[1].splitlines() if "fairseq's" in line]
    causes = "--adaptive-softmax-cutoff, --adaptive-input"
    assert line.endswith(f"fairseq's own runs because of fairseq's decoder ({causes}), criterion AdaptiveLoss")
