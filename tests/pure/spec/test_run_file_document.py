"""docs/run-file.md lists the keys that there are, what is legal, and the defaults, as the code has them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from phalanx.spec.job import CheckpointSpec, DataSpec, JobSpec, OptimizerSpec
from phalanx.spec.load import TABLES, load
from phalanx.spec.schema import describe, shown, unit_of

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "run-file.md").read_text(encoding="utf-8")
ROWS = {
    table: dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    for table, text in re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
}


def test_tables():
    assert set(ROWS) == set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_keys_and_what_is_legal(table):
    assert set(ROWS[table]) == set(TABLES[table])
    for key, hint in TABLES[table].items():
        legal, _, meaning = ROWS[table][key].split(" | ")
        assert legal == describe(hint, unit_of(key)).partition(" with ")[0], "fields of nested tables are not repeated"
        assert meaning


@pytest.mark.parametrize(
    ("table", "spec"),
    [
        ("job", JobSpec),
        ("launch", JobSpec),
        ("optimizer", OptimizerSpec),
        ("data", DataSpec),
        ("checkpoint", CheckpointSpec),
    ],
)
def test_defaults(table, spec):
    for field in dataclasses.fields(spec):
        if field.name in TABLES[table]:
            default = "**needed**" if field.default is dataclasses.MISSING else shown(field.default)
            said = ROWS[table][field.name].split(" | ")[1]
            assert said == ("none" if field.default is None else default), field.name


def test_the_smallest_run_file_loads(tmp_path):
    smallest, cluster = re.findall(r"^```toml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(smallest, encoding="utf-8")
    assert load(path).model.name == "tiny"
    path.write_text(smallest + cluster, encoding="utf-8")
    assert load(path).cluster.num_devices > 1
