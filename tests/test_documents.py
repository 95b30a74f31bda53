"""The documents tell the truth: their links lead somewhere, and the commands they show can be parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli.commands import COMMANDS
from phalanx.cli.main import parser_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as the usual hosts of markdown make them."""
    headings = re.findall(r"^#+\s+(.*)$", FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path):
    for link in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}: no such heading"


def console_commands(document: Path) -> list[list[str]]:
    """The words of the `phalanx` commands in a document's console blocks."""
    blocks = re.findall(r"^```console\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("phalanx ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_understood(document: Path):
    for _, name, *arguments in console_commands(document):
        assert name in COMMANDS
        parser_of(name).parse(arguments)


def test_the_readme_shows_commands():
    assert console_commands(ROOT / "README.md")


def test_the_tour_names_what_there_is():
    source = ROOT / "src" / "phalanx"
    packages = {path.name for path in source.iterdir() if path.is_dir()}
    found = re.findall(r"`(\w+)\.(\w+)(?:\.(\w+))?`", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"))
    named = [names for names in found if names[0] in packages and names[1] != "json"]
    assert len(named) > 15
    for package, module, name in named:
        text = (source / package / f"{module}.py").read_text(encoding="utf-8")
        assert not name or re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), f"{package}.{module}.{name}"
