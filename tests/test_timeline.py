"""What the time line records."""

from __future__ import annotations

import pytest

from benchmarks import timeline
from benchmarks.fairseq_process import IMPLEMENTATIONS
from benchmarks.fairseq_wps import warm_up_updates


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_recorded_updates_fall_on_no_log_interval(implementation: str, tmp_path) -> None:
    """There a step waits for its own statistics, which no other does."""
    case = {"arch": "transformer_toy", "max_tokens": 256, "precision": "fp32"}
    skipped = warm_up_updates(implementation)
    words = timeline.flags_of(implementation, tmp_path, case, skipped)
    interval, last = (int(words[words.index(flag) + 1]) for flag in ("--log-interval", "--max-update"))
    assert last - skipped >= 3, "the second of three makes the record"
    assert not any(update % interval == 0 for update in range(skipped + 1, last))
