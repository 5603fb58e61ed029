"""What the curves of :mod:`benchmarks.curves` say: means over seeds, differences, whether these are within the rule.

The rule: the mean final validation losses of ls_train and fairseq differ by at most 0.5 % or two standard errors of the
difference, their mean BLEU by at most 0.3 or two standard errors. ls_train with graphs and without are compared by the
same rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEER = "fairseq_no_cudnn_attention"
EAGER, GRAPH = "ls_train", "ls_train_graph"
LOSS_PERCENT, BLEU_POINTS = 0.5, 0.3
_UNITS = {"valid_loss": "bits a token", "bleu": "BLEU"}


def run_records(case: dict[str, Any], name: str, curve: Sequence[tuple[int, float]], bleu: float | None) -> list[dict]:
    """Return the records of one run. case: arch, precision, max_tokens, updates and seed; curve: (update, loss)."""
    record = {"bench": "curves", "implementation": name, "ratios": {}}
    unit = _UNITS["valid_loss"]
    records = [
        {**record, "case": {**case, "update": update}, "metric": "valid_loss", "value": loss, "unit": unit}
        for update, loss in curve
    ]
    if bleu is not None:
        records.append({**record, "case": case, "metric": "bleu", "value": bleu, "unit": _UNITS["bleu"]})
    return records


def finals(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """Return the values of finished runs, one a seed, by (precision, implementation, metric)."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        case, metric = record["case"], record["metric"]
        if metric == "bleu" or (metric == "valid_loss" and case["update"] == case["updates"]):
            values.setdefault((case["precision"], record["implementation"], metric), []).append(record["value"])
    return values


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the summary's records: mean, standard error, and against fairseq difference, allowance, within (1 or 0).

    Those of ls_train with graphs against ls_train without are called ``eager_difference`` and so on. The loss differs
    in percent of the other's, BLEU in points. A single seed has no standard error.
    """
    values = finals(records)
    if not values:
        return []
    common = {name: records[0]["case"][name] for name in ("arch", "max_tokens", "updates")}
    found = []
    for (precision, name, metric), ours in values.items():
        case = {**common, "precision": precision, "seeds": len(ours)}
        figures = {"mean": (statistics.mean(ours), _UNITS[metric])}
        if len(ours) > 1:
            figures["standard_error"] = (_error(ours), _UNITS[metric])
        for peer, prefix in _peers(name).items():
            theirs = values.get((precision, peer, metric))
            if theirs:
                against = _against(metric, ours, theirs)
                figures.update({f"{prefix}{figure}": value for figure, value in against.items()})
        for figure, (value, unit) in figures.items():
            record = {"bench": "curves", "case": case, "implementation": name, "metric": f"{metric}_{figure}"}
            found.append({**record, "value": value, "unit": unit, "ratios": {}})
    return found


def _peers(name: str) -> dict[str, str]:
    """Return whom an implementation is compared with, and what the figures' names begin with."""
    return {} if name == PEER else {PEER: "", EAGER: "eager_"} if name == GRAPH else {PEER: ""}


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _against(metric: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, tuple[float, str]]:
    difference = statistics.mean(ours) - statistics.mean(theirs)
    two_errors = 2 * math.hypot(_error(ours), _error(theirs))
    smallest, unit = BLEU_POINTS, _UNITS["bleu"]
    if metric == "valid_loss":
        to_percent = 100 / statistics.mean(theirs)
        difference, two_errors, smallest, unit = difference * to_percent, two_errors * to_percent, LOSS_PERCENT, "%"
    allowed = max(smallest, two_errors)
    return {
        "difference": (difference, unit),
        "allowed": (allowed, unit),
        "within": (float(abs(difference) <= allowed), "1 is yes"),
    }


def plot(records: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw the validation losses over the updates, one panel a precision, one line a run, into the image ``output``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [record for record in records if record["metric"] == "valid_loss"]
    precisions = sorted({record["case"]["precision"] for record in losses}, reverse=True)
    names = sorted({record["implementation"] for record in losses})
    figure, panels = pyplot.subplots(1, len(precisions), figsize=(5.5 * len(precisions), 4), squeeze=False, sharey=True)
    for panel, precision in zip(panels[0], precisions):
        for number, name in enumerate(names):
            of_name = [r for r in losses if r["implementation"] == name and r["case"]["precision"] == precision]
            for position, seed in enumerate(sorted({record["case"]["seed"] for record in of_name})):
                points = sorted((r["case"]["update"], r["value"]) for r in of_name if r["case"]["seed"] == seed)
                label = name if position == 0 else None
                panel.plot(*zip(*points), color=f"C{number}", alpha=0.7, linewidth=1, label=label)
        panel.set(title=precision, xlabel="update")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0][0].set_ylabel("validation loss, bits a token")
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
