"""`phalanx plan` on terminals of several widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main

RUN = Path(__file__).parents[3] / "examples" / "gpt-20b-256-a100.toml"


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Numbers are never broken; the layout follows them on their line where there is room, else on the next."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plan", str(RUN), "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    first = next(number for number, line in enumerate(lines) if line.startswith("1 "))
    assert lines[first].count("%") == 3
    assert "tensor" in lines[first if width == 200 else first + 1]
    assert any(line.startswith("  -  all 100,000 steps take") for line in lines)
