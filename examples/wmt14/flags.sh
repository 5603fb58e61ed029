# Sourced by the scripts of this folder: the one place where training flags live, so that the run with ls_train and its
# plain-fairseq twin cannot drift apart. They differ in the names below and in nothing else.

# select_engine ls|fairseq: sets TRAIN and the prefix of arch, criterion and optimizer.
select_engine() {
  case "$1" in
    ls) TRAIN=lightseq-train; PREFIX=ls_ ;;
    fairseq) TRAIN=fairseq-train; PREFIX= ;;
    *) echo "engine '$1' is not known: choose ls or fairseq" >&2; return 2 ;;
  esac
}

# common_flags: optimiser, schedule and criterion of "Scaling Neural Machine Translation" and of the Transformer paper.
common_flags() {
  COMMON=(
    --source-lang en --target-lang de --share-all-embeddings
    --criterion "${PREFIX}label_smoothed_cross_entropy" --label-smoothing 0.1
    --optimizer "${PREFIX}adam" --adam-betas '(0.9, 0.98)' --weight-decay 0.0
    --lr-scheduler inverse_sqrt --warmup-init-lr 1e-07
  )
}

# wmt_flags base|big: sets FLAGS for the full recipe. Learning rates belong to batches of 8 times --max-tokens.
wmt_flags() {
  common_flags
  case "$1" in
    base)
      FLAGS=("${COMMON[@]}" --arch "${PREFIX}transformer_wmt_en_de" --dropout 0.1 --lr 7e-4 --warmup-updates 4000
        --clip-norm 0.0 --max-tokens 4096 --max-update 100000)
      ;;
    big)
      FLAGS=("${COMMON[@]}" --arch "${PREFIX}transformer_vaswani_wmt_en_de_big" --dropout 0.3 --lr 5e-4
        --warmup-updates 4000 --clip-norm 0.0 --max-tokens 3584 --max-update 300000)
      ;;
    *) echo "size '$1' is not known: choose base or big" >&2; return 2 ;;
  esac
}

# small_model LAYERS DIM FFN HEADS: sets MODEL, a pre-norm Transformer of that size.
small_model() {
  MODEL=(--arch "${PREFIX}transformer" --encoder-normalize-before --decoder-normalize-before)
  local side
  for side in encoder decoder; do
    MODEL+=("--$side-layers" "$1" "--$side-embed-dim" "$2" "--$side-ffn-embed-dim" "$3" "--$side-attention-heads" "$4")
  done
}

# quickstart_flags cpu|gpu: sets FLAGS for the few minutes of quickstart.sh.
quickstart_flags() {
  common_flags
  case "$1" in
    cpu)
      small_model 2 192 512 4
      FLAGS=("${COMMON[@]}" "${MODEL[@]}" --cpu --dropout 0.1 --lr 3e-3 --warmup-updates 100 --clip-norm 1.0
        --max-tokens 1000 --max-update 1000 --validate-interval-updates 200)
      ;;
    gpu)
      small_model 4 512 2048 8
      FLAGS=("${COMMON[@]}" "${MODEL[@]}" --fp16 --dropout 0.3 --lr 1e-3 --warmup-updates 400 --clip-norm 1.0
        --max-tokens 4096 --max-update 2500 --validate-interval-updates 250)
      ;;
  esac
}
