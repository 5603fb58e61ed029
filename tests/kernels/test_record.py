"""The record of the GPU run in benchmarks/results/ is complete and of today's kernels."""

from __future__ import annotations

import json

import pytest

from benchmarks.records import RESULTS
from ls_train import build
from tests.kernels.test_operators import STEMS

RECORD = RESULTS / "kernel_tests.json"
TYPES = ("float32", "float16", "bfloat16")
REMEDY = f"run on a GPU: pytest tests/kernels --record {RECORD.relative_to(RESULTS.parents[1])}"


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> dict:
    if request.config.getoption("--record", default=None):
        pytest.skip("a new record is being written")
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("operator", STEMS)
def test_every_operator_passed_at_every_type(operator: str, dtype: str, record: dict) -> None:
    counts = record["operators"].get(operator, {}).get(dtype, {"passed": 0, "failed": 0})
    assert counts["passed"] > 0, f"{operator} at {dtype} is not in the record; {REMEDY}"
    assert counts["failed"] == 0


def test_nothing_failed(record: dict) -> None:
    assert record["failed"] == []
    assert record["machine"].startswith("NVIDIA"), record["machine"]


def test_record_is_of_the_present_kernels(record: dict) -> None:
    assert record["source_hash"] == build.source_hash(), f"the kernels have changed since they were recorded; {REMEDY}"
