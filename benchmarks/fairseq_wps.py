"""Target words a second of real training runs: ``fairseq-train`` against ``lightseq-train``, same flags, same data.

``python -m benchmarks.fairseq_wps [--quick] [--output FILE]``. Each run is a process of its own on one data-bin of
random tokens with lengths as in WMT14 English-German. Implementations: ``fairseq`` as it ships,
``fairseq_no_cudnn_attention`` with torch's cuDNN attention off (it plans anew for every shape: the fair baseline),
``ls_train`` and ``ls_train_graph``, the same with ``--ls-cuda-graph on``. The figures are the medians of fairseq's own
log after the first intervals.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.records import RESULTS, write_records

VOCABULARY = 40000
_MAX_TOKENS = (512, 1024, 4096, 8192, 15000)
_QUICK = (4096, 15000)
IMPLEMENTATIONS = ("ls_train", "ls_train_graph", "fairseq_no_cudnn_attention", "fairseq")
_ARCHS = {"transformer_big_6e6d": "transformer_vaswani_wmt_en_de_big", "transformer_toy": "transformer_tiny"}
_SKIPPED_INTERVALS = 2
_PEAK = "peak memory of this run, bytes: "
_START = {
    "ls_train": "from fairseq_plugin.cli import train as main",
    "ls_train_graph": "from fairseq_plugin.cli import train as main",
    "fairseq": "from fairseq_cli.train import cli_main as main",
    "fairseq_no_cudnn_attention": (
        "import torch; torch.backends.cuda.enable_cudnn_sdp(False); from fairseq_cli.train import cli_main as main"
    ),
}
_END = f"import torch; print('{_PEAK}', torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)"


def write_data(folder: Path, sentences: int, vocabulary: int) -> None:
    """Write a data-bin of random tokens: lengths log-normal as in WMT14 en-de, words by Zipf's law."""
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True, exist_ok=True)
    dictionary = Dictionary()
    for i in range(vocabulary - dictionary.nspecial):
        dictionary.add_symbol(f"w{i}", n=vocabulary - i)
    rng = np.random.default_rng(1)
    for split, count in (("train", sentences), ("valid", 100)):
        length = np.exp(rng.normal(3.22, 0.62, count))
        ratio = np.exp(rng.normal(0.02, 0.17, count))
        for language, lengths in (("en", length.clip(3, 200)), ("de", (length * ratio).clip(3, 220))):
            dictionary.save(str(folder / f"dict.{language}.txt"))
            path = str(folder / f"{split}.en-de.{language}")
            builder = indexed_dataset.make_builder(path + ".bin", "mmap", vocab_size=vocabulary)
            for words in lengths.astype(int):
                ids = (rng.zipf(1.15, words) - 1) % (vocabulary - 10) + dictionary.nspecial
                builder.add_item(torch.from_numpy(np.append(ids, dictionary.eos()).astype(np.int64)))
            builder.finalize(path + ".idx")


def arguments_of(
    data: Path, implementation: str, arch: str, max_tokens: int, precision: str, updates: int
) -> list[str]:
    """Return the command line of one run; ours differs in the names of arch, criterion and optimizer alone."""
    prefix = "ls_" if implementation.startswith("ls_train") else ""
    flags = (
        f"{data} --source-lang en --target-lang de --task translation --arch {prefix}{_ARCHS[arch]} "
        f"--share-all-embeddings --optimizer {prefix}adam --adam-betas (0.9,0.98) --clip-norm 0.0 --lr 5e-4 "
        "--lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7 --weight-decay 0.0001 --dropout 0.1 "
        f"--attention-dropout 0.1 --activation-dropout 0.1 --criterion {prefix}label_smoothed_cross_entropy "
        f"--label-smoothing 0.1 --max-tokens {max_tokens} --max-update {updates} --no-save --disable-validation "
        f"--log-format json --log-interval {max(1, updates // 10)} --seed 1 --num-workers 4"
    )
    if implementation == "ls_train_graph":
        flags += " --ls-cuda-graph on"
    if precision != "fp32":
        flags += f" --{precision}"
    if not torch.cuda.is_available():
        flags += " --cpu"
    return flags.split()


def run(data: Path, implementation: str, arch: str, max_tokens: int, precision: str, updates: int) -> dict[str, float]:
    """Train and return ``words_per_second``, ``time`` (ms a step) and ``peak_memory`` (GiB).

    Raises:
        RuntimeError: the run failed or logged too little; the message holds the end of its output.
    """
    program = f"{_START[implementation]}; main(); {_END}"
    flags = arguments_of(data, implementation, arch, max_tokens, precision, updates)
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    rows = [json.loads(line) for line in re.findall(r'\{"epoch".*\}', output)]
    rows = [row for row in rows if "wps" in row][_SKIPPED_INTERVALS:]
    peak = re.search(re.escape(_PEAK) + r" *(\d+)", output)
    if done.returncode != 0 or not rows or peak is None:
        raise RuntimeError(f"{implementation} at {max_tokens} tokens failed:\n{output[-2000:]}")
    return {
        "words_per_second": statistics.median(float(row["wps"]) for row in rows),
        "time": 1e3 / statistics.median(float(row["ups"]) for row in rows),
        "peak_memory": int(peak.group(1)) / 2**30,
    }


def records_of(case: dict[str, Any], results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the records of one case, with ratios above 1 where ls_train is better."""
    units = {"words_per_second": "words/s", "time": "ms", "peak_memory": "GiB"}
    records = []
    for implementation, metrics in results.items():
        for metric, value in metrics.items():
            ratios = {}
            if implementation.startswith("ls_train") and value > 0:
                for peer in (name for name in results if not name.startswith("ls_train")):
                    theirs = results[peer][metric]
                    ratios[peer] = value / theirs if metric == "words_per_second" else theirs / value
            record = {"bench": "fairseq_wps", "case": case, "implementation": implementation}
            records.append({**record, "metric": metric, "value": value, "unit": units[metric], "ratios": ratios})
    return records


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"max-tokens {_QUICK} only, without fairseq as shipped")
    parser.add_argument("--arch", default="transformer_big_6e6d", choices=sorted(_ARCHS))
    parser.add_argument("--precision", action="append", choices=("fp32", "fp16", "bf16"), help="default: fp16")
    parser.add_argument("--max-tokens", action="append", type=int)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--sentences", type=int, default=60000)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS)
    parser.add_argument("--output", type=Path, default=RESULTS / "fairseq_wps.json")
    options = parser.parse_args(argv)
    names = options.implementation or IMPLEMENTATIONS[: -1 if options.quick else None]
    records = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_data(data, options.sentences, options.vocabulary)
        for precision in options.precision or ["fp16"]:
            for max_tokens in options.max_tokens or (_QUICK if options.quick else _MAX_TOKENS):
                case = {"arch": options.arch, "max_tokens": max_tokens, "precision": precision}
                results = {}
                for name in names:
                    try:
                        results[name] = run(data, name, options.arch, max_tokens, precision, options.updates)
                    except RuntimeError as error:
                        print(error, flush=True)
                        continue
                    line = " | ".join(f"{metric} {value:.1f}" for metric, value in results[name].items())
                    print(f"{options.arch} {precision} {max_tokens}: {name} {line}", flush=True)
                records += records_of(case, results)
                write_records(records, options.output)


if __name__ == "__main__":
    main()
