#!/usr/bin/env bash
# WMT14 English-German: download (1.6 GB), clean, BPE, lightseq-preprocess. Needs the extra `wmt` (pip install '.[wmt]').
#
#   WORK      where to write                       (examples/wmt14/wmt14_en_de)
#   PIECES    size of the joint vocabulary         (32000)
#   WORKERS   processes                            (number of cores)
#
# Training data as in the Transformer paper: Europarl v7, Common Crawl, News Commentary v9; validation on newstest2013,
# test on newstest2014 in sacrebleu's full version (3003 sentences). Text stays untokenised: sentencepiece learns its
# pieces on it directly, and what the model says is scored as it stands. A file that exists is not made again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=${WORK:-$here/wmt14_en_de}
pieces=${PIECES:-32000}
workers=${WORKERS:-$(nproc)}
python=$(command -v python || command -v python3)
mkdir -p "$work"/{archives,text,bpe}
cd "$work"

archives=(
  https://www.statmt.org/europarl/v7/de-en.tgz
  https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz
  https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz
)
parts=(europarl-v7.de-en commoncrawl.de-en news-commentary-v9.de-en)

# once TARGET COMMAND...: run the command with its output going to TARGET, unless TARGET is there; never leave half a file.
once() {
  local target=$1
  shift
  if [ ! -s "$target" ]; then
    "$@" >"$target.part"
    mv "$target.part" "$target"
  fi
}

normalise() { "$python" "$here/clean.py" normalise --language "$1" "$2" /dev/stdout; }

# part NAME LANGUAGE: print one file of the training archives.
part() {
  local archive
  for archive in archives/*.tgz; do
    local member
    member=$(tar -tzf "$archive" | grep -E "(^|/)$1\.$2\$" | head -n 1 || true)
    if [ -n "$member" ]; then
      tar -xzOf "$archive" "$member"
      return
    fi
  done
  echo "no archive in $work/archives holds $1.$2" >&2
  return 1
}

all_parts() { for name in "${parts[@]}"; do part "$name" "$1"; done; }

echo "== download"
for url in "${archives[@]}"; do
  once "archives/$(basename "$(dirname "$url")")-$(basename "$url")" curl --fail --location --retry 3 "$url"
done
once text/valid.en sacrebleu -t wmt13 -l en-de --echo src
once text/valid.de sacrebleu -t wmt13 -l en-de --echo ref
once text/test.en sacrebleu -t wmt14/full -l en-de --echo src
once text/test.de sacrebleu -t wmt14/full -l en-de --echo ref

echo "== normalise"
for language in en de; do
  once "text/train.raw.$language" all_parts "$language"
  for split in train.raw valid test; do
    once "text/$split.normal.$language" normalise "$language" "text/$split.$language"
  done
done

echo "== BPE: $pieces joint pieces"
if [ ! -s bpe/joint.model ]; then
  "$python" "$here/bpe.py" learn --model bpe/joint --vocab-size "$pieces" text/train.raw.normal.en text/train.raw.normal.de
fi
for language in en de; do
  for split in train.raw valid test; do
    once "bpe/$split.$language" "$python" "$here/bpe.py" encode --model bpe/joint "text/$split.normal.$language" /dev/stdout
  done
done

echo "== clean: 1 to 250 pieces a sentence, length ratio at most 1.5; the test set stays whole"
"$python" "$here/clean.py" filter bpe/train.raw.en bpe/train.raw.de bpe/train.en bpe/train.de

echo "== lightseq-preprocess"
lightseq-preprocess --source-lang en --target-lang de --trainpref bpe/train --validpref bpe/valid --testpref bpe/test \
  --destdir data-bin --joined-dictionary --workers "$workers"
echo "ready: $work/data-bin"
