"""The cases for compute-sanitizer run, call every operator and, on a GPU, launch every kernel of the library."""

from __future__ import annotations

import pytest
import torch

from ls_train import _library
from ls_train.testing import devices
from tests.build.test_compile import KERNELS
from tests.kernels import sanitize
from tests.operator_calls import OperatorCalls


@pytest.mark.parametrize("device", devices())
def test_every_operator_has_a_case(device: str) -> None:
    """On a GPU the operators that only the compiled library has too."""
    with OperatorCalls() as called:
        count = sanitize.run(sanitize.all_stems(), device, [torch.float32, torch.float16])  # 16 bits alone have plans
    assert called.names == set(_library.operator_names() if device == "cpu" else _library._schemas)
    assert count > 2 * len(called.names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_kernel_has_a_case() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sanitize.run(sanitize.all_stems(), "cuda", dtypes)
    launched = " ".join({event.key for event in profile.key_averages()})
    missing = {name for name in KERNELS if f"::{name}" not in launched}
    assert not missing, f"no case of tests.kernels.sanitize launches {missing}"


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["layernorm"])
    assert "unknown operator 'layernorm'; use some of adam," in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device is present"):
            sanitize.main([])
