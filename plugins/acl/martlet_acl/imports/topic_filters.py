"""Topic filters of MQTT as lists of levels: which names two of them have in common."""

from collections.abc import Sequence
from typing import Final

from martlet_acl.policy.errors import PolicyError

__all__ = ["check_filter", "common_names"]

USER: Final = "{user}"


def check_filter(levels: Sequence[str]) -> None:
    """Raise `PolicyError` unless *levels* are a topic filter."""
    for place, level in enumerate(levels):
        if ("+" in level or "#" in level) and level not in ("+", "#"):
            raise PolicyError(f"it has a wildcard inside the level {level!r}")
        if level == "#" and place != len(levels) - 1:
            raise PolicyError("it has a # before its end")


def common_names(one: Sequence[str], other: Sequence[str]) -> list[str] | None:
    """Return the filter of the names that both filters select; None if they have none in common.

    Raises:
      PolicyError: no filter selects these names, because one level is the user's name and the other a certain name.
    """
    found: list[str] = []
    for place in range(max(len(one), len(other)) + 1):
        if place < len(one) and one[place] == "#":
            return [*found, *other[place:]]
        if place < len(other) and other[place] == "#":
            return [*found, *one[place:]]
        if place >= len(one) or place >= len(other):
            break
        level, other_level = one[place], other[place]
        if level == "+" or level == other_level:
            found.append(other_level)
        elif other_level == "+":
            found.append(level)
        elif USER in level or USER in other_level:
            raise PolicyError(f"the levels {level!r} and {other_level!r} are the same for some users only")
        else:
            return None
    return found if len(one) == len(other) else None
