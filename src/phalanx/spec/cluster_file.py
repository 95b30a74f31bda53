"""Write a cluster as the TOML that `[cluster] file = …` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def as_toml(table: Mapping[str, Any]) -> str:
    """`table` as TOML: text, numbers, lists of them, and tables, the plain keys of each table first."""
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    if path:
        lines.insert(0, f"[{'.'.join(map(_key, path))}]")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", *_lines(value, (*path, key))]
    return lines


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value, ensure_ascii=False)
