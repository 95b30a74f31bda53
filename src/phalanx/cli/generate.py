"""Continue a text: `phalanx generate runs/demo-… "def main("`. Takes the newest checkpoint of a run folder, one
checkpoint, or a Hugging Face folder, of any layout. One process computes, in fp32; more share a model that is too large
for one."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.inputs import count_of, remark
from phalanx.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx generate`."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="run folder, checkpoint, or Hugging Face")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    what = "longest continuation (64)"
    parser.add_argument("--max-tokens", type=count_of("tokens"), default=64, metavar="N", help=what)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (0); 1 draws as trained",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (0: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest tokens that together have probability P (1: all)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the draws (1)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json or another, where none is found by itself")
    what = "processes that share each layer (1)"
    parser.add_argument("--tensor", type=count_of("processes"), default=1, metavar="N", help=what)
    what = "stages that share the layers among them (1)"
    parser.add_argument("--pipeline", type=count_of("stages"), default=1, metavar="N", help=what)


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and, token by token, what follows."""
    _check(arguments)
    from phalanx.checkpoint.hf_settings import end_tokens, tokenizer_folder
    from phalanx.checkpoint.weights import open_weights
    from phalanx.data.tokenizer import find_tokenizer, read_tokenizer
    from phalanx.studies.generate import generate
    from phalanx.trainer.text import Request

    weights = open_weights(arguments.checkpoint, say=remark)
    name = arguments.tokenizer or tokenizer_folder(weights.folders)
    if name is None:
        looked = ", ".join(str(folder) for folder in weights.folders)
        raise InputError("there is no tokenizer", where=looked, instead="--tokenizer FILE")
    path = find_tokenizer(str(name))
    ids = read_tokenizer(path).encode(arguments.prompt).ids
    ends = tuple(end_tokens(weights.folders))
    request = Request(
        path=str(weights.path.absolute()),
        tokenizer=str(path.absolute()) if path else str(name),
        text=arguments.prompt,
        prompt=tuple(ids or ends[:1]),  # nothing is said yet: as at the start of a document
        ends=ends,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    generate(request, weights, arguments.tensor, arguments.pipeline)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.temperature < float("inf"):
        raise InputError(f"{arguments.temperature:g}", where="--temperature", instead="0 or more")
    if arguments.top_k < 0 or (arguments.top_k and not arguments.temperature):
        instead = "a positive number, with --temperature: at temperature 0 the likeliest token is taken"
        raise InputError(f"{arguments.top_k}", where="--top-k", instead=instead)
    if not 0 < arguments.top_p <= 1 or (arguments.top_p < 1 and not arguments.temperature):
        instead = "above 0 and at most 1, with --temperature: at temperature 0 the likeliest token is taken"
        raise InputError(f"{arguments.top_p:g}", where="--top-p", instead=instead)
    if not 0 <= arguments.seed < 2**63:
        raise InputError(f"{arguments.seed}", where="--seed", instead="0 or more, below 2^63")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError as error:  # bytes that Python carries along, though they are no text
        raise InputError(f"is not UTF-8 text: {error.object[error.start : error.end]!a}", where="PROMPT") from None
