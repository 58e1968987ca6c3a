"""JSON that anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.storage.atomic import read_json
from asyncrl.storage.untrusted import check_sizes, check_types, parse_json, read_rows

REFUSED = {
    "Infinity": (b'{"a": Infinity}', "Infinity, which is not in JSON"),
    "NaN": (b'{"a": NaN}', "NaN, which is not in JSON"),
    "a float beyond all": (b'{"a": 1e999}', "the number 1e999, which is too large"),
    "10^30": (b'{"a": 1' + b"0" * 30 + b"}", "which is too large"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "which is too large"),
    "-2^63": (b'{"a": -9223372036854775808}', "which is too large"),
    "a deep list": (b'{"a": ' + b"[" * 1000 + b"]" * 1000 + b"}", "more than 64 levels"),
    "a list deeper than the stack": (b"[" * 200_000 + b"]" * 200_000, "more than 64 levels"),
    "a deep object": (b'{"a":' * 70 + b"1" + b"}" * 70, "more than 64 levels"),
    "no UTF-8": (b'{"caf\xe9": 1}', "utf-8"),
    "half a character": (b'{"a": "\\ud800"}', "surrogates not allowed"),
    "another type": (b"[1]", "it holds a list, expected a dict"),
    "nothing": (b"", "Expecting value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_again_is_refused(name: str) -> None:
    raw, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        parse_json(raw, dict)


def test_what_json_has_is_read() -> None:
    value = {"a": [1, -2, 2**63 - 1, 1.5, 1e308, True, None, "ü \\u00fc {[", "\U0001f600"], "b": {"c": {}}}
    assert parse_json(json.dumps(value).encode(), dict) == value
    assert parse_json(json.dumps([[i] for i in range(1000)]).encode(), list)[7] == [7]


def test_types_are_named() -> None:
    expected = {"step": int, "rate": float, "name": (str, type(None))}
    check_types({"step": 1, "rate": 2, "name": None, "other": []}, expected)
    for wrong, why in (
        ({"step": True, "rate": 1.0, "name": ""}, "step is True, expected int"),
        ({"step": 1, "rate": "x" * 100, "name": ""}, r"rate is 'x+\.\.\., expected float or int"),
        ({"step": 1, "rate": 1.0}, "name is missing"),
    ):
        with pytest.raises(ValueError, match=why):
            check_types(wrong, expected)


def test_a_billion_layers_are_refused_before_one_is_made() -> None:
    check_sizes({"layers": 30, "width": 4096, "dtype": "bfloat16", "std": [0.5, 1.0]})
    for sizes in ({"layers": 10**9}, {"llm_layers": 1025}, {"width": 2**30}, {"widths": [1, -5]}):
        with pytest.raises(ValueError, match="expected a whole number of 0 to"):
            check_sizes(sizes)


def test_rows_that_are_none_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n[1]\ncaf\xe9\n' + b"1" * 2_000_000 + b'\n{"step": NaN}\n{"step": 2}\n{"st'
    )
    assert [row for _, row in read_rows(path)] == [{"step": 1}, None, None, None, None, {"step": 2}, None]


@pytest.mark.parametrize("content", [b'{"a": Infinity}', b"[" * 100_000, b'{"caf\xe9": 1}', b"[]"])
def test_a_damaged_file_is_named_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json is not JSON \(.*\)\. Copy the folder again"):
        read_json(tmp_path / "state.json")


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: it is a folder"):
        read_json(tmp_path / "state.json")
