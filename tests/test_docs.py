"""README.md, CONTRIBUTING.md and docs/: their code runs, and what they name exists.

A page's ```python blocks run in order in one namespace, on a CPU. They find a `model`, a
`tokenizer`, `inputs` and a `dataset` there, and names of the hub lead to a tiny checkpoint. A block
that cannot run says why behind the word python: `no-run: needs 8 GPUs`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import re
import shlex
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedTokenizerFast,
)

import moe_patch
from moe_patch.__main__ import COMMANDS
from moe_patch.shapes import Shape, build_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
FOLDERS = ("moe_patch", "models", "tests", "examples", "docs")
every_page = pytest.mark.parametrize("page", PAGES)


class Block(NamedTuple):
    """A fenced block of Python."""

    line: int  # of its first line of code
    reason: str  # why it does not run, "" where it does
    code: str


def blocks(page: str) -> Iterator[Block]:
    fence = re.compile(r"^( *)```python *(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
    for found in fence.finditer(PAGES[page]):
        line = PAGES[page][: found.start(3)].count("\n") + 1
        yield Block(line, found[2], textwrap.dedent(found[3]))


def plain(page: str) -> str:
    """The page without its fenced blocks; their lines are empty."""
    return re.sub(
        r"^( *)```.*\n(?:.*\n)*?\1```$", lambda m: "\n" * m[0].count("\n"), PAGES[page], flags=re.M
    )


# Code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A folder with a tiny Qwen3-MoE and its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = Shape("qwen3_moe", 64, 64, 4, 2, std=0.15)  # a group of nf4 wide
    build_model(shape, layers=1, vocab_size=64).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reports() -> list[moe_patch.parity.ParityReport]:
    """What check_parity found of the model."""
    return []


@pytest.fixture
def namespace(checkpoint, reports, monkeypatch, tmp_path) -> dict[str, object]:
    """What a page's first block finds. Models are small and in float32, parity and generation
    short."""

    def small(load, name, **options):
        here = not str(name).startswith("/") and not Path(name).exists()
        options = {k: v for k, v in options.items() if k not in ("dtype", "device_map")}
        return load(checkpoint if here else name, **options)

    def judged(*args, **options):
        signature.bind(*args, **options)
        if not reports:  # once: every page has the same model
            reports.append(check(*args, **{"tokens": 16, "backward": False} | options))
        return reports[0]

    def short(self, *args, generate=GenerationMixin.generate, **options):
        return generate(self, *args, **options | {"max_new_tokens": 2})

    monkeypatch.chdir(tmp_path)
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        load = functools.partial(small, auto.from_pretrained)
        monkeypatch.setattr(auto, "from_pretrained", load)
    check = moe_patch.check_parity
    signature = inspect.signature(check)
    monkeypatch.setattr(moe_patch, "check_parity", judged)
    monkeypatch.setattr(GenerationMixin, "generate", short)
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    row = {"input_ids": list(range(6)), "labels": list(range(6))}
    return {
        "__name__": "__main__",
        "model": AutoModelForCausalLM.from_pretrained("tiny"),
        "tokenizer": tokenizer,
        "inputs": tokenizer("w5 w6 w7", return_tensors="pt"),
        "dataset": [row] * 4,
    }


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the pages' models are on the CPU"
)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not block.reason for block in blocks(page))]
)
def test_python_runs(page, namespace):
    ran = []
    with warnings.catch_warnings():  # a page may set filters
        for block in blocks(page):
            code = compile("\n" * (block.line - 1) + block.code, str(ROOT / page), "exec")
            if not block.reason:
                exec(code, namespace)
                ran.append(block)
    assert ran


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))])
def test_python_that_does_not_run_names_what_exists(page):
    for block in blocks(page):
        assert not block.reason or re.fullmatch(r"no-run: \w.+", block.reason), block
        if block.reason:
            for module, name in imported(ast.parse(block.code)):
                found = importlib.import_module(module)
                missing = name and not hasattr(found, name) and not _is_module(module, name)
                assert not missing, f"{page}:{block.line}: {module} has no {name}"


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of what the code takes from moe_patch; `.` is models/."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            path = (["moe_patch", "models"] if node.level else [])[: 3 - node.level]
            module = ".".join([*path, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names if "moe_patch" in module)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if "moe_patch" in alias.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "moe_patch":
            yield "moe_patch", node.attr


def _is_module(package: str, name: str) -> bool:
    return importlib.util.find_spec(f"{package}.{name}") is not None


COMMAND = re.compile(
    r"(?:-m moe_patch |(?:`|; )(?=bench --))((?:env|parity|bench|tune)\b[^`#;>\n]*)"
)


def commands(page: str) -> list[str]:
    """Arguments of every `python -m moe_patch`, which benchmarks/ shortens to `bench`."""
    return [found[1].rstrip("., ") for found in COMMAND.finditer(plain(page))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_parse(page):
    for command in commands(page):
        try:
            name, *arguments = shlex.split(command)
            COMMANDS[name].parse(arguments)
        except Exception as error:
            pytest.fail(f"{page}: python -m moe_patch {command}: {error}")


# Names


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", plain(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            text = file.read_text(encoding="utf-8")
            assert anchor in anchors(text), f"{page} links to {target}: no such heading"


def anchors(text: str) -> set[str]:
    """GitHub's, of every heading."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PATH = re.compile(
    r"(?<![\w./-])(?:moe_patch|models|tests|examples|docs|\.ci|\.github)/[\w./<>*-]*\w"
)
FILE = re.compile(r"(?<=`)[\w./]+\.(?:py|json|csv|txt|c)(?=`)")


