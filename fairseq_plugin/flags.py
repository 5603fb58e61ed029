"""What becomes of every flag of fairseq's parsers: honoured, honoured by fairseq's own code, or refused.

``python -m fairseq_plugin.flags > docs/flags.md`` writes the table; a test compares lists and parsers, and the table.
"""

from __future__ import annotations

from typing import NamedTuple

from fairseq_plugin import model_options


class Group(NamedTuple):
    """Flags with the same fate: what happens, and the test or the kind of test that shows it."""

    what: str
    test: str
    flags: tuple[str, ...]


def _group(what: str, test: str, flags: str) -> Group:
    """Return a group. flags: without the dashes in front, separated by white space."""
    return Group(what, test, tuple(f"--{name}" for name in flags.split()))


def _of_options(names: frozenset[str], without: str = "") -> str:
    return " ".join(sorted(name.replace("_", "-") for name in names - set(without.split())))


_COMBINATIONS = "tests/plugin/test_flags.py::test_combination"
_DECIDED = "tests/plugin/test_decided_flags.py::test_training"
_GENERATION = "tests/plugin/test_parity.py::test_generation"
_ALTERNATIVES = "tests/plugin/test_flag_lists.py::test_steps_aside"
_LAUNCHERS = "tests/plugin/test_launchers.py"
_EFFECTS = "tests/plugin/test_flag_effects.py"
_COMMANDS = "tests/plugin/test_command_flags.py"
_SHARDS = f"{_COMMANDS}::test_shards"
_RANKS = "tests/plugin/test_data_parallel.py::test_equals_one_process"
_REFUSED = "tests/plugin/test_bad_options.py::test_refused"
_LATER = "the training step runs as fairseq's own"

