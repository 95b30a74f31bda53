"""`phalanx data`: build token files from text, or read a pair of them from end to end and say what it holds."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx data build` and `phalanx data inspect`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|inspect")
    build = actions.add_parser("build", help="text files to token files, with a tokenizer trained on them")
    build.add_argument(
        "text", metavar="TEXT", help='a glob of text files in quotes ("books/**/*.txt"), or python-stdlib'
    )
    build.add_argument("--vocab", type=int, required=True, metavar="N", help="size of the vocabulary, at least 257")
    build.add_argument("--where", type=Path, default=Path("data"), metavar="DIR", help="build in this folder (data)")
    inspect = actions.add_parser("inspect", help="read a pair of token files from end to end")
    inspect.add_argument("prefix", type=Path, metavar="PREFIX", help="path of the pair, without .bin or .idx")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Build or inspect."""
    return _build(arguments) if arguments.action == "build" else _inspect(arguments)


def _build(arguments: argparse.Namespace) -> int:
    from phalanx.data.build import ensure
    from phalanx.spec.job import DataSpec

    prefix = ensure(DataSpec(text=arguments.text), arguments.vocab, arguments.where)
    sys.stdout.write(f"{prefix}\n")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from phalanx.data.summary import summarize
    from phalanx.units import format_bytes

    summary = summarize(arguments.prefix)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(summary), indent=1) + "\n")
        return 0
    lines = [
        f"{summary.path}: {format_bytes(summary.num_bytes)}, {summary.dtype}",
        f"{summary.num_tokens:,} tokens with ids {summary.min_id:,} to {summary.max_id:,}",
        f"{summary.num_documents:,} documents of {summary.min_length:,} to {summary.max_length:,} tokens",
    ]
    if summary.vocab is not None:
        lines += [f"tokenizer of {summary.vocab:,} ids; the text begins:", "", summary.sample or ""]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
