"""Where each key of a TOML file stands, and how overrides are laid over it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import SpecError
from phalanx.spec import document

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NASTY = '''\
# [comment] a = 1
top = "a # no comment [x] b = 2"

[ plain ]  # a header with blanks
a.b = 1
a . "c d" = 2
"quoted = key" = 3
'literal # key' = 4
multi = """
[not.a.table]
not_a_key = 1 \\""" still in it""""
literal = \'\'\'
x = 1
[nor.this]\'\'\'
after = 5
array = [
  1, # a = 1
  "]", [2, 3], \'[\',
  { in_array = 1 },
]
inline = { x = 1, "y z" = { w = [1, 2] }, s = "},{" }
date = 1979-05-27 07:32:00
empty_table = {}
empty_list = []
escaped = "a\\"b = 1"
negative = -1.5e3
[plain.sub."dotted.name"]
z = 1
'''

LINES = {
    ("top",): 2,
    ("plain",): 4,
    ("plain", "a"): 5,
    ("plain", "a", "b"): 5,
    ("plain", "a", "c d"): 6,
    ("plain", "quoted = key"): 7,
    ("plain", "literal # key"): 8,
    ("plain", "multi"): 9,
    ("plain", "literal"): 12,
    ("plain", "after"): 15,
    ("plain", "array"): 16,
    ("plain", "array", "in_array"): 19,
    ("plain", "inline"): 21,
    ("plain", "inline", "x"): 21,
    ("plain", "inline", "y z"): 21,
    ("plain", "inline", "y z", "w"): 21,
    ("plain", "inline", "s"): 21,
    ("plain", "date"): 22,
    ("plain", "empty_table"): 23,
    ("plain", "empty_list"): 24,
    ("plain", "escaped"): 25,
    ("plain", "negative"): 26,
    ("plain", "sub"): 27,
    ("plain", "sub", "dotted.name"): 27,
    ("plain", "sub", "dotted.name", "z"): 28,
}


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_key_has_its_line(tmp_path, newline):
    tomllib.loads(NASTY)
    path = tmp_path / "run.toml"
    path.write_bytes(NASTY.replace("\n", newline).encode())
    read = document.read(path)
    assert {key: read.where(key) for key in read.places if key} == {key: f"{path}:{n}" for key, n in LINES.items()}


BARE = st.text("abcXYZ019_-", min_size=1, max_size=4)
QUOTED = st.text(st.characters(exclude_categories=["C"]), max_size=4).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
)
STRINGS = st.sampled_from(['"x"', "'y # = ['", '"""a\nb = 1\n[c]\n"""', "'''q'\n'''", '"\\" = ["', '""', '""""""'])
SCALARS = st.one_of(STRINGS, st.sampled_from(["1", "-2.5", "true", "1979-05-27", "0x1F", "inf"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ # c ] = 1\n" + ",\n".join(items) + "]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"k{i} = {item}" for i, item in enumerate(items)) + "}"
        ),
    ),
    max_leaves=4,
)


@given(
    st.lists(st.tuples(st.one_of(BARE, QUOTED), VALUES, st.sampled_from(["", "  # x = [1", "\n# [t]\n"])), max_size=6)
)
def test_lines_of_any_document(pairs):
    text, expected, seen = "", {}, set()
    for name, value, trailer in pairs:
        key = next(iter(tomllib.loads(f"{name} = 1")))
        if key in seen:
            continue
        seen.add(key)
        text += "\n[t]\n" if not expected else ""
        expected["t", key] = text.count("\n") + 1
        text += f"  {name}\t= {value}{trailer}\n"
    tomllib.loads(text)
    found = document._Scanner(text).scan()
    assert {key: line for key, line in found.items() if len(key) == 2} == expected


def test_place_of_what_is_not_there(tmp_path):
    path = write(tmp_path, "[a]\nb = 1\n")
    read = document.read(path)
    assert read.where(("a", "b", "c")) == f"{path}:2"
    assert read.where(("a", "x")) == f"{path}:1"
    assert read.where(("z", "x")) == str(path)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("a.b=2", ("a", "b"), 2),
        (" a.c = 2.5 ", ("a", "c"), 2.5),
        ("a.c=true", ("a", "c"), True),
        ("a.c=bf16", ("a", "c"), "bf16"),
        ("a.c='7'", ("a", "c"), "7"),
        ("a.c=data/train set", ("a", "c"), "data/train set"),
        ("a.c=[1, 2]", ("a", "c"), [1, 2]),
        ("a.c=[1, 2", ("a", "c"), "[1, 2"),
        ("a.c=1\nd = 2", ("a", "c"), "1\nd = 2"),
        ("n.e.w=1=2", ("n", "e", "w"), "1=2"),
    ],
)
def test_overrides(tmp_path, setting, key, value):
    read = document.read(write(tmp_path, "[a]\nb = 1\n"))
    changed, problems = document.override(read, [setting])
    found = changed.table
    for part in key:
        found = found[part]
    assert (found, type(found), problems) == (value, type(value), [])
    assert changed.where(key) == f"--set {setting}"
    assert read.table == {"a": {"b": 1}}, "the file's own table is left alone"


@pytest.mark.parametrize("setting", ["", "a", "a.b", "a.b=", "=1", "a b=1", ".a=1", "a..b=1"])
def test_overrides_that_are_none(tmp_path, setting):
    _, (problem,) = document.override(document.read(write(tmp_path, "")), [setting])
    assert problem.where == f"--set {setting}"
    assert "table.key=value" in problem.what


def test_override_into_a_value(tmp_path):
    path = write(tmp_path, "[a]\nb = 1\n")
    _, (problem,) = document.override(document.read(path), ["a.b.c=1"])
    assert problem.what == f"a.b is 1 in {path}:2, not a table"
    assert problem.instead == "--set a.b=…, which replaces all of it"


def test_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert document.read(path).table == {"a": 1}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[job]\nprecision = bf16\n", 2, ["precision = bf16", "text needs quotes"]),
        ("[job]\nseed = 1\nseed = 2\n", 3, ["overwrite", "seed = 2"]),
        ("[job\n", 1, ["[job"]),
        ("a = [1,\n2\n", 2, ["2"]),
        ('a = "x\n', 1, ['a = "x']),
        ("[a]\n[a]\n", 2, ["[a]"]),
    ],
)
def test_syntax_errors_name_their_line(tmp_path, text, line, words):
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        document.read(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:{line}"
    assert all(word in str(problem) for word in words)


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path, "", "demo.toml")
    (tmp_path / "latin.toml").write_bytes("a = 'é'".encode("latin-1"))
    cases = {
        tmp_path / "dmeo.toml": ["does not exist", "demo.toml"],
        tmp_path / "no" / "run.toml": ["does not exist", f"no folder {tmp_path / 'no'}"],
        tmp_path: ["is a folder", "demo.toml"],
        tmp_path / "latin.toml": ["not UTF-8", "0xe9 at offset 5"],
        tmp_path / "demo.toml" / "run.toml": ["Not a directory"],
    }
    for path, words in cases.items():
        with pytest.raises(SpecError) as caught:
            document.read(path)
        assert str(caught.value).startswith(str(path))
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_endless_lines_and_depths_are_refused_in_a_few_words(tmp_path):
    path = tmp_path / "run.toml"
    for text, said in (("[" * 100_000, "is not TOML"), ("a = " + "[" * 5_000, "is nested too deeply|is not TOML")):
        path.write_text(text)
        with pytest.raises(SpecError, match=said) as caught:
            document.read(path)
        assert len(str(caught.value)) < 500
