"""The columns of the sink: names, types, and checks of a frame."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from martlet_spark.errors import OptionError

__all__ = ["SINK_COLUMNS", "check_columns"]

# name -> (Spark's types, description)
SINK_COLUMNS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "body": (
        ("binary", "string"),
        "the message; required. Empty only in transactions: brokers refuse that of other sends",
    ),
    "topic": (("string",), "required without the option `topic`, which replaces it"),
    "key": (("string",), "property `KEYS`: a key, or several separated by spaces; also chooses the queue"),
    "tag": (("string",), "property `TAGS`"),
    "properties": (("map<string,string>",), "your own properties: names and values, not empty"),
    "queue": (("int",), "number of the queue to write to; needs `broker` if the topic is on several brokers"),
    "broker": (("string",), "name of the broker to write to; needs `queue`"),
    "deliver_at": (("timestamp",), "when consumers receive the message; brokers need timers (RocketMQ 5 has them)"),
    "delay_level": (("int",), "delivers the message later, by the brokers' levels: 1 is 1 s, 18 is 2 h; 0 is at once"),
    "flag": (("int",), "a number of your own, which the source's column `flag` has"),
}


def check_columns(types: Mapping[str, str], topic: str) -> tuple[str, ...]:
    """Return the names of the columns, given their *types* as Spark writes them and the option *topic*.

    Raises:
      OptionError: a column is missing, unknown or has another type than the sink can write.
    """
    for name, kind in types.items():
        if name not in SINK_COLUMNS:
            raise OptionError(f"column {name!r} of type {kind} cannot be written; {_nearest(name, types)}")
        wanted = SINK_COLUMNS[name][0]
        if kind not in wanted:
            expected = " or ".join(wanted)
            raise OptionError(f"column {name!r} has the type {kind}; it must be {expected}, cast it before the write")
    if "body" not in types:
        raise OptionError("column 'body' of type binary or string is missing; select the message as body")
    if "topic" not in types and not topic:
        raise OptionError("column 'topic' of type string is missing; select it, or set the option topic")
    if "broker" in types and "queue" not in types:
        raise OptionError("column 'queue' of type int is missing; the column 'broker' needs it")
    return tuple(types)


def _nearest(name: str, types: Mapping[str, str]) -> str:
    near = [each for each in get_close_matches(name, SINK_COLUMNS, 1) if each not in types]
    hint = f"did you mean {near[0]!r}?" if near else "drop it, or put it into body or properties"
    return f"{hint} The columns are {', '.join(SINK_COLUMNS)}"
