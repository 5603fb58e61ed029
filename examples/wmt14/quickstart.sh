#!/usr/bin/env bash
# From text to translations in a few minutes: BPE, preprocess, train, generate, score, on the corpus in data/handbook.
# Takes a larger model when torch sees a GPU. Everything it writes goes to $WORK.
#
#   WORK     where to write                                  (examples/wmt14/work)
#   ENGINE   ls, or fairseq for the same run without ls_train (ls)
#   HOURS    stop training after so many hours at the latest (0.085: five minutes)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${WORK:-$here/work}
engine=${ENGINE:-ls}
hours=${HOURS:-0.085}
python=$(command -v python || command -v python3)
# Threads that wait for each other sleep: spinning, as is the default, stops all progress on a machine that does other
# work as well.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
source "$here/flags.sh"
select_engine "$engine"

say() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

corpus=$here/data/handbook
data=$work/data-bin
checkpoints=$work/checkpoints-$engine
mkdir -p "$work/bpe" "$checkpoints"
rm -rf "$data" "$checkpoints"/*

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  device=gpu; device_flags=(--fp16)
else
  device=cpu; device_flags=(--cpu)
fi

say "BPE: 2000 pieces, learned on both languages"
"$python" "$here/bpe.py" learn --model "$work/bpe/joint" --vocab-size 2000 "$corpus/train.en" "$corpus/train.de"
for split in train valid test; do
  for language in en de; do
    "$python" "$here/bpe.py" encode --model "$work/bpe/joint" "$corpus/$split.$language" "$work/bpe/$split.$language"
  done
done

say "lightseq-preprocess"
lightseq-preprocess --source-lang en --target-lang de --trainpref "$work/bpe/train" --validpref "$work/bpe/valid" \
  --testpref "$work/bpe/test" --destdir "$data" --joined-dictionary --workers 1 >"$work/preprocess.log" 2>&1 ||
  { tail -n 30 "$work/preprocess.log"; exit 1; }

quickstart_flags "$device"
say "$TRAIN on the $device"
"$TRAIN" "$data" "${FLAGS[@]}" --seed 1 --num-workers 0 --stop-time-hours "$hours" --no-epoch-checkpoints \
  --save-dir "$checkpoints" --log-format simple --log-interval 25 2>&1 | tee "$work/train-$engine.log"

say "lightseq-generate: beam 4"
lightseq-generate "$data" "${device_flags[@]}" --path "$checkpoints/checkpoint_best.pt" --gen-subset test \
  --source-lang en --target-lang de --beam 4 --lenpen 0.6 --max-len-a 1.2 --max-len-b 10 --max-tokens 4000 \
  --required-batch-size-multiple 1 --remove-bpe sentencepiece >"$work/generate-$engine.log" 2>&1 ||
  { tail -n 30 "$work/generate-$engine.log"; exit 1; }

say "five translations of the test set"
"$python" "$here/hypotheses.py" "$work/generate-$engine.log" "$work/test-$engine.de" --samples 5 \
  --source "$corpus/test.en" --reference "$corpus/test.de"

say "sacrebleu"
sacrebleu "$corpus/test.de" --input "$work/test-$engine.de" --metrics bleu chrf --format text

say "what was learned"
"$python" "$here/learning.py" "$work/train-$engine.log" --target "$work/bpe/valid.de" --plot "$work/loss-$engine.png"
say "done"
