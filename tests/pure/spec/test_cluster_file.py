"""A cluster that is written as TOML is the cluster that is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import SpecError
from phalanx.spec import clusters
from phalanx.spec.cluster_file import as_toml
from phalanx.spec.document import read
from phalanx.spec.schema import Checker


@pytest.mark.parametrize("name", ["laptop", "dgx-h100", "mi300x"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(as_toml(clusters.table(name)))
    check = Checker(read(path))
    assert clusters.build(check, check.document.table, ()) == clusters.named(name)


def test_odd_keys_and_texts_survive(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(as_toml({"a.b": 'say "no"\n', "list": [1, 2.5], "table": {"x": True, "inner": {"y": "é"}}}))
    assert read(path).table == {"a.b": 'say "no"\n', "list": [1, 2.5], "table": {"x": True, "inner": {"y": "é"}}}


def test_a_file_that_lacks_the_device_is_refused(tmp_path: Path) -> None:
    table = clusters.table("laptop")
    del table["device"]
    path = tmp_path / "cluster.toml"
    path.write_text(as_toml(table))
    check = Checker(read(path))
    with pytest.raises(SpecError, match="device"):
        clusters.build(check, check.document.table, ())
        check.finish()
