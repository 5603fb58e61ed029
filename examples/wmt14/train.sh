#!/usr/bin/env bash
# Train the Transformer of the paper on what prepare.sh made.
#
#   train.sh base|big [--engine ls|fairseq] [further fairseq-train flags]
#
# --engine fairseq is the twin without ls_train: flags.sh gives both the same flags. The learning rate belongs to batches
# of 8 x --max-tokens; with fewer GPUs --update-freq makes up for the missing ones. Checkpoints: $WORK/SIZE-ENGINE.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${WORK:-$here/wmt14_en_de}
source "$here/flags.sh"

size=${1:?usage: train.sh base|big [--engine ls|fairseq] [further flags]}
shift
engine=ls
if [ "${1:-}" = --engine ]; then
  engine=${2:?--engine needs ls or fairseq}
  shift 2
fi
select_engine "$engine"
wmt_flags "$size"

gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
precision=(--fp16)
if [ "$gpus" = 0 ]; then
  precision=(--cpu)
fi
update_freq=$((gpus > 0 && gpus < 8 ? 8 / gpus : (gpus == 0 ? 8 : 1)))

exec "$TRAIN" "$work/data-bin" "${FLAGS[@]}" "${precision[@]}" --update-freq "$update_freq" --seed 1 \
  --save-dir "$work/$size-$engine" --keep-last-epochs 10 --log-format simple --log-interval 100 "$@"
