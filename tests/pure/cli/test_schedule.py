"""`phalanx schedule show`."""

import json

import pytest
from tiny import tiny_plan

from phalanx.cli.main import main
from phalanx.plan.layout import Layout
from phalanx.rundir import RunDir
from phalanx.watch.actions import ActionsWriter

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


def a_plan():
    return tiny_plan(Layout(pipeline=2, micro_batch=4), precision="fp32")


def test_a_plan_is_drawn_with_the_times_it_predicts(capsys, tmp_path):
    a_plan().write(tmp_path / "plan.json")
    assert main(["schedule", "show", "--plan", str(tmp_path / "plan.json")]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("predicted: ")
    assert [row[:9] for row in rows] == ["stage 0 F", "stage 1  ", "F forward"]


def test_a_run_is_drawn_below_its_prediction(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.watch.actions.wall_clock_offset_s", lambda: 1e9)
    run_dir, plan = RunDir(tmp_path), a_plan()
    run_dir.create()
    plan.write(run_dir.plan)
    for rank in range(2):
        times = [(rank + index, rank + index + 1.0) for index in range(4)]
        ActionsWriter(run_dir.actions(rank), 8, pytest.fail).after(8, times)
    drawing = tmp_path / "both.svg"
    assert main(["schedule", "show", "--run", str(tmp_path), "--svg", str(drawing)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed if ":" in line] == ["predicted", "measured in step 8"]
    assert drawing.read_text().count("<rect") == 2 * 8 + 2
    assert main(["schedule", "show", "--run", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["predicted"]["bubble"] > 0
    assert content["measured in step 8"]["starts_s"][1] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--pipeline is missing"),
        (["--pipeline", "2"], "--micro-batches is missing"),
        (["--plan", "plan.json", "--pipeline", "2"], "--pipeline beside a plan, which has its own"),
        (["--run", "no/such/run"], "no/such/run/plan.json"),
    ],
)
def test_sizes_or_a_plan(arguments, told, capsys):
    assert main(["schedule", "show", *arguments]) == 2
    assert told in capsys.readouterr().err
