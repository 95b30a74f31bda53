"""`phalanx schedule show`."""

import json

import pytest

from phalanx.cli.main import main

SHOW = ["schedule", "show", "--pipeline", "2", "--micro-batches", "3"]


def test_show_draws(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "32")
    drawing = tmp_path / "1f1b.svg"
    assert main([*SHOW, "--svg", str(drawing)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed] == [
        "stage 0 F0F1    B0  F2B1    B2",
        "stage 1   F0B0  F1B1  F2B2",
        "F forward, B backward",
        "bubble 25.0%; most micro-batches whose activations are held: 2, 1",
    ]
    assert drawing.read_text().startswith("<svg")


def test_json_has_times_and_facts(capsys):
    assert main([*SHOW, "--schedule", "zb-v", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["virtual_stages"] == 2
    assert content["stages"] == [[0, 3], [1, 2]]
    assert content["actions"][1][0] == {"kind": "forward", "micro_batch": 0, "chunk": 0}
    assert content["starts_s"][1][0] == 1.0
    assert content["peak_live"] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--schedule", "zb-v2"], '--schedule: there is no schedule "zb-v2"\n    → schedule = "zb-v"'),
        (["--virtual-stages", "2"], "--virtual-stages: schedule 1f1b does not run with 2 virtual stages"),
        (["--micro-batches", "0"], "--micro-batches: 0 micro-batches"),
        (["--pipeline", "0"], "--pipeline: pipeline is 0"),
        (["--svg", "no/such/folder/a.svg"], "--svg: cannot write no/such/folder/a.svg: No such file or directory"),
    ],
)
def test_wrong_input_is_told_and_ends_with_2(arguments, told, capsys):
    assert main([*SHOW, *arguments]) == 2
    assert told in capsys.readouterr().err