HONOURED: tuple[Group, ...] = (
    _group(
        "the fused layers follow it",
        "tests/plugin/test_model_options.py::TestOptions",
        _of_options(model_options.HONOURED, "adaptive_input encoder_layerdrop decoder_layerdrop"),
    ),
    _group(
        "an ls_ name selects the plugin's model; fairseq's names work as before and as a mixture",
        "tests/plugin/test_parity.py::test_any_mix",
        "arch",
    ),
    _group(
        "ls_adam follows it", "tests/plugin/test_optimizer.py::test_options_of_the_flags_arrive", "adam-betas adam-eps"
    ),
    _group("ls_adam follows it", "tests/plugin/test_optimizer.py::test_float32_losses_equal_fairseqs", "weight-decay"),
    _group(
        "ls_adam follows it where it has 16-bit parameters",
        "tests/plugin/test_optimizer.py::test_compact_masters_change_no_loss",
        "ls-compact-master",
    ),
    _group(
        "CUDA graphs of the plugin's step",
        "tests/plugin/test_packed.py::test_batches_of_one_shape_share_memory",
        "ls-cuda-graph",
    ),
    _group(
        "batches of the plugin's training step are filled by real tokens",
        "tests/plugin/test_token_budget.py::test_an_epoch_has_each_sentence_once",
        "ls-token-budget",
    ),
    _group(
        "batches of an update are about equally large",
        "tests/plugin/test_rank_balance.py::test_two_ranks_train_as_one",
        "ls-balance-ranks",
    ),
    _group(
        "each rank updates its own part of the parameters",
        "tests/plugin/test_data_parallel.py::test_equals_one_process",
        "ls-shard-update",
    ),
    _group(
        "the criteria follow it",
        "tests/plugin/test_criterion.py::test_values_gradients_and_logs_equal_fairseq",
        "label-smoothing report-accuracy ignore-prefix-size",
    ),
    _group(
        "the plugin's training step follows it",
        "tests/plugin/test_trainer.py::test_losses_equal_fairseqs",
        "clip-norm sentence-avg update-freq",
    ),
    _group(
        "the plugin's training step follows it",
        "tests/plugin/test_trainer_loop.py::test_loop_sees_exact_numbers",
        "max-update save-interval-updates validate-interval-updates",
    ),
    _group(
        "the plugin's training step follows it",
        f"{_LAUNCHERS}::TestTrain::test_log_lines_are_fairseqs",
        "log-interval",
    ),
    _group("the plugin's training step follows it", f"{_EFFECTS}::test_time_limit", "stop-time-hours"),
    _group(
        "the plugin's training step follows it",
        "tests/plugin/test_mixed_precision.py::test_losses_equal_fairseqs",
        "fp16 bf16 memory-efficient-fp16 memory-efficient-bf16",
    ),
    _group(
        "the loss scale on the device follows it",
        f"{_EFFECTS}::test_loss_scales",
        "fp16-init-scale fp16-scale-window threshold-loss-scale",
    ),
    _group(
        "the loss scale on the device follows it",
        "tests/kernels/test_loss_scale_update.py::test_one_update",
        "fp16-scale-tolerance",
    ),
    _group(
        "the loss scale on the device follows it",
        "tests/plugin/test_trainer.py::test_minimum_loss_scale_ends_training",
        "min-loss-scale",
    ),
    _group(
        "needs nothing: the plugin's step has no copies to flatten",
        "tests/plugin/test_mixed_precision.py::test_losses_equal_fairseqs",
        "fp16-no-flatten-grads",
    ),
    _group(
        "learning rates reach the device as fairseq's schedulers set them",
        _COMBINATIONS,
        "lr lr-scheduler warmup-updates warmup-init-lr",
    ),
    _group(
        "by fairseq's schedulers, whose rates reach the device",
        _DECIDED,
        "min-lr t-mult lr-period-updates lr-shrink end-learning-rate power total-num-update",
    ),
    _group("by fairseq's schedulers, whose rates reach the device", f"{_EFFECTS}::test_rates", "force-anneal"),
    _group("by fairseq's training loop", f"{_EFFECTS}::test_smallest_rate_ends_training", "stop-min-lr"),
    _group(
        "by fairseq, which makes the same batches as without the plugin",
        _COMBINATIONS,
        "max-tokens batch-size required-batch-size-multiple num-batch-buckets left-pad-source skip-remainder-batch "
        "seed cpu no-progress-bar log-format disable-validation no-save num-workers save-dir",
    ),
    _group(
        "by fairseq, which reads the data before the plugin sees a batch",
        f"{_EFFECTS}::test_data",
        "required-seq-len-multiple left-pad-target truncate-source load-alignments",
    ),
    _group("by fairseq, which shuffles afterwards", f"{_EFFECTS}::test_curriculum_ends", "curriculum"),
    _group("by fairseq, which reads the data", f"{_EFFECTS}::test_upsampling", "upsample-primary"),
    _group("by fairseq, which orders the data", f"{_EFFECTS}::test_order_of_an_epoch", "update-ordered-indices-seed"),
    _group(
        "by fairseq, which reads the data",
        "tests/plugin/test_decided_flags.py::test_generation",
        "dataset-impl gen-subset source-lang target-lang",
    ),
    _group("by fairseq's eval-lm; fairseq's other commands take no notice", _SHARDS, "num-shards shard-id"),
    _group(
        "by fairseq; the user's tasks as well",
        f"{_LAUNCHERS}::TestUserDir::test_users_folder_is_imported_beside_ours",
        "task",
    ),
    _group(
        "by fairseq's training loop, where nothing of the plugin's is under way",
        f"{_EFFECTS}::test_subsets_and_validation",
        "train-subset valid-subset ignore-unused-valid-subsets max-epoch validate-interval max-tokens-valid "
        "batch-size-valid max-valid-steps log-file",
    ),
    _group("by fairseq's training loop", f"{_EFFECTS}::test_joined_validation", "combine-valid-subsets"),
    _group(
        "by fairseq's training loop, where nothing of the plugin's is under way",
        f"{_EFFECTS}::test_no_validation_before",
        "validate-after-updates",
    ),
    _group(
        "by fairseq's training loop, where nothing of the plugin's is under way",
        "tests/plugin/test_trainer_loop.py::test_loop_sees_exact_numbers",
        "patience",
    ),
    _group(
        "by fairseq, from the numbers that the plugin's step returns",
        f"{_LAUNCHERS}::TestTrain::test_tensorboard_folder",
        "tensorboard-logdir",
    ),
    _group(
        "handed to fairseq with its value unchanged, and no more is tested: what fairseq does with it needs packages "
        "that the tests do not have (wandb, aim, plasma, azureml), a GPU's profiler or several nodes, or concerns code "
        "around the plugin only, or has no effect on these models, as in fairseq (speech, multilingual and iterative "
        "decoding)",
        "tests/plugin/test_flags_to_fairseq.py::test_value_is_that_of_plain_fairseq",
        "aim-repo aim-run-hash wandb-project azureml-logging reset-logging suppress-crashes profile plasma-path "
        "use-plasma-view data-buffer-size fixed-validation-seed load-checkpoint-on-all-dp-ranks "
        "write-checkpoints-asynchronously checkpoint-shard-count nprocs-per-node fix-batches-to-gpus "
        "distributed-num-procs distributed-port local_rank find-unused-parameters gradient-as-bucket-view "
        "broadcast-buffers fast-stat-sync "
        "all-gather-list-size grouped-shuffling update-epoch-batch-itr eval-bleu-detok-args eval-tokenized-bleu "
        "eval-bleu-remove-bpe pad eos unk beam-mt max-len-a-mt max-len-b-mt lenpen-mt print-step "
        "iter-decode-eos-penalty iter-decode-max-iter iter-decode-force-max-iter iter-decode-with-beam "
        "iter-decode-with-external-reranker retain-iter-history decoding-format no-early-stop no-beamable-mm sacrebleu "
        "eos-token tokenizer on-cpu-convert-precision ema-seed-model",
    ),
    _group(
        "without effect, as in fairseq, whose parser overwrites it",
        "tests/plugin/test_flags_to_fairseq.py::test_seed_flag",
        "no-seed-provided",
    ),
    _group(
        "the user's folder is imported beside the plugin",
        f"{_LAUNCHERS}::TestUserDir::test_users_folder_is_imported_beside_ours",
        "user-dir",
    ),
    _group(
        "by fairseq: a BLEU score of the model that is being trained",
        "tests/plugin/test_parity.py::test_bleu_while_training",
        "eval-bleu eval-bleu-args eval-bleu-detok eval-bleu-print-samples best-checkpoint-metric "
        "maximize-best-checkpoint-metric",
    ),
    _group(
        "by fairseq; files are read with an allow-list, and state of either optimizer is converted",
        f"{_EFFECTS}::test_starting_from_a_checkpoint",
        "restore-file finetune-from-model reset-dataloader reset-lr-scheduler reset-meters reset-optimizer "
        "optimizer-overrides continue-once",
    ),
    _group(
        "by fairseq; files are written whole",
        f"{_EFFECTS}::test_files",
        "save-interval keep-interval-updates keep-interval-updates-pattern keep-last-epochs keep-best-checkpoints "
        "no-last-checkpoints no-epoch-checkpoints no-save-optimizer-state checkpoint-suffix",
    ),
    _group(
        "by fairseq; the plugin sums the gradients itself with these two kinds of backend",
        _RANKS,
        "distributed-world-size distributed-backend distributed-init-method distributed-rank distributed-no-spawn",
    ),
    _group(
        "by fairseq's generator, which calls the plugin's decoder",
        _GENERATION,
        "path model-overrides beam nbest max-len-b unnormalized lenpen unkpen score-reference prefix-size sampling "
        "sampling-topk diversity-rate print-alignment",
    ),
    _group(
        "by fairseq's generator, which calls the plugin's decoder",
        "tests/plugin/test_decided_flags.py::test_generation",
        "replace-unk diverse-beam-groups diverse-beam-strength sampling-topp temperature no-repeat-ngram-size min-len "
        "max-len-a match-source-len",
    ),
    _group(
        "by fairseq's generator, which calls the plugin's decoder",
        "tests/plugin/test_parity.py::test_constrained_decoding",
        "constraints",
    ),
    _group(
        "by fairseq, around or after the search",
        f"{_COMMANDS}::test_generation_around_the_search",
        "post-process results-path scoring bpe skip-invalid-size-inputs-valid-test sacrebleu-tokenizer "
        "sacrebleu-lowercase sacrebleu-char-level",
    ),
    _group("by fairseq, after the search", f"{_COMMANDS}::test_quiet_generation", "quiet"),
    _group(
        "by fairseq's generator",
        f"{_COMMANDS}::test_language_model_beside_the_decoder",
        "lm-path lm-weight",
    ),
    _group("by fairseq's command", f"{_COMMANDS}::test_input_file", "buffer-size input"),
    _group(
        "by fairseq's task; the plugin's language models",
        "tests/plugin/test_language_model.py::test_fifty_updates",
        "tokens-per-sample sample-break-mode",
    ),
    _group(
        "by fairseq's task, which makes the batches",
        f"{_EFFECTS}::test_language_model_data",
        "add-bos-token shorten-method shorten-data-split-list pad-to-fixed-length pad-to-fixed-bsz",
    ),
    _group("by fairseq's task", f"{_EFFECTS}::test_output_dictionary", "output-dictionary-size"),
    _group("the only target of these models", f"{_EFFECTS}::test_future_target", "future-target"),
    _group(
        "by fairseq's command",
        "tests/plugin/test_language_model.py::test_eval_lm",
        "context-window",
    ),
    _group(
        "by fairseq's command",
        f"{_COMMANDS}::test_words_of_eval_lm",
        "output-word-probs output-word-stats softmax-batch",
    ),
    _group(
        "by fairseq's command, byte for byte",
        f"{_LAUNCHERS}::TestEvaluation::test_preprocess_writes_the_same_bytes",
        "trainpref validpref testpref destdir joined-dictionary nwordstgt nwordssrc workers",
    ),
    _group(
        "by fairseq's command, byte for byte",
        f"{_COMMANDS}::test_preprocessing",
        "align-suffix thresholdtgt thresholdsrc tgtdict srcdict alignfile only-source padding-factor dict-only",
    ),
)
"""Flags that are followed by the plugin's code, or by fairseq's before and after it."""

