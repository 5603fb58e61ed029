"""The benchmarks of whole trainings, by words a second and by the all-reduce, run at toy size without a GPU."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace

import pytest

from benchmarks import all_reduce, fairseq_process, fairseq_wps, report, trace
from benchmarks.fairseq_process import PEAK

needs_fairseq = pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")

KEYS = {"bench", "case", "implementation", "metric", "value", "unit", "ratios"}
WHERE = {"machine", "versions", "commit", "source_hash"}


def test_ratios_above_one_are_better() -> None:
    case = {"arch": "transformer_toy", "max_tokens": 256, "precision": "fp32"}
    ours = {"words_per_second": 200.0, "time": 5.0, "peak_memory": 1.0}
    theirs = {"words_per_second": 100.0, "time": 10.0, "peak_memory": 2.0}
    records = fairseq_wps.records_of(case, {"ls_train": ours, "fairseq": theirs})
    assert all(record.keys() == KEYS for record in records)
    ratios = {r["metric"]: r["ratios"] for r in records if r["implementation"] == "ls_train"}
    assert ratios == {metric: {"fairseq": 2.0} for metric in ours}


def test_both_engines_get_the_same_flags(tmp_path) -> None:
    run = fairseq_wps.Run("ls_train", "transformer_toy", 256, "fp32", 1, 20, 10)
    lines = [
        [
            word.removeprefix("ls_")
            for word in fairseq_wps.arguments_of(tmp_path, replace(run, implementation=implementation))
        ]
        for implementation in ("ls_train", "fairseq")
    ]
    assert [word for word in lines[0] if word not in ("--ls-cuda-graph", "off")] == lines[1]


def test_efficiency_compares_with_as_many_single_gpus() -> None:
    figures = {"words_per_second": 100.0, "time": 10.0, "peak_memory": 1.0}
    runs = [fairseq_wps.Run("ls_train", "transformer_toy", 256, "fp16", gpus, 20, 10) for gpus in (1, 2)]
    records = fairseq_wps.all_records(
        {runs[0]: figures, runs[1]: {**figures, "words_per_second": 190.0}}, with_gpus=True
    )
    shares = [(r["case"]["gpus"], r["value"]) for r in records if r["metric"] == "efficiency"]
    assert shares == [(2, pytest.approx(95.0))]


def test_an_implementation_or_arch_can_run_at_one_size_only() -> None:
    words = "--implementation ls_train --implementation fairseq@512 --max-tokens 512 --max-tokens 1024"
    words += " --arch transformer_toy --arch transformer_iwslt_de_en@1024"
    runs = fairseq_wps._runs(fairseq_wps.parser().parse_args(words.split()))
    assert [(run.arch, run.implementation, run.max_tokens) for run in runs] == [
        ("transformer_toy", "ls_train", 512),
        ("transformer_toy", "fairseq", 512),
        ("transformer_toy", "ls_train", 1024),
        ("transformer_iwslt_de_en", "ls_train", 1024),
    ]
    assert [(run.updates, run.measured) for run in runs[:2]] == [(160, 128), (160, 128)]
    with pytest.raises(SystemExit):
        fairseq_wps.parser().parse_args(["--implementation", "nonsense@512"])


def test_an_option_makes_a_case_of_its_own(tmp_path) -> None:
    sizes = ("transformer_toy", 256, "fp16", 1, 20, 10)
    for option in fairseq_wps.OPTIONS:
        runs = [fairseq_wps.Run("ls_train", *sizes), fairseq_wps.Run("ls_train", *sizes, **{option: True})]
        flag = f"--ls-{option.replace('_', '-')}"
        assert [flag in fairseq_wps.arguments_of(tmp_path, run) for run in runs] == [False, True]
        records = fairseq_wps.all_records({run: {"time": 1.0} for run in runs}, with_gpus=False)
        assert [record["case"].get(option) for record in records] == [None, True]


def test_the_hidden_share_of_an_all_reduce() -> None:
    def kernel(name: str, start: float, duration: float) -> trace.Kernel:
        return trace.Kernel(name, start, duration, "backward")

    nccl = [kernel("ncclDevKernel_AllReduce", 10, 20), kernel("ncclDevKernel_AllReduce", 50, 10)]
    others = [kernel("gemm", 0, 15), kernel("gemm", 12, 10), kernel("adam", 61, 5)]
    for kernels, share in (([*others, *nccl], 100 * 12 / 30), (nccl, 0)):
        assert all_reduce.figures([trace.Step(kernels, 100)])["all_reduce_hidden"] == (pytest.approx(share), "%")
    with pytest.raises(ValueError, match="use two GPUs"):
        all_reduce.figures([trace.Step(others, 100)])
    steps = [trace.Step([*others, *nccl], 100), trace.Step(nccl, 100)]
    found = {metric: value for metric, (value, _) in all_reduce.figures(steps).items()}
    assert found == {
        "all_reduce_hidden": pytest.approx(20),
        "all_reduce_time": pytest.approx(0.03),
        "all_reduce_exposed": pytest.approx(0.024),
    }


def test_copies_and_signals_between_gpus_are_communication() -> None:
    """So is what else runs on their stream: the sums, whose kernels have no name of their own."""

    def kernel(name: str, start: float, duration: float, stream: int) -> trace.Kernel:
        return trace.Kernel(name, start, duration, "backward", stream)

    add = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::Half>"
    exchange = [
        kernel("c10d::symmetric_memory::put_signal_kernel(unsigned int**, int)", 10, 5, 20),
        kernel("c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int)", 15, 5, 20),
        kernel("Memcpy PtoP (Device -> Device)", 20, 60, 20),
        kernel(add, 80, 20, 20),
    ]
    others = [kernel("gemm", 0, 60, 7), kernel(add, 60, 10, 7), kernel("Memcpy HtoD (Pinned -> Device)", 70, 5, 7)]
    found = all_reduce.figures([trace.Step([*others, *exchange], 100)])
    assert found["all_reduce_time"] == (pytest.approx(0.09), "ms")
    assert found["all_reduce_exposed"] == (pytest.approx(0.025), "ms")


def test_times_of_traces_are_sound_whatever_the_rounding() -> None:
    draw = random.Random(0)
    for _ in range(300):
        first = draw.choice((0.0, draw.random(), 1e9 * draw.random()))
        times = sorted((first + draw.randrange(40) / 7, draw.randrange(10) / 3) for _ in range(draw.randrange(1, 30)))
        kernels = [trace.Kernel(draw.choice(("nccl", "gemm")), *time, "update") for time in times]
        end = max(kernel.start + kernel.duration for kernel in kernels)
        step = trace.Step(kernels, end - draw.choice((0.0, 0.5)))
        nccl, others = ([kernel for kernel in kernels if kernel.name == name] for name in ("nccl", "gemm"))
        beside, alone = trace.shared_time(nccl, others)
        assert min(beside, alone, step.gaps) >= 0
        assert beside + alone == pytest.approx(trace.Step.busy(nccl), abs=1e-5)
        union = trace.Step.busy(kernels)
        assert alone + trace.Step.busy(others) == pytest.approx(union, abs=1e-5)
        assert trace.Step(kernels, end).gaps == pytest.approx(end - union, rel=1e-9, abs=1e-5)
        if alone == 0 == beside:
            continue
        hidden, time, exposed = (value for value, _ in all_reduce.figures([step]).values())
        assert 0 <= hidden <= 100
        assert 0 <= exposed <= time


@needs_fairseq
@pytest.mark.timeout(400)
def test_all_reduce(imported_fairseq, forked_python, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(all_reduce, "_RECORDED", 4)  # of which the first and the last are left out
    output = tmp_path / "all_reduce.json"
    sizes = "--arch transformer_toy --max-tokens 256 --precision fp32 --warm-up 1 --sentences 400 --vocabulary 101"
    all_reduce.main([*sizes.split(), "--implementation", "ls_train", "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    figures = {record["metric"]: record["value"] for record in records}
    assert "%)" in report.all_reduce_table(records)
    assert 0 <= figures["all_reduce_hidden"] <= 100
    assert figures["all_reduce_time"] > 0


def test_only_the_last_updates_are_measured() -> None:
    def row(update: int, wps: float, wpb: float = 1000) -> str:
        return json.dumps({"epoch": 1, "wps": str(wps), "wpb": str(wpb), "num_updates": str(update)})

    run = fairseq_wps.Run("ls_train", "transformer_toy", 256, "fp16", 1, 40, 20)
    rows = [row(update, 1.0) for update in range(5, 25, 5)]
    rows += [row(25, 5000), row(30, 5000), row(35, 10000), row(40, 500, 100)]
    log = "\n".join([*rows, f"{PEAK} {2**30}"])
    # Times of 1, 1, 0.5 and 1 seconds for 15,500 words.
    assert fairseq_wps.figures(log, run) == {
        "words_per_second": pytest.approx(15500 / 3.5),
        "time": pytest.approx(175.0),
        "peak_memory": 1.0,
    }
    with pytest.raises(RuntimeError, match="not hold all updates after update 20"):
        fairseq_wps.figures("\n".join([*rows[:-1], f"{PEAK} 1"]), run)
    overflow = "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 4.0"
    with pytest.raises(RuntimeError, match="1 overflowed and were skipped, lower --fp16-init-scale"):
        fairseq_wps.figures("\n".join([overflow, *rows[:-1], f"{PEAK} 1"]), run)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_gpus_is_measured_on_the_same_batches(ranks) -> None:
    epoch = [[number] for number in range(10)]
    shards = [[*epoch[rank::ranks], *([[]] * (-len(epoch) % ranks > 0))] for rank in range(ranks)]
    orders = [fairseq_process.warmed_order(shards, rank, 8, 9) for rank in range(ranks)]
    assert sorted(sum((order[9:] for order in orders), [])) == epoch[:8]
    assert {len(order) for order in orders} == {9 + 8 // ranks}
    for order in orders:
        assert sorted(order[1:9]) == epoch[:8], "each rank has met each batch after its first update"
    assert len({tuple(order[0]) for order in orders}) == ranks
    with pytest.raises(ValueError, match="--measured 12: an epoch has 10 batches for"):
        fairseq_process.warmed_order(shards, 0, 12, 1)


@needs_fairseq
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [["ls_train"], ["ls_train", "fairseq_no_cudnn_attention"]], ids=["fresh", "forked"])
def test_fairseq_wps(names, imported_fairseq, request, tmp_path) -> None:
    """A run of ours in an interpreter of its own, as on a GPU; both implementations in forks of this one."""
    if len(names) > 1:
        request.getfixturevalue("forked_python")
    output = tmp_path / "wps.json"
    flags = "--arch transformer_toy --precision fp32 --max-tokens 256 --sentences 200 --vocabulary 101 --measured 4"
    flags += " --warm-up 2" + "".join(f" --implementation {name}" for name in names)
    fairseq_wps.main([*flags.split(), "--data", str(tmp_path / "data"), "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    metrics = ("words_per_second", "time", "peak_memory")
    assert {(r["implementation"], r["metric"]) for r in records} == {
        (name, metric) for name in names for metric in metrics
    }


@needs_fairseq
def test_a_run_that_fails_or_hangs_does_not_stop_the_others(tmp_path, capsys) -> None:
    run = fairseq_wps.Run("ls_train", "transformer_toy", 256, "fp32", 1, 20, 10)
    assert list(fairseq_wps.measured([run], tmp_path, limit=60, start_limit=0.2)) == []
    assert "not ready after" in capsys.readouterr().out
