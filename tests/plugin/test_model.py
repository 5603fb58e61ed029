"""The architectures against fairseq's own: initial weights, outputs, gradients, positions, decoding, checkpoints."""

import argparse
import copy

import pytest
import torch

from ls_train.packing import Packing
from tests.plugin.tiny_models import batch, build, loss_of, pair

ARCHS = (
    "transformer",
    "transformer_tiny",
    "transformer_iwslt_de_en",
    "transformer_wmt_en_de",
    "transformer_vaswani_wmt_en_de_big",
    "transformer_vaswani_wmt_en_fr_big",
    "transformer_wmt_en_de_big",
    "transformer_wmt_en_de_big_t2t",
)
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "tied": {"share_all_embeddings": True},
    "tied output": {"share_decoder_input_output_embed": True},
    "learned positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "no positions": {"no_token_positional_embeddings": True, "no_scale_embedding": True},
    "embedding norm": {"layernorm_embedding": True},
    "gelu": {"activation_fn": "gelu"},
    "tanh gelu": {"activation_fn": "gelu_accurate"},
    "narrow decoder": {"decoder_embed_dim": 16, "decoder_output_dim": 16, "decoder_input_dim": 16},
    "checkpointed": {"checkpoint_activations": True},
    "merged tables": {"merge_src_tgt_embed": True},
    "no final norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "relu dropout": {"relu_dropout": 0.0, "activation_fn": "gelu_fast"},
    "no cross attention": {"no_cross_attention": True},
    "long": {"max_source_positions": 5, "max_target_positions": 5},
}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("arch", ARCHS)
def test_defaults_are_fairseqs(arch):
    from fairseq.models import ARCH_CONFIG_REGISTRY

    configs = []
    for name in (arch, f"ls_{arch}"):
        args = argparse.Namespace()
        ARCH_CONFIG_REGISTRY[name](args)
        configs.append(vars(args))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("left_pad_source", [True, False], ids=["left-padded", "right-padded"])
def test_equals_fairseq(options, left_pad_source):
    """Same seed, same weights; then the same logits, loss and gradients."""
    ours, theirs = pair(**options)
    state, reference = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(reference)
    assert all(torch.equal(state[name], reference[name]) for name in reference)

    sample = batch(left_pad_source)
    real = sample["target"] != 1
    for model in (ours, theirs):
        model.train()
    logits, expected = (model(**sample["net_input"])[0] for model in (ours, theirs))
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-5, atol=1e-5)

    for model in (ours, theirs):
        loss_of(model, sample).backward()
    ours_grad, theirs_grad = gradients(ours), gradients(theirs)
    whole = torch.cat([grad.flatten() for grad in theirs_grad.values() if grad is not None]).norm()
    for name, grad in theirs_grad.items():
        if grad is None:
            assert ours_grad[name] is None, name
            continue
        assert (ours_grad[name] - grad).norm() <= 1e-4 * whole, name


@pytest.mark.parametrize("options", [VARIANTS["post-norm"], VARIANTS["tied"]], ids=["untied", "tied"])
def test_packed_features(options):
    """The packed path gives the rows of the padded one and the output weight."""
    model, _ = pair(**options)
    sample = batch()
    assert model.supports_packed_features
    features, packing, weight = model(**sample["net_input"], packed_features=True)
    assert isinstance(packing, Packing)
    assert features.shape == (int((sample["target"] != 1).sum()), 32)
    assert weight is model.decoder.output_projection.weight
    logits = model(**sample["net_input"])[0]
    torch.testing.assert_close(features @ weight.t(), logits[sample["target"] != 1])


