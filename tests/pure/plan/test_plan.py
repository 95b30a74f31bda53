"""plan.json: what is written is what is read; what is damaged is named."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import SpecError
from phalanx.plan.layout import Layout
from phalanx.plan.plan import FORMAT_VERSION, Plan, Prediction
from phalanx.spec import clusters, models
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.spec.schema import Range, hints

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any legal value of a field's type: ints stand where floats are allowed, as people write them."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return within(*options)
    if origin in (Union, types.UnionType):
        return st.one_of([values(option) for option in options])
    if origin is Literal:
        return st.sampled_from(options)
    if origin is tuple:
        if options[-1] is ...:
            return st.lists(values(options[0]), max_size=3).map(tuple)
        return st.tuples(*(values(option) for option in options))
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(NAMES, values(options[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: values(field) for name, field in hints(hint).items()})
    return {
        int: st.integers(-4, 2**40),
        float: st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**40), st.floats(0, 1)),
        str: NAMES,
        bool: st.booleans(),
        types.NoneType: st.none(),
    }[hint]


def within(kind: type, bounds: Range) -> st.SearchStrategy[Any]:
    low, high = max(bounds.at_least, bounds.above, -(2.0**40)), min(bounds.at_most, bounds.below, 2.0**60)
    numbers = st.floats(low, high) if kind is float else st.integers(int(low), int(high))
    return numbers.filter(lambda value: value in bounds)


def example(**changes: Any) -> Plan:
    parts: dict[str, Any] = {
        "model": models.named("llama-3.1-8b"),
        "cluster": clusters.named("dgx-h100", num_nodes=2),
        "job": JobSpec(global_batch=8, seq_len=64, num_steps=3),
        "layout": Layout(tensor=4, pipeline=2, data=2, stage_layers=(15, 17)),
        "prediction": Prediction(
            memory_bytes=({"weights": 10, "gradients": 20}, {"weights": 11}),
            step_s=0.25,
            step_s_by_kind={"compute": 0.2},
            assumptions=("every link is idle",),
        ),
    }
    return Plan(**(parts | changes))


@given(plan=values(Plan))
def test_any_plan_is_read_as_it_was_written(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.write(path)
    again = Plan.read(path)
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.differences(plan) == []
    assert types_of(again) == types_of(Plan.read(path))
    again.write(path)
    assert Plan.read(path) == plan


def types_of(value: Any) -> Any:
    """The types of all leaves: 1 equals 1.0, but a trainer that divides or indexes may tell them apart."""
    if dataclasses.is_dataclass(value):
        return {field.name: types_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: types_of(entry) for key, entry in value.items()}
    return [types_of(entry) for entry in value] if isinstance(value, tuple) else type(value)


def test_types_survive(tmp_path):
    plan = example()
    plan.write(tmp_path / "plan.json")
    assert types_of(Plan.read(tmp_path / "plan.json")) == types_of(plan)


@pytest.mark.parametrize("prediction", [None, example().prediction])
def test_with_and_without_a_prediction(tmp_path, prediction):
    plan = example(prediction=prediction)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


class TestWriting:
    def test_leaves_nothing_beside_it(self, tmp_path):
        example().write(tmp_path / "plan.json")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]

    def test_a_failed_write_leaves_the_old_plan(self, tmp_path, monkeypatch):
        path = tmp_path / "plan.json"
        example().write(path)
        before = path.read_bytes()

        def fail(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            example(layout=Layout()).write(path)
        assert path.read_bytes() == before
        assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]

    def test_infinity_is_not_json(self, tmp_path):
        prediction = dataclasses.replace(example().prediction, step_s=float("inf"))
        with pytest.raises(ValueError, match="not JSON compliant"):
            example(prediction=prediction).write(tmp_path / "plan.json")
        assert list(tmp_path.iterdir()) == []


def damaged(folder: Path, change: Any) -> str:
    """What is said about a plan whose table `change` has edited, or whose text it is."""
    path = folder / "plan.json"
    example().write(path)
    if isinstance(change, str):
        path.write_text(change)
    else:
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))
    with pytest.raises(SpecError) as caught:
        Plan.read(path)
    assert all(problem.where.startswith(str(path)) for problem in caught.value.problems)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", ["plan.json:1: is not JSON", "phalanx plan"]),
        ('{"format_version": 1,\n "model": {', ["plan.json:2: is not JSON"]),
        ("[1]", ["is not a plan: it has no format_version"]),
        ("{}", ["is not a plan: it has no format_version"]),
        (f'{{"format_version": {FORMAT_VERSION + 1}}}', [f"format version {FORMAT_VERSION + 1}; this is version 1"]),
        (lambda table: table["layout"].update(tensro=2), ["unknown key layout.tensro", "did you mean tensor?"]),
        (lambda table: table.update(extra=1), ["unknown key extra"]),
        (lambda table: table.pop("layout"), ["missing key layout"]),
        (lambda table: table["job"].pop("seq_len"), ["missing key job.seq_len"]),
        (lambda table: table["job"].update(seq_len=1.5), ["job.seq_len = 1.5", "a whole number"]),
        (lambda table: table["job"].update(seq_len=None), ["job.seq_len = null"]),
        (lambda table: table["job"]["optimizer"].update(lr=float("nan")), ["job.optimizer.lr = NaN"]),
        (lambda table: table["model"].update(norm="batchnorm"), ['model.norm = "batchnorm"', '"layernorm", "rmsnorm"']),
        (lambda table: table["layout"].update(stage_layers=[1, "x"]), ['layout.stage_layers = "x"']),
        (lambda table: table["prediction"]["memory_bytes"][0].update(weights=-0.5), ["weights = -0.5"]),
    ],
)
def test_damage_is_named(tmp_path, change, words):
    said = damaged(tmp_path, change)
    assert all(word in said for word in words), said


def test_all_damage_at_once(tmp_path):
    def change(table: dict[str, Any]) -> None:
        table["layout"]["x"] = 1
        table["job"]["seed"] = "one"
        del table["model"]["vocab"]

    assert damaged(tmp_path, change).count("plan.json:") == 3


def test_missing_file(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        Plan.read(tmp_path / "plan.json")


class TestDigest:
    def test_only_what_decides_the_computation(self):
        plan = example()
        assert plan.digest() == example(prediction=None, cluster=clusters.named("laptop")).digest()
        assert plan.digest() != example(layout=dataclasses.replace(plan.layout, micro_batch=2)).digest()
        assert plan.digest() != example(job=dataclasses.replace(plan.job, seq_len=65)).digest()
        assert plan.digest() != example(model=dataclasses.replace(plan.model, norm_eps=1e-6)).digest()

    def test_whole_floats_and_ints_are_one(self):
        one, also = OptimizerSpec(lr=1, betas=(0, 0.5)), OptimizerSpec(lr=1.0, betas=(0.0, 0.5))
        job = example().job
        digests = {example(job=dataclasses.replace(job, optimizer=optimizer)).digest() for optimizer in (one, also)}
        assert len(digests) == 1

    def test_the_same_in_every_process(self, tmp_path):
        path = tmp_path / "plan.json"
        example().write(path)
        program = "import sys; from pathlib import Path; from phalanx.plan.plan import Plan\n"
        program += "print(Plan.read(Path(sys.argv[1])).digest())"
        for seed in ("1", "2"):
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            command = [sys.executable, "-c", program, path]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert ran.stdout.strip() == example().digest(), ran.stderr


def test_differences_name_the_keys():
    plan = example()
    job = dataclasses.replace(plan.job, seq_len=128, optimizer=OptimizerSpec(lr=0.5))
    layout = dataclasses.replace(plan.layout, stage_layers=None)
    assert plan.differences(example(job=job, layout=layout, cluster=clusters.named("laptop"))) == [
        "job.optimizer.lr: 0.0003 here, 0.5 there",
        "job.seq_len: 64 here, 128 there",
        "layout.stage_layers: [15, 17] here, null there",
    ]


def test_a_plan_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000)
    with pytest.raises(SpecError, match="nested too deeply"):
        Plan.read(path)
