"""The configuration: defaults, wrong keys and values, files, and --set."""

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.app.config import read_config
from martlet.config import Setting, Settings, describe, fill, override, read_toml, setting
from martlet.errors import ConfigError
from martlet.store import StoreConfig


class Kitchen(Settings):
    """``[kitchen]``: one key of each kind."""

    ovens: int = setting(2, "how many", unit="ovens", low=1, high=9)
    heat: float = setting(0.5, "how hot", low=0, high=1)
    open: bool = setting(True, "whether it is")
    name: str = setting("blue", "what it is called")
    mode: Literal["sync", "async"] = setting("sync", "how")
    cooks: list[str] = setting(["ann"], "who")


class Galley(Kitchen):
    """``[galley]``: the keys of a kitchen, one of them with other limits, and one more."""

    ovens: int = setting(1, "how many", unit="ovens", low=1, high=2)
    deck: str = setting("lower", "where it is")


def test_a_setting_that_is_not_given_has_its_default() -> None:
    assert fill(Kitchen, {}, "kitchen") == Kitchen(2, 0.5, True, "blue", "sync", ["ann"])


def test_every_kind_is_filled() -> None:
    table = {"ovens": 9, "heat": 1, "open": False, "name": "red", "mode": "async", "cooks": ["bob", "cy"]}
    kitchen = fill(Kitchen, table, "kitchen")
    assert kitchen == Kitchen(9, 1.0, False, "red", "async", ["bob", "cy"])
    assert type(kitchen.heat) is float


def test_a_list_default_belongs_to_each_record() -> None:
    first = fill(Kitchen, {}, "kitchen")
    first.cooks.append("mallory")
    assert fill(Kitchen, {}, "kitchen").cooks == ["ann"]


def test_a_section_may_add_keys_to_those_of_another() -> None:
    assert [each.key for each in describe(Galley, "galley")][:3] == ["galley.ovens", "galley.deck", "galley.heat"]
    galley = fill(Galley, {"deck": "upper", "heat": 1}, "galley")
    assert (galley.deck, galley.heat, galley.ovens, galley.cooks) == ("upper", 1.0, 1, ["ann"])
    with pytest.raises(ConfigError, match=r"'galley\.ovens' is 3; it must be at most 2 ovens"):
        fill(Galley, {"ovens": 3}, "galley")
    assert describe(Kitchen, "kitchen")[0] == Setting("kitchen.ovens", "whole number", 2, "ovens", "how many")


