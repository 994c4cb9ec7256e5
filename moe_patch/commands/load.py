"""python -m moe_patch load: which experts the tokens of a text go to, in a local checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from .. import checkpoint, kernels, output
from ..patcher import patch
from ..routing.load import ExpertLoad, expert_load
from ..routing.picture import figure
from ..usage import Parser, add_json, positive, refused
from . import running
from .running import PROG, Command

HELP = "count which experts the tokens of a text go to"
ABOUT = (
    "Runs a local checkpoint over a text file and prints, for each MoE layer, how evenly its "
    "experts are used: the busiest expert's choices over the mean, the entropy over its maximum, "
    "and experts that were never chosen."
)

_TOKENIZERS = ("tokenizer*", "vocab*", "*.tiktoken")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Which checkpoint and text, how much of it, and where the results go."""
    parser = Parser(f"{PROG} load", description=ABOUT)
    flag = parser.add_argument
    flag("folder", help="a local checkpoint, with its tokenizer")
    flag("--text", required=True, metavar="FILE", help="UTF-8 text")
    flag("--tokens", type=positive, default=65536, metavar="N", help="at most; default: 65536")
    flag("--length", type=positive, default=2048, metavar="N", help="of a forward; default: 2048")
    flag("--png", metavar="FILE", help="draw layers by experts")
    add_json(flag)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Counts, prints, draws, writes."""
    refused(_check, options)
    device = running.device()
    with running.spinner() as progress:
        task = progress.add_task(f"loading {options.folder}")
        model, _ = refused(checkpoint.load, options.folder, device)
        chunks = refused(_chunks, options)
        if kernels.why_not(device) is None:
            patch(model, strict=False)
        progress.update(task, description="counting")
        load = refused(_count, model, chunks)
    tokens = sum(chunk.numel() for chunk in chunks)
    about = {"folder": options.folder, "text": options.text, "tokens": tokens} | load.to_dict()
    if options.json == "-":
        print(json.dumps(about, indent=2))
    else:
        output.show(load.table(), output.console(sys.stdout))
        print(f"{tokens} tokens of {options.text}")
    if options.png:
        figure(load, f"{Path(options.folder).name}, {tokens} tokens").savefig(options.png, dpi=120)
    if options.json and options.json != "-":
        Path(options.json).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError before anything is loaded."""
    if not Path(options.text).is_file():
        raise ValueError(f"--text {options.text!r} is no file: name a text in UTF-8")
    if options.png:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--png needs matplotlib, which the extra moe_patch[bench] installs")
        output.check_writable("--png", options.png)
    if options.json and options.json != "-":
        output.check_writable("--json", options.json)


def _chunks(options: argparse.Namespace) -> list[Tensor]:
    """The text as ids [1, length].

    Raises:
        ValueError: no UTF-8, no tokenizer, or nothing in it.
    """
    try:
        text = Path(options.text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {options.text!r} is no UTF-8: {error}") from error
    if not any(next(Path(options.folder).glob(name), None) for name in _TOKENIZERS):
        raise ValueError(f"{options.folder} has no tokenizer: save the model's there, too")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            options.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        first = str(error).partition("\n")[0][:200]
        raise ValueError(f"{options.folder} has a tokenizer that does not load: {first}") from error
    # of what is beyond the last token nothing is needed: no token has more characters
    ids = tokenizer(text[: 32 * options.tokens], return_tensors="pt").input_ids[0, : options.tokens]
    if not len(ids):
        raise ValueError(f"--text {options.text!r} has no tokens")
    return [chunk[None] for chunk in ids.split(options.length)]


@torch.no_grad()
def _count(model: nn.Module, chunks: Sequence[Tensor]) -> ExpertLoad:
    place = next(model.parameters()).device
    with expert_load(model) as load:
        for chunk in chunks:
            model(chunk.to(place), use_cache=False)
    return load


COMMAND = Command("load", HELP, parse, run)
