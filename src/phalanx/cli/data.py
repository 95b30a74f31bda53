"""Build token files from text, or read a pair of them from end to end and say what it holds. Exit codes: 0 done, 1 the
model does not have all tokens, 2 wrong input."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from phalanx.cli.inputs import count_of
from phalanx.errors import CheckFailed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx data build` and `phalanx data inspect`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|inspect")
    what = "text, JSON lines, Parquet or Arrow to token files"
    build = actions.add_parser("build", help=what, description=what)
    inputs = 'files, folders, globs in quotes ("books/**/*.txt"), or python-stdlib'
    build.add_argument("inputs", metavar="INPUT", nargs="+", help=inputs)
    tokens = build.add_mutually_exclusive_group(required=True)
    forms = "tokenizer.json, SentencePiece .model, GPT-2's vocab.json, a folder with one of them, or bytes"
    tokens.add_argument("--tokenizer", metavar="T", help=forms)
    tokens.add_argument("--vocab", type=int, metavar="N", help="train a byte-pair tokenizer of N ids (257 or more)")
    build.add_argument("--text-key", default="text", metavar="KEY", help="where records hold their text (text)")
    build.add_argument("--prompt-key", metavar="KEY", help="where they hold what comes before it and is not learned")
    build.add_argument("--end-token", metavar="TOKEN", help="what ends a document, if the tokenizer does not tell")
    build.add_argument("-o", "--out", type=Path, metavar="DIR", help="the folder to build (data/ and a name)")
    build.add_argument("--workers", type=count_of("processes"), metavar="N", help="processes (as many as cores)")
    what = "read a pair of token files from end to end"
    inspect = actions.add_parser("inspect", help=what, description=what)
    inspect.add_argument("prefix", type=Path, metavar="PREFIX", help="path of the pair, without .bin or .idx")
    inspect.add_argument("--config", type=Path, metavar="RUN", help="hold the ids against the model of a run file")
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Build or inspect."""
    return _build(arguments) if arguments.action == "build" else _inspect(arguments)


def _build(arguments: argparse.Namespace) -> int:
    from phalanx.data.build import build, default_name
    from phalanx.data.manifest import Wish

    wish = Wish(
        inputs=tuple(arguments.inputs),
        text_key=arguments.text_key,
        prompt_key=arguments.prompt_key,
        tokenizer=arguments.tokenizer,
        vocab=arguments.vocab,
        end_token=arguments.end_token,
    )
    prefix = build(wish, arguments.out or Path("data") / default_name(wish), num_workers=arguments.workers)
    sys.stdout.write(f"{prefix}\n")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from phalanx.data.summary import outside, summarize, told
    from phalanx.spec.load import load

    vocab = load(arguments.config, []).model.vocab if arguments.config else None
    summary = summarize(arguments.prefix)
    sys.stdout.write(json.dumps(asdict(summary), indent=1) + "\n" if arguments.json else told(summary, vocab))
    if vocab is not None and (wrong := outside(arguments.prefix, vocab)):
        raise CheckFailed(wrong)
    return 0