@pytest.mark.parametrize(
    ("key", "near"), [("oven", "did you mean 'kitchen.ovens'"), ("coks", "did you mean 'kitchen.cooks'")]
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        fill(Kitchen, {key: 1}, "kitchen")


def test_an_unknown_key_that_is_near_to_nothing_names_all() -> None:
    with pytest.raises(ConfigError, match=r"'kitchen\.xyzzy' is unknown; known: kitchen\.ovens, kitchen\.heat"):
        fill(Kitchen, {"xyzzy": 1}, "kitchen")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("ovens", "2", "must be a whole number"),
        ("ovens", 2.0, "whole number"),
        ("ovens", True, "whole number"),
        ("ovens", 0, "at least 1 ovens"),
        ("ovens", 10, "at most 9 ovens"),
        ("heat", "hot", "must be a number"),
        ("heat", True, "must be a number"),
        ("heat", -0.1, "at least 0"),
        ("heat", 1.1, "at most 1"),
        ("heat", float("nan"), "must be a number"),
        ("heat", float("inf"), "at most 1"),
        ("open", 1, "true or false"),
        ("open", "yes", "true or false"),
        ("name", 5, "must be text"),
        ("mode", "fast", "'sync' or 'async'"),
        ("mode", ["sync"], "'sync' or 'async'"),
        ("cooks", "ann", "must be a list of strings"),
        ("cooks", [1], "list of strings"),
        ("cooks", {"a": 1}, "list of strings"),
    ],
)
def test_the_error_for_a_wrong_value_names_a_right_one(key: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as error:
        fill(Kitchen, {key: value}, "kitchen")
    assert f"'kitchen.{key}'" in str(error.value)


def test_documentation_knows_every_key() -> None:
    assert describe(Kitchen, "kitchen") == [
        Setting("kitchen.ovens", "whole number", 2, "ovens", "how many"),
        Setting("kitchen.heat", "number", 0.5, "", "how hot"),
        Setting("kitchen.open", "true or false", True, "", "whether it is"),
        Setting("kitchen.name", "text", "blue", "", "what it is called"),
        Setting("kitchen.mode", "'sync' or 'async'", "sync", "", "how"),
        Setting("kitchen.cooks", "list of strings", ["ann"], "", "who"),
    ]


@pytest.mark.parametrize(
    ("assignment", "tables"),
    [
        ("store.flush=async", {"store": {"flush": "async"}}),
        ("a.b=5", {"a": {"b": 5}}),
        ("a.b=true", {"a": {"b": True}}),
        ("a.b=0.5", {"a": {"b": 0.5}}),
        ('a.b="5"', {"a": {"b": "5"}}),
        ('a.b=["x", "y"]', {"a": {"b": ["x", "y"]}}),
        ("a.b=127.0.0.1:0", {"a": {"b": "127.0.0.1:0"}}),
        ("a.b=", {"a": {"b": ""}}),
        ("a.b=x=y", {"a": {"b": "x=y"}}),
        (" a.b =x", {"a": {"b": "x"}}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
        ("a.b=1\nc = 2", {"a": {"b": "1\nc = 2"}}),
    ],
)
def test_set_puts_one_value_into_its_section(assignment: str, tables: dict[str, object]) -> None:
    found: dict[str, object] = {}
    override(found, assignment)
    assert found == tables


def test_set_rules_over_the_file() -> None:
    tables: dict[str, object] = {"store": {"flush": "sync", "segment_bytes": 4096}}
    override(tables, "store.flush=async")
    assert tables == {"store": {"flush": "async", "segment_bytes": 4096}}


@pytest.mark.parametrize("assignment", ["", "flush=async", "store.flush", ".flush=1", "store.=1", "store..x=1", "=1"])
def test_the_error_for_a_wrong_set_option_names_a_right_one(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"SECTION\.KEY=VALUE"):
        override({}, assignment)


def test_set_of_a_section_that_is_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' as a section, but it is a value"):
        override({"a": 1}, "a.b=2")


@given(st.text(), st.text())
def test_any_assignment_is_taken_or_a_config_error(key: str, value: str) -> None:
    tables: dict[str, object] = {}
    try:
        override(tables, f"{key}={value}")
    except ConfigError:
        assert tables == {}
    else:
        assert len(tables) == 1


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "martlet.toml"
    path.write_text('[store]\nflush = "async"\n')
    assert read_toml(path) == {"store": {"flush": "async"}}


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml' cannot be read; No such file"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"[store\n", b"a = ", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml' is not TOML"):
        read_toml(path)


def test_the_largest_message_must_be_receivable() -> None:
    large = {"broker": {"message_bytes_max": 100 << 20}, "store": {"message_bytes_max": 100 << 20}}
    assert read_config(dict(large)).broker.message_bytes_max == 100 << 20
    for key in "incomplete_address_bytes_max", "incomplete_total_bytes_max":
        with pytest.raises(ConfigError, match=f"config key 'server.{key}' is 104857600, .* raise it to 105906176"):
            read_config({**large, "server": {key: 100 << 20}})


@pytest.mark.parametrize(
    ("default", "bounds", "error", "says"),
    [
        ("text", {"low": 1}, TypeError, "the default 'text' has no bounds"),
        (True, {"high": 1}, TypeError, "the default True has no bounds"),
        ([], {"low": 0}, TypeError, "has no bounds"),
        (0, {"low": 1}, ValueError, "the default 0 of a setting is out of its bounds, at least 1"),
        (9, {"high": 5}, ValueError, "out of its bounds, at most 5"),
        (9, {"low": 1, "high": 5}, ValueError, "out of its bounds, 1 to 5"),
    ],
)
def test_a_bound_that_cannot_apply_is_an_error_of_its_author(
    default: object, bounds: dict[str, int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        setting(default, "why", low=bounds.get("low"), high=bounds.get("high"))


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("", True),
        ("04", True),
        ("4", True),
        ("0;23", True),
        ("04; 16", True),
        ("99", False),
        ("24", False),
        ("-1", False),
        ("4,16", False),
        ("4;", False),
        ("noon", False),
        ("004", False),
        ("\u0664", False),
    ],
)
def test_hours_of_the_day_are_hours(text: str, is_valid: bool) -> None:
    if is_valid:
        assert fill(StoreConfig, {"delete_when": text}, "store").delete_when == text
    else:
        with pytest.raises(ConfigError, match=r"'store\.delete_when' is .* must be hours from 0 to 23, separated by ;"):
            fill(StoreConfig, {"delete_when": text}, "store")