REFERENCE: tuple[Group, ...] = (
    _group(
        "encoder, decoder or both are fairseq's own layers",
        "tests/plugin/test_model_options.py::TestReferencePath",
        _of_options(model_options.REFERENCE),
    ),
    _group(
        "the language model's decoder is fairseq's own; --adaptive-input does nothing to a translation model, as in "
        "fairseq",
        "tests/plugin/test_language_model.py::test_reference_path",
        "adaptive-input adaptive-input-factor adaptive-input-cutoff decoder-input-dim character-embeddings "
        "character-filters character-embedding-dim char-embedder-highway-layers scale-fc scale-attn scale-heads "
        "scale-resids",
    ),
    _group(f"fused layers; {_LATER}", _DECIDED, "encoder-layerdrop decoder-layerdrop"),
    _group(
        f"with another optimizer than ls_adam, or another criterion than the plugin's, {_LATER}",
        "tests/plugin/test_trainer.py::test_steps_aside",
        "optimizer criterion",
    ),
    _group(
        f"criterion label_smoothed_cross_entropy_with_alignment: the decoder is fairseq's own and {_LATER}",
        "tests/plugin/test_flag_lists.py::test_alignment_criterion",
        "alignment-lambda",
    ),
    _group(
        _LATER,
        "tests/plugin/test_decided_flags.py::test_moving_average",
        "store-ema ema-decay ema-start-update ema-update-freq ema-fp32",
    ),
    _group(
        f"{_LATER}, which unscales twice with --amp", _DECIDED, "amp amp-batch-retries amp-init-scale amp-scale-window"
    ),
    _group(_LATER, _DECIDED, "use-bmuf"),
    _group(
        _LATER,
        _ALTERNATIVES,
        "debug-param-names empty-cache-freq heartbeat-timeout bucket-cap-mb ddp-comm-hook quantization-config-path",
    ),
    _group(
        f"with a backend or sharding that fairscale brings, {_LATER}",
        _ALTERNATIVES,
        "ddp-backend slowmo-momentum slowmo-base-algorithm localsgd-frequency zero-sharding no-reshard-after-forward "
        "fp32-reduce-scatter cpu-offload use-sharded-state not-fsdp-flatten-parameters",
    ),
)
"""Flags, or values of them, for which fairseq's own code takes over; a logged line names the flag."""

