#!/usr/bin/env bash
# A small language model of the bundled corpus' German side: text to perplexity in a few minutes, on a CPU or a GPU.
#
#   quickstart.sh [further flags of lightseq-train]
#
# Data and checkpoints: $WORK, by default work/ in this folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${WORK:-$here/work}
corpus=$here/../wmt14/data/handbook

if [ ! -e "$work/data-bin/dict.txt" ]; then
  lightseq-preprocess --only-source --trainpref "$corpus/train.de" --validpref "$corpus/valid.de" \
    --testpref "$corpus/test.de" --destdir "$work/data-bin" --nwordssrc 4000 --workers 1
fi

device=()
if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" = 0 ]; then
  device=(--cpu)
fi

lightseq-train "$work/data-bin" --task language_modeling --arch ls_transformer_lm_gpt "${device[@]}" \
  --decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4 \
  --share-decoder-input-output-embed --criterion ls_cross_entropy --optimizer ls_adam --lr 3e-3 --clip-norm 1.0 \
  --lr-scheduler inverse_sqrt --warmup-updates 100 --tokens-per-sample 128 --sample-break-mode none \
  --max-tokens 1024 --max-update 300 --no-epoch-checkpoints --save-dir "$work/checkpoints" \
  --log-format simple --log-interval 50 "$@"

lightseq-eval-lm "$work/data-bin" --path "$work/checkpoints/checkpoint_best.pt" --gen-subset test \
  --tokens-per-sample 128 --context-window 64 --max-tokens 1024 "${device[@]}"
