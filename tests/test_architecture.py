"""The shape of the house: who imports whom, what is public, how large files may be, who may load torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.spec.document import parse

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "phalanx").rglob("*.py"))
TORCH_FREE = ["spec", "plan", "planner", "launch", "data", "watch", "studies", "cli"]


def test_imports_go_downward():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


PUBLIC = [
    "Blocks",
    "Buffer",
    "CheckFailed",
    "CheckpointSpec",
    "ClusterSpec",
    "Coord",
    "InputError",
    "JobSpec",
    "Layout",
    "Message",
    "ModelSpec",
    "ModulePlan",
    "OptimizerSpec",
    "PhalanxError",
    "Plan",
    "Prediction",
    "Problem",
    "RunDir",
    "RunError",
    "Schedule",
    "TokenDataset",
    "Trainer",
    "__version__",
    "groups",
    "load",
    "module_weights",
    "plan_for",
    "predict",
    "prepare",
    "rank_buffers",
    "schedule",
    "search",
    "start",
    "traffic",
    "verify",
    "verify_module",
]


def test_public_names_are_listed():
    """Whoever adds or removes a public name says so here."""
    assert sorted(PUBLIC) == phalanx.__all__ == dir(phalanx)
    assert all(getattr(phalanx, name) for name in PUBLIC)


def test_type_checkers_and_readers_see_the_same_public_names():
    stub = (ROOT / "src" / "phalanx" / "__init__.pyi").read_text(encoding="utf-8")
    typed = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
    assert {name for _, name in typed} == {*PUBLIC, "nn"} - {"__version__"}
    assert all(getattr(phalanx, name).__module__ == home for home, name in typed if home != "phalanx")
    assert all(name in (phalanx.__doc__ or "") for name in PUBLIC if not name.startswith("_"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_files_stay_small(path: Path):
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = 150 if path.name == "loop.py" else 399
    assert num_lines <= limit, f"{num_lines} lines of {limit}: split it by purpose"


def torch_free_modules() -> list[str]:
    modules = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in SOURCES]
    chosen = [module for module in modules if module.split(".")[1] in TORCH_FREE]
    return [module.removesuffix(".__init__") for module in chosen]


def test_deciding_loads_no_torch():
    modules = torch_free_modules()
    program = (
        f"import sys, importlib\nfor m in {modules}: importlib.import_module(m); assert 'torch' not in sys.modules, m"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_what_lies_beside_the_code_is_installed_with_it():
    package = ROOT / "src" / "phalanx"
    patterns = parse((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["phalanx"]
    beside = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert beside == {path for pattern in patterns for path in package.glob(pattern)}


def test_every_dependency_is_pinned():
    # pyproject.toml says what we need, constraints.txt which release of it is installed.
    def names(text: str) -> set[str]:
        return {
            name.lower().replace("_", "-") for name in re.findall(r"^\s*\"?([A-Za-z][\w-]*)[=>]=\d", text, re.MULTILINE)
        }

    needed = names((ROOT / "pyproject.toml").read_text())
    assert {"torch", "numpy", "pytest"} <= needed
    assert needed <= names((ROOT / "constraints.txt").read_text())
