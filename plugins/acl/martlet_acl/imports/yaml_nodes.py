"""YAML as nodes that know their lines, so that each error can name its place; all values are texts, as written."""

from collections.abc import Iterator
from typing import Any, Final, final

from martlet_acl.policy.errors import PolicyError

__all__ = ["YamlNode", "parse_yaml"]

CHARACTERS_MAX: Final = 16 << 20
NULL: Final = "tag:yaml.org,2002:null"


@final
class YamlNode:
    """A text, a list, or a mapping; null is an empty text."""

    __slots__ = ("_fields", "_items", "_text", "line")

    def __init__(self, line: int) -> None:
        self.line = line
        self._text: str | None = None
        self._items: list[YamlNode] | None = None
        self._fields: list[tuple[str, YamlNode]] | None = None

    @property
    def place(self) -> str:
        """Where it begins."""
        return f"line {self.line}"

    def text(self) -> str:
        """Return the text. Raises `PolicyError` if it is none."""
        if self._text is None:
            raise PolicyError("it is no text", self.place)
        return self._text

    def items(self) -> "Iterator[YamlNode]":
        """Return the items of the list; an empty text has none. Raises `PolicyError` if it is no list."""
        if self._items is None and self._text != "":
            raise PolicyError("it is no list", self.place)
        return iter(self._items or ())

    def fields(self) -> "Iterator[tuple[str, YamlNode]]":
        """Return names and values; an empty text has none. Raises `PolicyError` if it is no mapping."""
        if self._fields is None and self._text != "":
            raise PolicyError("it is no mapping of names to values", self.place)
        return iter(self._fields or ())

    def _fill(self, node: Any, known: "dict[int, YamlNode]") -> "YamlNode":
        """Take over *node* of PyYAML; an alias is the same node as its anchor."""
        known[id(node)] = self
        if node.id == "scalar":
            self._text = "" if node.tag == NULL else str(node.value)
        elif node.id == "sequence":
            self._items = [_converted(item, known) for item in node.value]
        else:
            pairs = [(_converted(key, known), _converted(value, known)) for key, value in node.value]
            self._fields = [(key.text(), value) for key, value in pairs]
        return self


def _converted(node: Any, known: dict[int, YamlNode]) -> YamlNode:
    return known.get(id(node)) or YamlNode(node.start_mark.line + 1)._fill(node, known)


def parse_yaml(source: str) -> YamlNode:
    """Return the root of the document *source*.

    Raises:
      PolicyError: it is no YAML, or the package that reads YAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise PolicyError("it needs PyYAML, which is not installed; pip install 'martlet[yaml]'") from error
    if len(source) > CHARACTERS_MAX:
        raise PolicyError(f"it has {len(source)} characters; {CHARACTERS_MAX} are allowed")
    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
        return YamlNode(1)._fill(yaml.ScalarNode(NULL, ""), {}) if root is None else _converted(root, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PolicyError(f"it is no YAML: {error.problem}", f"line {mark.line + 1}" if mark else "YAML") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyError(f"it is no YAML: {error}") from error
