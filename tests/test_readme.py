"""Every block of README.md and docs/ runs or compiles; links, launchers and make targets exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "examples" / "wmt14" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", [block for block in BLOCKS if "define(" not in block.values[0]])
def test_python_block_runs(block):
    exec(compile(block, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("block", [block for block in BLOCKS if "define(" in block.values[0]])
def test_python_block_that_defines_an_operator_runs(block):
    # In a process of its own: an operator stays defined, and other tests look at all there are.
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.timeout(400)
def test_cuda_block_compiles(tmp_path):
    blocks = [block for page in PAGES for block in re.findall(r"^```cuda\n(.*?)^```", page.read_text(), re.M | re.S)]
    assert blocks
    for number, block in enumerate(blocks):
        source = tmp_path / f"block{number}.cu"
        source.write_text(block)
        csrc = ROOT / "ls_train" / "csrc"
        flags = ["-std=c++17", "--extended-lambda", "-arch=sm_90", "-Werror", "all-warnings", f"-I{csrc}"]
        command = ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "block.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_has_a_language_that_some_test_knows():
    # Without a language: shell commands, whose targets and launchers other tests know, and drawings.
    for page in PAGES:
        fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.M)
        assert set(fences[::2]) <= {"", "python", "cuda", "diff"}, page.name


def test_diff_shows_two_commands_that_differ_in_names_only():
    options = pytest.importorskip("fairseq.options")
    import fairseq_plugin  # noqa: F401

    (block,) = re.findall(r"^```diff\n(.*?)^```", PAGES[0].read_text(encoding="utf-8"), re.M | re.S)
    lines = block.replace("\\\n", "\n").splitlines()
    old, new = (shlex.split(" ".join(line[1:] for line in lines if line[0] in (sign, " "))) for sign in "-+")
    assert (old[0], new[0]) == ("fairseq-train", "lightseq-train")
    changed = [(mine, theirs) for mine, theirs in zip(new, old, strict=True) if mine != theirs]
    assert [mine for mine, _ in changed[1:]] == [f"ls_{theirs}" for _, theirs in changed[1:]]
    assert len(changed) == 4, "the first word and three names"
    parsed = [options.parse_args_and_arch(options.get_training_parser(), words[1:]) for words in (old, new)]
    assert [args.optimizer for args in parsed] == ["adam", "ls_adam"]
    assert parsed[0].lr == parsed[1].lr == [7e-4]


def test_launchers_exist():
    scripts = set(re.findall(r"^(lightseq-[a-z-]+) =", (ROOT / "pyproject.toml").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?<![\w/])lightseq-[a-z]+(?:-[a-z]+)*", page.read_text(encoding="utf-8")))
        assert named <= scripts, page.name


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        mentioned = set(re.findall(r"`?make (?:VENV= )?([a-z]+(?:-[a-z]+)*)(?=[ `])", page.read_text(encoding="utf-8")))
        assert mentioned <= targets, page.name
