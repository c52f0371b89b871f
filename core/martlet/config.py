"""Configuration read from TOML: each key has a default, a unit and an explanation.

Each part of Martlet declares its keys in a subclass of `Settings` whose fields come from `setting`. This module fills
these records from tables of a TOML file and from ``--set KEY=VALUE``. It refuses wrong types and unknown keys, and
suggests the most similar known key. ``docs/config.md`` is generated from the same records.
"""

import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from msgspec import Struct, StructMeta, field

from martlet.errors import ConfigError

__all__ = [
    "Setting",
    "Settings",
    "describe",
    "fill",
    "override",
    "read_private_secret",
    "read_secret",
    "read_toml",
    "setting",
]

T = TypeVar("T")
Section = TypeVar("Section", bound="Settings")


class Setting(Struct, frozen=True):
    """One configuration key, for documentation."""

    key: str
    type: str
    default: object
    unit: str
    reason: str


class _Declared(Struct, frozen=True):
    """The arguments of a call of `setting`."""

    default: Any
    reason: str
    unit: str
    low: int | None
    high: int | None
    check: Callable[[Any], str] | None = None

    def of_field(self) -> object:
        """Return the default for the field of the struct; each record gets its own copy of a list."""
        if isinstance(self.default, list):
            return field(default_factory=self.default.copy)
        return self.default


def setting(
    default: T,
    reason: str,
    *,
    unit: str = "",
    low: int | None = None,
    high: int | None = None,
    check: Callable[[Any], str] | None = None,
) -> T:
    """Declare a field of a configuration record.

    Args:
      default: a bool, int, float, str or list of str; annotate the field with a Literal to allow only certain strings.
      reason: the purpose of the key; ``martlet config`` and the documentation print it.
      unit: the unit of a number.
      low: the lowest accepted number.
      high: the highest accepted number.
      check: returns an empty text for an accepted value, otherwise the requirement that the value misses.

    Raises:
      TypeError: there is a bound, and *default* is no number.
      ValueError: *default* is out of bounds.
    """
    _check_can_apply(default, low, high)
    return _Declared(default, reason, unit, low, high, check)  # type: ignore[return-value]


def _check_can_apply(default: object, low: int | None, high: int | None) -> None:
    """Raise an error if *default* cannot have these bounds, which would never be checked."""
    if low is None and high is None:
        return
    if isinstance(default, bool) or not isinstance(default, int | float):
        raise TypeError(f"a setting with the default {default!r} has no bounds; remove low and high, or use a number")
    if (low is not None and default < low) or (high is not None and default > high):
        bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
        raise ValueError(f"the default {default!r} of a setting is out of its bounds, {bounds}")


@dataclass_transform(frozen_default=True)
class _Declaring(StructMeta):
    """The metaclass of `Settings`: moves each `setting` of a class to ``declared``, and leaves only its default."""

    declared: "Mapping[str, _Declared]"

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> "_Declaring":
        declared = {key: value for key, value in namespace.items() if isinstance(value, _Declared)}
        defaults = {key: value.of_field() for key, value in declared.items()}
        made: _Declaring = super().__new__(cls, name, bases, {**namespace, **defaults}, **options)
        inherited = {key: value for base in bases for key, value in getattr(base, "declared", {}).items()}
        made.declared = {**declared, **{key: value for key, value in inherited.items() if key not in declared}}
        return made


class Settings(Struct, frozen=True, metaclass=_Declaring):
    """The keys of a section, as an immutable record; subclasses declare each with `setting`.

    `msgspec.structs.replace` returns a copy with some values changed.
    """

    declared: ClassVar[Mapping[str, _Declared]]


def describe(record: type[Settings], prefix: str) -> list[Setting]:
    """Return every key of *record* in order, named ``prefix.name``."""
    hints = get_type_hints(record)
    return [
        Setting(f"{prefix}.{name}", _type_name(hints[name]), declared.default, declared.unit, declared.reason)
        for name, declared in record.declared.items()
    ]


