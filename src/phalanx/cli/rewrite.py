"""`phalanx checkpoint export|import|average|reshard`: checkpoints and Hugging Face folders made into new ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from phalanx.cli.inputs import remark

ACTIONS = ("export", "import", "average", "reshard")
DTYPES = {"fp32": "F32", "bf16": "BF16"}

_WEIGHTS = "a run folder (its newest checkpoint), a checkpoint, or a Hugging Face folder"


def add_actions(actions: Any) -> None:
    """Options of all four; `actions` is what argparse's `add_subparsers` returned."""
    what = "write a Hugging Face folder, which transformers loads"
    export = actions.add_parser("export", help=what, description=what)
    export.add_argument("path", type=Path, help=_WEIGHTS)
    export.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of the weights (fp32, as they are kept)")
    what = "write a checkpoint of step 0 with a Hugging Face folder's weights"
    imported = actions.add_parser("import", help=what, description=what)
    imported.add_argument("path", type=Path, help="a folder with config.json and safetensors")
    what = "write a checkpoint of step 0 with the mean of the weights of several of one model"
    average = actions.add_parser("average", help=what, description=what)
    average.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=_WEIGHTS)
    what = "write a checkpoint once more, each tensor whole; any layout reads any checkpoint without that"
    reshard = actions.add_parser("reshard", help=what, description=what)
    reshard.add_argument("path", type=Path, help="a run folder (its newest checkpoint), or a checkpoint")
    for action in (export, imported, average, reshard):
        action.add_argument("-o", dest="target", type=Path, required=True, metavar="FOLDER", help="a new folder")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from phalanx.units import format_bytes

    num_bytes, source = _write(arguments)
    sys.stdout.write(f"{arguments.target}: {format_bytes(num_bytes)}, from {source}\n")
    return 0


def _write(arguments: argparse.Namespace) -> tuple[int, str]:
    """Write; returns the bytes of tensors, and from what they are."""
    from phalanx.checkpoint import hf, rewrite
    from phalanx.checkpoint.survey import locate
    from phalanx.checkpoint.weights import open_weights

    if arguments.action == "average":
        num_bytes = rewrite.average(arguments.paths, arguments.target, remark)
        return num_bytes, ", ".join(map(str, arguments.paths))
    if arguments.action == "reshard":
        path = locate(arguments.path)[0][1]
        return rewrite.reshard(path, arguments.target), str(path)
    weights = open_weights(arguments.path, say=remark)
    if arguments.action == "export":
        return hf.export(weights, arguments.target, dtype=DTYPES[arguments.dtype]), str(weights.path)
    return rewrite.to_checkpoint(weights, arguments.target), str(weights.path)
