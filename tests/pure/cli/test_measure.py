"""`phalanx measure` refuses, before a process starts, what cannot end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.main import main


def test_no_process_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "cluster.toml"
    assert main(["measure", "--ranks", "0", "-o", str(output)]) == 2
    assert "--ranks: 0 processes" in capsys.readouterr().err
    assert not output.exists()


def test_where_the_file_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "-o", str(tmp_path / "none" / "cluster.toml")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_run_that_fails_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "cluster.toml"
    monkeypatch.setattr("phalanx.cli.measure.start_script", lambda ranks, command: 3)
    assert main(["measure", "--ranks", "2", "-o", str(output)]) == 3
    assert not output.exists()


def test_a_run_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "cluster.toml"
    output.touch()
    monkeypatch.setattr("phalanx.cli.measure.start_script", lambda ranks, command: 3)
    assert main(["measure", "--ranks", "2", "-o", str(output)]) == 3
    assert output.exists()