def _type_name(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return "list of strings"
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[hint]  # type: ignore[index]


def _wanted(hint: object) -> str:
    """Return the name of type *hint* in error texts."""
    name = _type_name(hint)
    return f"a {name}" if hint in (int, float) or get_origin(hint) is list else name


def fill(record: type[Section], table: Mapping[str, object], prefix: str) -> Section:
    """Return a *record* filled from *table*, which is section *prefix*; missing keys keep their defaults.

    Raises:
      ConfigError: a key is unknown or a value is invalid.
    """
    hints = get_type_hints(record)
    known = record.declared
    values: dict[str, object] = {}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(unknown_key(f"{prefix}.{name}", [f"{prefix}.{k}" for k in known]))
        values[name] = _checked(f"{prefix}.{name}", value, hints[name], known[name])
    return record(**values)


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the text of an error for the unknown *key*, which suggests the most similar known key."""
    import difflib

    choices = {choice.rpartition(".")[2]: choice for choice in known}
    near = difflib.get_close_matches(key.rpartition(".")[2], choices, 1, 0.5)
    mend = f"did you mean {choices[near[0]]!r}?" if near else f"known: {', '.join(choices.values())}"
    return f"config key {key!r} is unknown; {mend}"


def _checked(key: str, value: object, hint: object, declared: _Declared) -> object:
    wanted = _wanted(hint)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"config key {key!r} is {value!r}; it must be {wanted}")
        return value
    if get_origin(hint) is list:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"config key {key!r} is {value!r}; it must be {wanted}")
        return value
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"config key {key!r} is {value!r}; it must be {wanted}")
    _check_bounds(key, value, declared)
    if declared.check is not None and (must := declared.check(value)):
        raise ConfigError(f"config key {key!r} is {value!r}; it must be {must}")
    return value


def _check_bounds(key: str, value: object, declared: _Declared) -> None:
    low, high, unit = declared.low, declared.high, declared.unit
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if value != value:
        raise ConfigError(f"config key {key!r} is {value}; it must be a number")
    if low is not None and value < low:
        raise ConfigError(f"config key {key!r} is {value}; it must be at least {low} {unit}".rstrip())
    if high is not None and value > high:
        raise ConfigError(f"config key {key!r} is {value}; it must be at most {high} {unit}".rstrip())


def read_toml(path: Path) -> dict[str, object]:
    """Return the tables of the TOML file at *path*.

    Raises:
      ConfigError: the file cannot be read or is not TOML; the text names the line.
    """
    import tomllib  # imported late: only a broker with a configuration file needs it

    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read; {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML; {error}") from error


def read_secret(path: str) -> str:
    """Return the content of the file at *path* without trailing line breaks.

    Raises:
      ConfigError: the file cannot be read or is empty.
    """
    try:
        secret = Path(path).read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"secret file {path!r} cannot be read; {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"secret file {path!r} is not UTF-8; write the secret as text") from error
    if not secret:
        raise ConfigError(f"secret file {path!r} is empty; write the secret into it")
    return secret


def read_private_secret(path: str) -> str:
    """Return the same as `read_secret`, from a file that other users cannot read; its group may.

    Raises:
      ConfigError: as for `read_secret`, or every user may read or change the file.
    """
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ConfigError(f"secret file {path!r} cannot be read; {error.strerror}") from error
    if mode & stat.S_IRWXO:
        raise ConfigError(f"secret file {path!r} is open to every user of this machine; run: chmod o= {path}")
    return read_secret(path)


def override(tables: dict[str, object], assignment: str) -> None:
    """Put one ``--set section.key=value`` into *tables*; a value that is not valid TOML counts as text.

    Raises:
      ConfigError: *assignment* has no ``=`` or no section.
    """
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {assignment!r} is not SECTION.KEY=VALUE; for example store.flush=async")
    table = tables
    for name in path[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {assignment!r} uses {name!r} as a section, but it is a value; correct the key")
        table = inner
    table[path[-1]] = _toml_value(text)


def _toml_value(text: str) -> object:
    import tomllib

    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text
