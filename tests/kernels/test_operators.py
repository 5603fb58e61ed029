"""Every operator has a test file of its own name, and the tests there call it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ls_train.ops
from ls_train import _library

OPS = Path(ls_train.ops.__file__).parent
TESTS = Path(__file__).parent
STEMS = sorted(path.stem for path in OPS.glob("*.py") if not path.stem.startswith("_"))


def test_every_module_has_a_test_file() -> None:
    missing = [stem for stem in STEMS if not (TESTS / f"test_{stem}.py").exists()]
    assert not missing, f"no tests/kernels/test_<operator>.py for {missing}"


def test_every_module_offers_its_wrapper() -> None:
    missing = [stem for stem in STEMS if stem not in ls_train.ops.__all__ or not callable(getattr(ls_train.ops, stem))]
    assert not missing, f"ls_train.ops does not export {missing}"


@pytest.mark.parametrize("name", _library.operator_names())
def test_every_operator_is_defined_and_tested_under_its_stem(name: str) -> None:
    stems = [stem for stem in STEMS if name == stem or name.startswith(stem + "_")]
    assert stems, f"operator {name} belongs to no module of ls_train/ops"
    stem = max(stems, key=len)
    assert f'"{name}"' in (OPS / f"{stem}.py").read_text()
    test = (TESTS / f"test_{stem}.py").read_text()
    assert f'"{name}"' in test, f"tests/kernels/test_{stem}.py does not put {name} under the contract of leaf operators"


@pytest.mark.parametrize("name", _library.operator_names())
def test_schema_follows_the_conventions(name: str) -> None:
    """Outputs come first, then tensors, then numbers, and nothing is returned."""
    schema = getattr(torch.ops.ls_train, name).default._schema
    assert not schema.returns
    kinds = [
        0 if a.alias_info and a.alias_info.is_write else 1 if "Tensor" in str(a.type) else 2 for a in schema.arguments
    ]
    if name != "cross_entropy_inplace":
        assert kinds == sorted(kinds), [a.name for a in schema.arguments]
    assert kinds[0] == 0


def test_schema_that_returns_something_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operator bad: schema .* must end with '-> \(\)'"):
        _library.define("bad", "(Tensor x) -> Tensor")


def test_failed_load_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if _library._cuda_loaders is None:
        pytest.skip("the CUDA library is already loaded")
    build = pytest.importorskip("ls_train.build")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(build, "library_path", lambda: str(broken))
    for _ in range(2):
        with pytest.raises(OSError, match="broken.so"):
            _library.load_cuda_library()
    assert _library._cuda_loaders is not None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("ls_train::dropout_fwd", "CUDA")