@every_page
def test_paths_exist(page):
    for number, line in enumerate(PAGES[page].splitlines(), 1):
        folder = None
        for path in PATH.findall(line):
            if not set("<>*") & set(path):
                assert (ROOT / path).exists(), f"{page}:{number} names {path}"
                folder = (ROOT / path).parent
        for name in FILE.findall(line):  # in the folder that the line named, or else anywhere
            if name.split("/")[0] not in FOLDERS and name not in ("tiles.json", "config.json"):
                inside = [*folder.rglob(name)] if folder else []
                inside = inside or [f for each in FOLDERS for f in (ROOT / each).rglob(name)]
                assert inside or (ROOT / name).exists(), f"{page}:{number} names {name}"


@every_page
def test_names_are_in_the_files_said_to_hold_them(page):
    """`RULES` in `moe_patch/...`, or | `RULES` in `moe_patch/...` |."""
    for name, path in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", PAGES[page]):
        text = (ROOT / path).read_text(encoding="utf-8")
        found = re.search(rf"^(?:def |class )?{name}\b", text, re.MULTILINE)
        assert found, f"{page}: {path} defines no {name}"


def test_where_to_change_names_one_file_each():
    page = PAGES["docs/README.md"].split("## Where to change")[1].split("\n\n")[1]
    rows = [line.split("|")[1:4] for line in page.splitlines()[2:]]
    assert [what.strip() for what, _, _ in rows] == [
        "a router's rule",
        "the SwiGLU epilogue",
        "a tile for a new card",
        "what `check_parity` compares",
    ]
    for _, file, _ in rows:
        assert len(PATH.findall(file)) == 1, file


# Form


def test_readme_is_short_and_its_first_screen_whole():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 200
    screen = "\n".join(lines[:40])
    wanted = ("training", "prefill", "decoding", "H200", "**Needs**", "pip install", "```python")
    for word in (*wanted, "check_parity", "make parity"):
        assert word in screen, f"{word} is not on the first screen"


@every_page
def test_lines_break_at_100_columns(page):
    text = plain(page)
    if page == "docs/hf_suites.md":  # a script writes what follows
        text = text.split("\n## ")[0]
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 100 or line.startswith("|"), f"{page}:{number}: {len(line)} columns"
