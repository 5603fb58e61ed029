"""The benchmarks run at toy size without a GPU, and the README's tables are those of the records."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    curves,
    curves_summary,
    fairseq_wps,
    layer,
    layer_process,
    profile_step,
    report,
    step,
    timeline,
    trace,
)
from benchmarks.floor import Floor
from benchmarks.processes import Prepared
from benchmarks.records import write_records
from benchmarks.shapes import SHAPES
from ls_train.params import joined

needs_fairseq = pytest.mark.skipif(importlib.util.find_spec("fairseq") is None, reason="fairseq is not installed")

KEYS = {"bench", "case", "implementation", "metric", "value", "unit", "ratios"}
WHERE = {"machine", "versions", "commit", "source_hash"}


@pytest.mark.timeout(400)
def test_step(forked_python, tmp_path) -> None:
    output = tmp_path / "step.json"
    names = ["ls_train", "torch_eager"]
    flags = [argument for name in names for argument in ("--implementation", name)]
    toy = ["--arch", "transformer_toy_1e1d", "--case", "64x8", "--precision", "fp32", "--quick"]
    step.main([*toy, *flags, "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    times = {r["implementation"]: r for r in records if r["metric"] == "time"}
    assert set(times) == {"floor", *names}
    assert times["ls_train"]["case"] == {"arch": "transformer_toy_1e1d", "tokens": 64, "length": 8, "precision": "fp32"}
    ratio = times["torch_eager"]["value"] / times["ls_train"]["value"]
    assert times["ls_train"]["ratios"]["torch_eager"] == pytest.approx(ratio)
    shares = {r["implementation"]: r["value"] for r in records if r["metric"] == "percent_of_floor"}
    assert shares["ls_train"] == pytest.approx(100 * times["floor"]["value"] / times["ls_train"]["value"])


@pytest.mark.timeout(400)
def test_layer(forked_python, tmp_path) -> None:
    output = tmp_path / "layer.json"
    sizes = "--arch transformer_toy_1e1d --length 8 --tokens 64 --tokens 20 --precision fp32 --quick"
    names = "--implementation ls_train --implementation ls_train_graph --implementation torch_eager"
    layer.main([*sizes.split(), *names.split(), "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    times = {
        (r["case"]["layer"], r["case"]["tokens"], r["implementation"]): r for r in records if r["metric"] == "time"
    }
    assert len(times) == 2 * 2 * 4
    assert times["decoder", 16, "ls_train_graph"]["case"]["length"] == 8
    assert times["decoder", 16, "ls_train_graph"]["ratios"].keys() == {"floor", "torch_eager"}
    hosts = [r for r in records if r["metric"] == "host_time"]
    assert [r["implementation"] for r in hosts] == ["ls_train", "torch_eager"] * 4
    assert all(r["value"] > 0 and r["ratios"].keys() <= {"torch_eager"} for r in hosts)
    table = report.layer_table(records)
    assert table.startswith("| ms forward + backward (host's time to issue them) |")
    first = next(r["value"] for r in records if r["metric"] == "time" and r["implementation"] == "ls_train")
    assert f"{first:.2f} ({hosts[0]['value']:.2f})" in table


def test_layers_without_host_times_have_a_table_too() -> None:
    records = layer.records_of({"layer": "encoder", "tokens": 4096, "length": 32}, {"floor": 0.5, "ls_train": 1.0})
    head, _, row = report.layer_table(records).splitlines()
    assert head == "| ms forward + backward | reference floor | ls_train | % of floor |"
    assert "| 0.50 | 1.00 | 50 |" in row


def test_host_time_is_that_of_the_calls_alone(monkeypatch) -> None:
    """Clearing gradients is not in it, nor is the warm-up."""
    clock, durations = [0.0], iter([9.0, 9.0, 0.003, 0.001, 0.002])

    def pass_by(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(layer_process.time, "perf_counter", lambda: clock[0])
    calls = layer_process.Calls(lambda: pass_by(5.0), lambda: pass_by(next(durations)))
    assert layer_process.host_ms(calls, 3, 2) == pytest.approx(2.0)


def test_a_layer_of_the_benchmark_takes_keys_and_values_as_in_a_model() -> None:
    """In one product and without copies of gradients, for a row of decoder layers and for the first alone."""
    shape = SHAPES["transformer_toy_1e1d"]
    ours = layer_process.Ours("decoder", shape, torch.float32, "cpu", 3)
    for count in (1, 3):
        ours.calls(16, 8, count).step()
        attentions = [made.encoder_attn for made in ours._layers[:count]]
        for kind, size in (
            ("weight", (2 * count * shape.embed_dim, shape.embed_dim)),
            ("bias", (2 * count * shape.embed_dim,)),
        ):
            parameters = [getattr(p, kind) for attention in attentions for p in (attention.k_proj, attention.v_proj)]
            assert joined(parameters).shape == size
            assert joined([parameter.grad for parameter in parameters]).shape == size


def test_graphs_are_compared_with_graphs() -> None:
    times = {name: (float(number + 1), 1.0) for number, name in enumerate(step.IMPLEMENTATIONS)}
    records = step.records_of({"arch": "a", "tokens": 10, "length": 5}, times, Floor(0.4, 0.1, 0.25), 1.0)
    ratios = {r["implementation"]: r["ratios"] for r in records if r["metric"] == "time"}
    peers = {"torch_eager", "torch_compile", "floor"}
    assert ratios["ls_train"].keys() == peers
    assert ratios["ls_train_graph"].keys() == peers | {"torch_compile_graph"}
    assert ratios["ls_train_graph"]["torch_compile_graph"] == pytest.approx(5 / 2)
    assert ratios["torch_eager"] == {}


def test_flops_of_a_step_count_every_product() -> None:
    shape = SHAPES["transformer_toy_1e1d"]
    weights = shape.parameters - sum(size for size in (3 * 4 * 32, 2 * (64 + 32), 5 * 2 * 32))  # biases and norms
    attention = 2 * 2 * 64 * 8 * 32 * 2.5
    assert shape.flops(64, 8) == pytest.approx(3 * (2 * 64 * weights + attention))


def test_appending_replaces_the_records_of_the_same_case_only(tmp_path) -> None:
    path = tmp_path / "records.json"

    def record(tokens: int, value: float) -> dict:
        return {"bench": "step", "case": {"tokens": tokens}, "value": value}

    write_records([record(1, 1.0), record(2, 2.0)], path)
    write_records([record(2, 3.0)], path, append=True)
    assert [(r["case"]["tokens"], r["value"]) for r in json.loads(path.read_text())] == [(1, 1.0), (2, 3.0)]


def test_a_waiting_process_goes_on_when_told_to() -> None:
    program = "from benchmarks.processes import wait_for_go; wait_for_go(); print('went on')"
    with Prepared(["-c", program]) as process:
        process.wait_ready(60)
        assert "went on" not in process.output
        process.go()
        assert "went on" in process.finish(60)
    with Prepared(["-c", "raise SystemExit('broken')"]) as process, pytest.raises(RuntimeError, match="broken"):
        process.wait_ready(60)


def trace_event(name: str, category: str, start: float, duration: float, correlation: int = 0) -> dict:
    event = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "tid": 1}
    return {**event, "args": {"correlation": correlation}} if correlation else event


def write_trace(path: Path, events: list[dict]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_kernels_belong_to_the_phase_that_launched_them(tmp_path) -> None:
    step_names = ("ls_train.benchmark.step", "ls_train.benchmark.backward")
    events = [trace_event(step_names[0], "user_annotation", 100 * i, 60) for i in range(2)]
    events += [trace_event(step_names[1], "user_annotation", 20, 20)]
    for number, (launch, start, duration) in enumerate(((10, 50, 10), (30, 55, 10), (50, 80, 5), (110, 130, 5)), 1):
        events.append(trace_event("cudaLaunchKernel", "cuda_runtime", launch, 1, number))
        events.append(trace_event(f"k{number}", "kernel", start, duration, number))
    first, second = trace.read(write_trace(tmp_path / "t.json.gz", events))
    assert [(k.name, k.start, k.phase) for k in first.kernels] == [
        ("k1", 0, "forward"),
        ("k2", 5, "backward"),
        ("k3", 30, "update"),
    ]
    assert (first.period, first.gaps) == (80, 80 - 15 - 5)
    assert [k.name for k in second.kernels] == ["k4"]


def test_kernels_of_a_graph_are_told_apart_by_name(tmp_path) -> None:
    events = [trace_event("ls_train.benchmark.step", "user_annotation", 0, 60)]
    events += [trace_event("cudaMemcpyAsync", "cuda_runtime", 5, 1, 1), trace_event("copy", "gpu_memcpy", 6, 1, 1)]
    events += [trace_event("cudaGraphLaunch", "cuda_runtime", 10, 1, 2)]
    names = ("attention_fwd_kernel", "cross_entropy_inplace_kernel", "attention_bwd_kernel", "adam_kernel")
    events += [trace_event(name, "kernel", 20 + i, 1, 2) for i, name in enumerate(names)]
    (only,) = trace.read(write_trace(tmp_path / "t.json.gz", events))
    assert [k.phase for k in only.kernels] == ["forward", "forward", "forward", "backward", "update"]


@pytest.mark.timeout(400)
def test_profile(tmp_path) -> None:
    output = tmp_path / "profile.json"
    profile_step.main(f"--arch transformer_toy_1e1d --case 64x8 --precision fp32 --output {output}".split())
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    groups = {r["case"]["group"] for r in records if "group" in r["case"]}
    assert {"embedding", "update"} <= groups
    launches = [r["value"] for r in records if r["metric"] == "launches" and r["implementation"] == "ls_train"]
    whole = [r["value"] for r in records if r["metric"] == "launches" and "group" not in r["case"]]
    assert sum(launches) == 3 * whole[0], "by group, by kernel and as a whole"
    assert report.profile_table(records).count("|") > 10


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void (anonymous namespace)::attention_fwd_kernel<__half>(Args)", "attention"),
        ("void layer_norm_bwd_kernel<__half, 8>(NormBackward)", "layer norm + dropout + residual"),
        ("bias_activation_dropout_fwd_kernel", "activation + dropout"),
        ("cross_entropy_inplace_kernel", "output projection: loss"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_TNT", "GEMM"),
        ("adam_prepare_kernel", "update"),
        ("Memset (Device)", "other: sums, copies, fills"),
    ],
)
def test_groups_of_kernels(name, group) -> None:
    assert profile_step.group_of(name) == group


@needs_fairseq
@pytest.mark.timeout(400)
def test_timeline(imported_fairseq, forked_python, tmp_path) -> None:
    output = tmp_path / "timeline.json"
    sizes = "--arch transformer_toy --max-tokens 256 --precision fp32 --warm-up 1 --sentences 200 --vocabulary 101"
    timeline.main([*sizes.split(), "--implementation", "ls_train", "--traces", str(tmp_path), "--output", str(output)])
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    figures = {record["metric"]: record["value"] for record in records}
    assert min(figures[f"{phase}_busy"] for phase in trace.PHASES) > 0
    assert figures["launches"] > 10
    timeline.main(["--traces", str(tmp_path), "--plot", str(tmp_path / "timeline.png")])
    assert (tmp_path / "timeline.png").stat().st_size > 0


def curve_records(name: str, losses: list[float], bleus: list[float]) -> list[dict]:
    records = []
    for seed, (loss, bleu) in enumerate(zip(losses, bleus)):
        case = {"arch": "a", "max_tokens": 1, "updates": 20, "precision": "fp16", "seed": seed}
        records += curves_summary.run_records(case, name, [(10, 9.0), (20, loss)], bleu)
    return records


def test_curves_summary_applies_the_rule() -> None:
    records = curve_records(curves_summary.PEER, [4.0, 4.0], [20.0, 20.0])
    records += curve_records("ls_train", [4.01, 4.01], [20.4, 20.4])
    records += curve_records("ls_train_graph", [4.0, 4.2], [20.0, 22.0])
    figures = {(r["implementation"], r["metric"]): r["value"] for r in curves_summary.summary(records)}
    assert figures["ls_train", "valid_loss_difference"] == pytest.approx(0.25)
    assert figures["ls_train", "valid_loss_within"] == 1
    assert figures["ls_train", "bleu_allowed"] == pytest.approx(0.3)
    assert figures["ls_train", "bleu_within"] == 0
    assert figures["ls_train_graph", "valid_loss_allowed"] == pytest.approx(5.0)
    assert figures["ls_train_graph", "bleu_within"] == 1


@needs_fairseq
@pytest.mark.timeout(600)
def test_curves(imported_fairseq, forked_python, tmp_path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    handbook = Path(__file__).resolve().parent.parent / "examples" / "wmt14" / "data" / "handbook"
    for split, count in (("train", 200), ("valid", 10), ("test", 10)):
        for language in ("en", "de"):
            lines = (handbook / f"{split}.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
            (corpus / f"{split}.{language}").write_text("".join(lines[:count]), encoding="utf-8")
    output = tmp_path / "curves.json"
    flags = (
        f"--corpus {corpus} --data {tmp_path}/bin --work {tmp_path}/work --pieces 300 --arch transformer_toy "
        f"--updates 8 --max-tokens 600 --precision fp32 --seeds 1 --jobs 2 --implementation ls_train "
        f"--implementation {curves_summary.PEER} --output {output}"
    ).split()
    curves.main(flags)
    records = json.loads(output.read_text())
    assert all(record.keys() == KEYS | WHERE for record in records)
    figures = {(r["implementation"], r["metric"]): r["value"] for r in records}
    assert figures["ls_train", "valid_loss_within"] == 1
    assert 0 <= figures["ls_train", "bleu_mean"] < 100
    # Without time the records of what is there are written all the same.
    first = output.read_text()
    curves.main([*flags, "--time-limit", "0"])
    assert json.loads(output.read_text()) == json.loads(first)
    curves.main(["--output", str(output), "--plot", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_pages_are_current(page) -> None:
    text = page.read_text()
    assert "<!-- results " in text
    assert report.updated(text, page) == text, "run python -m benchmarks.report"


def test_a_page_without_record_says_how_to_make_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "No record yet: `python -m benchmarks.layer`" in report.block("layer", "images")
    with pytest.raises(ValueError, match="'speed'"):
        report.block("speed", "images")


def test_tables_hold_the_values_of_the_records() -> None:
    place = {"machine": "card", "versions": {"torch": "2"}, "source_hash": "abc"}
    case = {"arch": "transformer_big_6e6d", "max_tokens": 512, "precision": "fp16"}
    figures = {"words_per_second": 1234.0, "time": 56.78, "peak_memory": 9.0}
    slow = {**figures, "words_per_second": 617.0}
    records = fairseq_wps.records_of(case, {"ls_train": figures, "fairseq_no_cudnn_attention": slow})
    table = report.wps_table([{**record, **place} for record in records])
    assert "1,234 (56.8), **2.0 x**" in table
    assert "617 (56.8)" in table
    losses = curve_records(curves_summary.PEER, [4.0, 4.0], [20.0, 20.0])
    losses += curve_records("ls_train", [4.01, 4.01], [20.4, 20.4])
    table = report.curves_table([*losses, *curves_summary.summary(losses)])
    assert "4.010 ± 0.000 (2) | +0.25 % (allowed 0.50 %) | 20.400 ± 0.000 (2) | +0.40 (allowed 0.30)" in table


def test_pictures_are_drawn_from_records(tmp_path) -> None:
    case = {"arch": "transformer_big_6e6d", "max_tokens": 512, "precision": "fp16"}
    figures = {"words_per_second": 1234.0, "time": 56.78, "peak_memory": 9.0}
    report.plot_words(fairseq_wps.records_of(case, {"ls_train": figures}), tmp_path / "words.png")
    assert (tmp_path / "words.png").stat().st_size > 0
