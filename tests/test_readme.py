"""Every Python block of README.md and docs/ runs; links and make targets exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "wmt14" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block):
    exec(compile(block, "block", "exec"), {})


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        mentioned = set(re.findall(r"`?make (?:VENV= )?([a-z]+(?:-[a-z]+)*)(?=[ `])", page.read_text(encoding="utf-8")))
        assert mentioned <= targets, page.name