REFUSED: tuple[Group, ...] = (
    *(_group(advice, _REFUSED, name.replace("_", "-")) for name, (_, advice) in model_options.REFUSED.items()),
    _group("the moments of ls_adam are float32; drop the flag", _REFUSED, "fp16-adam-stats"),
    _group("asks for fairseq's own Adam; use --optimizer adam", _REFUSED, "use-old-adam"),
    _group(
        "the fused decoder generates without dropout; use --model-overrides to generate with fairseq's layers",
        _REFUSED,
        "retain-dropout retain-dropout-modules",
    ),
    _group(
        "the Transformer language models predict the next word only, fairseq's as well; drop the flag",
        f"{_EFFECTS}::test_other_targets",
        "self-target past-target",
    ),
)
"""Flags that end the program with one line, which names the flag and what to do instead."""

OUTCOMES = {
    "Honoured": (HONOURED, "The plugin follows the flag, or fairseq does before and after the plugin's part."),
    "Honoured through fairseq's own code": (
        REFERENCE,
        "fairseq's layers or its training step take over where the flag, or a value other than those of the plugin, "
        "asks for it. A logged line says so. Flags that only say more about another do nothing without it.",
    ),
    "Refused": (REFUSED, "One line names the flag and what to do instead; the exit status is not 0."),
}


def table() -> str:
    """Return the lists as a page of Markdown."""
    parts = [
        "# Flags",
        "Every flag of fairseq's parsers and what becomes of it under `lightseq-train` and its sisters with the "
        "architectures `ls_*`. Written by `python -m fairseq_plugin.flags`; a test compares it with the parsers.",
    ]
    for title, (groups, text) in OUTCOMES.items():
        lines = [f"## {title}", "", text, "", "| Flags | What happens | Shown by |", "|---|---|---|"]
        for group in groups:
            names = " ".join(f"`{flag}`" for flag in group.flags)
            test, _, rest = group.test.partition(", ")
            lines.append(f"| {names} | {group.what} | `{test}`{', ' + rest if rest else ''} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(table(), end="")
