"""`phalanx checkpoint export|import`: to and from Hugging Face folders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ACTIONS = ("export", "import")
DTYPES = {"fp32": "F32", "bf16": "BF16"}


def add_actions(actions: Any) -> None:
    """Options of both; `actions` is what argparse's `add_subparsers` returned."""
    what = "write a Hugging Face folder, which transformers loads"
    export = actions.add_parser("export", help=what, description=what)
    export.add_argument("path", type=Path, help="a run folder (its newest checkpoint), or one checkpoint")
    export.add_argument("-o", dest="target", type=Path, required=True, metavar="FOLDER", help="a new folder")
    export.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of the weights (fp32, as they are kept)")
    what = "write a checkpoint of step 0 with a Hugging Face folder's weights"
    imported = actions.add_parser("import", help=what, description=what)
    imported.add_argument("path", type=Path, help="a folder with config.json and safetensors")
    imported.add_argument("-o", dest="target", type=Path, required=True, metavar="FOLDER", help="a new folder")


def run(arguments: argparse.Namespace) -> int:
    """Export or import; returns the exit code."""
    from phalanx.checkpoint.hf import export, to_checkpoint
    from phalanx.checkpoint.weights import open_weights
    from phalanx.units import format_bytes

    weights = open_weights(arguments.path)
    if arguments.action == "export":
        num_bytes = export(weights, arguments.target, dtype=DTYPES[arguments.dtype])
    else:
        num_bytes = to_checkpoint(weights, arguments.target)
    sys.stdout.write(f"{arguments.target}: {format_bytes(num_bytes)}, from {weights.path}\n")
    return 0
