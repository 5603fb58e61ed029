#!/usr/bin/env bash
# Average the last checkpoints of a run of train.sh, translate newstest2014 and score it.
#
#   evaluate.sh base|big [--engine ls|fairseq] [further lightseq-generate flags]
#
#   LAST   checkpoints to average (10; 1 takes the newest alone)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${WORK:-$here/wmt14_en_de}
last=${LAST:-10}

size=${1:?usage: evaluate.sh base|big [--engine ls|fairseq] [further flags]}
shift
engine=ls
if [ "${1:-}" = --engine ]; then
  engine=${2:?--engine needs ls or fairseq}
  shift 2
fi
run=$work/$size-$engine

lightseq-average --inputs "$run" --num-epoch-checkpoints "$last" --output "$run/averaged.pt"

device=(--fp16)
if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device=(--cpu)
fi
# Without --required-batch-size-multiple 1 fairseq drops the last sentences of the test set.
lightseq-generate "$work/data-bin" "${device[@]}" --path "$run/averaged.pt" --gen-subset test --source-lang en \
  --target-lang de --beam 4 --lenpen 0.6 --max-tokens 8000 --required-batch-size-multiple 1 --remove-bpe sentencepiece \
  "$@" >"$run/generate.log"
python3 "$here/hypotheses.py" "$run/generate.log" "$run/newstest2014.de"
sacrebleu "$work/text/test.de" --input "$run/newstest2014.de" --metrics bleu chrf --format text