def test_dropout_is_repeatable_and_ends_in_evaluation():
    model = build("ls_transformer", dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    sample = batch()["net_input"]

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**sample)[0]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("options", [{"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}], ids=["layerdrop"])
def test_layerdrop_drops_the_same_layers(options):
    ours, theirs = pair(**options)
    sample = batch()
    for seed in range(4):
        results = []
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(seed)
            loss_of(model, sample).backward()
            results.append({name for name, grad in gradients(model).items() if grad is not None and grad.any()})
        assert {name for name in results[0] if "k_proj.bias" not in name} == {
            name for name in results[1] if "k_proj.bias" not in name
        }


def test_checkpointed_layers_drop_the_same_elements():
    results = []
    for checkpointed in (False, True):
        model = build("ls_transformer", dropout=0.3, checkpoint_activations=checkpointed)
        torch.manual_seed(3)
        loss_of(model, batch()).backward()
        results.append(gradients(model))
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    ours, theirs = pair(dropout=0.1)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    sample = batch()
    assert ours(**sample["net_input"])[0].dtype == dtype
    loss_of(ours, sample).backward()
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in gradients(ours).values())
    ours.eval(), theirs.eval()
    difference = (ours(**sample["net_input"])[0] - theirs(**sample["net_input"])[0]).float()
    assert difference[sample["target"] != 1].abs().max() < 0.05


@pytest.mark.parametrize("alignment", [{}, {"alignment_layer": 1}, {"alignment_layer": 0, "alignment_heads": 2}])
@pytest.mark.parametrize("options", [VARIANTS["post-norm"], VARIANTS["pre-norm"]], ids=["post-norm", "pre-norm"])
def test_attention_on_request(options, alignment):
    ours, theirs = (model.eval() for model in pair(**options))
    ours.make_generation_fast_(need_attn=True)
    sample = batch()
    with torch.no_grad():
        weights, expected = (model(**sample["net_input"], **alignment)[1]["attn"][0] for model in (ours, theirs))
    real = sample["target"] != 1
    torch.testing.assert_close(weights[real], expected[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_incremental_steps(options):
    """Token by token, with hypotheses swapped and dropped in between, the logits are those of the whole prefix."""
    model = build("ls_transformer", **options).eval()
    net_input = batch(sizes=((7, 6), (3, 6), (4, 6)))["net_input"]
    tokens, state = net_input["prev_output_tokens"], {}
    with torch.no_grad():
        encoder_out = model.encoder(net_input["src_tokens"])
        for length in range(1, tokens.shape[1] + 1):
            if length in (3, 5):
                order = torch.tensor([2, 0, 1] if length == 3 else [1, 0])
                model.decoder.reorder_incremental_state_scripting(state, order)
                encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
                tokens = tokens[order]
            logits = model.decoder(tokens[:, :length], encoder_out, incremental_state=state)[0]
            whole = model.decoder(tokens[:, :length], encoder_out)[0]
            assert logits.shape == (tokens.shape[0], 1, whole.shape[2])
            torch.testing.assert_close(logits[:, 0], whole[:, -1], rtol=1e-5, atol=1e-5)
        at_once = model.decoder(tokens, encoder_out, incremental_state={})[0]
    torch.testing.assert_close(at_once, logits, rtol=1e-5, atol=1e-5)


def test_no_attention_unless_asked():
    model = build("ls_transformer").eval()
    assert model(**batch()["net_input"])[1]["attn"] == [None]


def test_inner_states_on_request():
    ours, theirs = (model.eval() for model in pair())
    sample = batch()
    with torch.no_grad():
        states, expected = (
            model(**sample["net_input"], return_all_hiddens=True)[1]["inner_states"] for model in (ours, theirs)
        )
    real = (sample["target"] != 1).t()
    assert len(states) == len(expected) == 4
    for state, reference in zip(states, expected):
        torch.testing.assert_close(state[real], reference[real], rtol=1e-5, atol=1e-5)


def test_encoder_dictionary():
    ours, theirs = (model.eval() for model in pair(encoder_normalize_before=True))
    tokens = batch()["net_input"]["src_tokens"]
    with torch.no_grad():
        out, expected = (model.encoder(tokens, return_all_hiddens=True) for model in (ours, theirs))
    real = (tokens != 1).t()
    assert out.keys() == expected.keys()
    torch.testing.assert_close(out["encoder_out"][0][real], expected["encoder_out"][0][real], rtol=1e-5, atol=1e-5)
    assert torch.equal(out["encoder_padding_mask"][0], expected["encoder_padding_mask"][0])
    assert torch.equal(out["src_lengths"][0], expected["src_lengths"][0])
    order = torch.tensor([2, 0, 0])
    reordered = ours.encoder.reorder_encoder_out(out, order)
    assert torch.equal(reordered["encoder_out"][0], out["encoder_out"][0][:, order])
    assert len(out["encoder_states"]) == 3


class TestShapes:
    """Batches that come up at the edges of an epoch."""

    @pytest.mark.parametrize("sizes", [((1, 1),), ((5, 1),), ((2, 3), (2, 3))])
    def test_small_and_unpadded(self, sizes):
        ours, theirs = pair()
        sample = batch(sizes=sizes)
        torch.testing.assert_close(loss_of(ours, sample), loss_of(theirs, sample), rtol=1e-5, atol=1e-5)

    def test_row_of_padding(self):
        model = build("ls_transformer")
        sample = batch()
        for tokens in (sample["net_input"]["src_tokens"], sample["net_input"]["prev_output_tokens"], sample["target"]):
            tokens[1] = 1
        loss_of(model, sample).backward()
        assert all(grad.isfinite().all() for grad in gradients(model).values())

    def test_longer_than_learned_positions(self):
        model = build("ls_transformer", encoder_learned_pos=True, max_source_positions=4)
        with pytest.raises(ValueError, match="7 tokens.* 4 learned positions"):
            model(**batch()["net_input"])


class TestCheckpoints:
    def test_both_ways(self):
        ours, theirs = build("ls_transformer", seed=1), build("transformer", seed=2)
        sample = batch()
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        torch.testing.assert_close(loss_of(ours, sample), loss_of(theirs, sample), rtol=1e-5, atol=1e-5)
        again = build("transformer", seed=3, encoder_normalize_before=True, decoder_normalize_before=True)
        own = build("ls_transformer", seed=4, encoder_normalize_before=True, decoder_normalize_before=True)
        again.load_state_dict(copy.deepcopy(own.state_dict()))
        torch.testing.assert_close(loss_of(own, sample), loss_of(again, sample), rtol=1e-5, atol=1e-5)
        assert own.state_dict()["encoder.version"].item() == own.state_dict()["decoder.version"].item() == 3

    def test_old_names(self):
        """Joint in_proj weights, numbered layer norms, embed_out and position buffers of early versions load."""
        model, other = build("ls_transformer", seed=1), build("ls_transformer", seed=2)
        state = copy.deepcopy(model.state_dict())
        for side, numbers in (("encoder", ("self_attn", "final")), ("decoder", ("self_attn", "encoder_attn", "final"))):
            for layer in range(len(getattr(model, side).layers)):
                prefix = f"{side}.layers.{layer}."
                for number, norm in enumerate(numbers):
                    for kind in ("weight", "bias"):
                        state[f"{prefix}layer_norms.{number}.{kind}"] = state.pop(f"{prefix}{norm}_layer_norm.{kind}")
                for kind in ("weight", "bias"):
                    parts = [state.pop(f"{prefix}self_attn.{letter}_proj.{kind}") for letter in "qkv"]
                    state[f"{prefix}self_attn.in_proj_{kind}"] = torch.cat(parts)
            state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
        other.load_state_dict(state)
        sample = batch()
        assert torch.equal(loss_of(other, sample), loss_of(model, sample))

    def test_deepcopy(self):
        model = build("ls_transformer", share_all_embeddings=True)
        twin = copy.deepcopy(model)
        sample = batch()
        assert torch.equal(loss_of(model, sample), loss_of(twin, sample))
        loss_of(twin, sample).backward()
        assert all(grad is None for grad in gradients(model).values())
