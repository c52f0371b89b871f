"""API reference pages in Markdown: signatures as they are in the source, and docstrings.

The source is parsed, not imported, so defaults and annotations appear as written. A docstring is text with sections:
``Args:``, ``Attributes:`` and ``Raises:`` with an item per line, ``Example:`` with code.
"""

import ast
import importlib.util
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias, final

from msgspec import Struct

__all__ = ["Chapter", "api_page", "exported"]

SIGNATURE_CHARACTERS_MAX: Final = 100
SECTION: Final = re.compile(r"^(Args|Attributes|Raises|Example):$")
ITEM: Final = re.compile(r"^([\w., `]+): +(.*)$", re.DOTALL)
# Base classes whose methods are not listed.
NOT_CALLED: Final = ("Protocol", "TypingProtocol", "Enum", "ABC")
# Decorators that a caller must know about.
DECORATORS: Final = ("classmethod", "contextmanager", "asynccontextmanager")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@final
class Chapter(Struct, frozen=True):
    """A heading and the public names of one module below it.

    ``Class`` stands for a class with all its methods, ``Class(): method method`` for a class with only these methods.
    ``Class: method method`` also omits the constructor, because users do not create such objects.
    """

    title: str
    module: str
    names: tuple[str, ...]


@final
class Source:
    """The parsed source of one module."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"module {name!r} has no source; install it")
        self.name = name
        self.package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        text = Path(spec.origin).read_text()
        self.lines = text.splitlines()
        self.body = ast.parse(text).body

    def find(self, name: str) -> ast.stmt | None:
        """Return the statement that defines *name* here, None if none does."""
        return next((node for node in self.body if name in _defined(node)), None)

    def origin(self, name: str) -> "Source | None":
        """Return the module of this project that *name* is imported from here, None if it is not."""
        for node in self.body:
            if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)
                return source(module) if module.startswith("martlet") else None
        return None

    def text(self, node: ast.stmt) -> str:
        """Return the source text of *node* without its trailing comment."""
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno]).partition("  # ")[0]

    def comment(self, node: ast.stmt) -> str:
        """Return the trailing comment of *node*, or the comment lines right above it."""
        trailing = self.lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
        above: list[str] = []
        at = node.lineno - 2
        while at >= 0 and self.lines[at].startswith("# "):
            above.insert(0, self.lines[at][2:])
            at -= 1
        return trailing or " ".join(above)


source = cache(Source)


def _written(node: ast.expr) -> str:
    """Return an expression on one line, formatted as in the project."""
    return re.sub(r"""(?<!\w)(b?)'([^'"]*)'""", r'\1"\2"', ast.unparse(node))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _resolve(module: Source, name: str) -> tuple[Source, ast.stmt]:
    """Follow imports from *module*; return the module that defines *name*, and the defining statement."""
    node = module.find(name)
    if node is not None:
        return module, node
    origin = module.origin(name)
    if origin is None:
        raise LookupError(f"name {name!r} is not defined in {module.name}; correct the page's chapter")
    return _resolve(origin, name)


def exported(module: str) -> list[str]:
    """Return the names in the ``__all__`` of *module*."""
    node = source(module).find("__all__")
    assert isinstance(node, ast.Assign)
    return list(ast.literal_eval(node.value))


def api_page(head: str, chapters: Sequence[Chapter]) -> str:
    """Return a page: *head*, a list of the names in each chapter, and their signatures and docstrings."""
    blocks = [head]
    anchor = _anchors(re.findall(r"(?m)^#+ (.*)$", head))
    found = [(anchor(chapter.title), *(anchor(_name(entry)) for entry in chapter.names)) for chapter in chapters]
    for chapter, (_, *anchors) in zip(chapters, found, strict=True):
        names = [_name(entry) for entry in chapter.names]
        links = ", ".join(f"[`{name}`](#{place})" for name, place in zip(names, anchors, strict=True))
        blocks.append(f"- {chapter.title}: {links}\n")
    for chapter in chapters:
        blocks.append(f"\n## {chapter.title}\n\nFrom `{chapter.module}`.\n")
        for entry in chapter.names:
            blocks += _entry(entry, *_resolve(source(chapter.module), _name(entry)))
    return "".join(blocks)


def _anchors(taken: Iterable[str]) -> Callable[[str], str]:
    """Return a function that maps the headings of a page, called in order, to their anchors; *taken* come first.

    As GitHub does it: lower case, hyphens for blanks, no other punctuation, and a number for a repeated heading.
    """
    counts = Counter[str]()

    def anchor(heading: str) -> str:
        plain = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        counts[plain] += 1
        return plain if counts[plain] == 1 else f"{plain}-{counts[plain] - 1}"

    for heading in taken:
        anchor(heading)
    return anchor


def _name(entry: str) -> str:
    return entry.partition(":")[0].removesuffix("()")


def _entry(entry: str, module: Source, node: ast.stmt) -> Iterator[str]:
    yield f"\n### `{_name(entry)}`\n"
    if isinstance(node, ast.ClassDef):
        head, _, methods = entry.partition(":")
        is_made = head.endswith("()") or not methods
        yield _code(_head(module, node) if is_made else f"class {node.name}")
        yield from _class(module, node, methods.split())
    elif isinstance(node, Function):
        yield _code(_signature(module, node))
        yield _text(ast.get_docstring(node))
    else:
        yield _code(module.text(node))
        yield f"\n{_prose(module.comment(node))}\n" if module.comment(node) else ""


# Classes


def _class(module: Source, node: ast.ClassDef, wanted: Sequence[str]) -> Iterator[str]:
    yield _text(ast.get_docstring(node))
    if "Enum" in _bases(node):
        members = [name for item in node.body for name in _defined(item) if isinstance(item, ast.Assign)]
        yield f"\nMembers: {', '.join(f'`{name}`' for name in members)}.\n"
    elif not _is_record(node):
        yield from _attributes(module, node)
    methods = {
        item.name: (owner_module, item)
        for owner_module, owner in (*_parents(module, node), (module, node))
        for item in owner.body
        if isinstance(item, Function)
        and not item.name.startswith("_")
        and (ast.get_docstring(item) or _is_property(item))
    }
    for name in wanted or methods:
        yield from _method(node.name, *methods[name])


def _head(module: Source, node: ast.ClassDef) -> str:
    init = next((item for item in node.body if isinstance(item, Function) and item.name == "__init__"), None)
    if _is_record(node):
        return _arranged(f"class {node.name}(", _fields(node), ")")
    if init is None or _is_error(node):
        bases = ", ".join(_bases(node)).replace("TypingProtocol", "Protocol")
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return _arranged(f"class {node.name}(", _parameters(module, init), ")")


def _bases(node: ast.ClassDef) -> list[str]:
    return [_written(base) for base in node.bases]


def _is_record(node: ast.ClassDef) -> bool:
    is_dataclass = any("dataclass" in _written(decorator) for decorator in node.decorator_list)
    return is_dataclass or not {"NamedTuple", "Struct"}.isdisjoint(_bases(node))


def _is_error(node: ast.ClassDef) -> bool:
    return any(base.endswith(("Error", "Exception", "Refused")) for base in _bases(node))


def _fields(node: ast.ClassDef) -> list[str]:
    fields = [
        _field(item)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and not _written(item.annotation).startswith("ClassVar")
    ]
    return ["*", *fields] if any(word.arg == "kw_only" for word in node.keywords) else fields


def _field(item: ast.AnnAssign) -> str:
    text = f"{_written(item.target)}: {_written(item.annotation)}"
    if item.value is None:
        return text
    if isinstance(item.value, ast.Call) and _written(item.value.func) == "field":
        factories = [word.value for word in item.value.keywords if word.arg == "default_factory"]
        return f"{text} = {_written(factories[0])}()" if factories else text
    return f"{text} = {_written(item.value)}"


def _attributes(module: Source, node: ast.ClassDef) -> Iterator[str]:
    found = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if found:
        yield "\n"
    for item in found:
        comment = module.comment(item)
        yield f"- `{_written(item.target)}: {_written(item.annotation)}`{comment and f' ({comment})'}\n"


def _parents(module: Source, node: ast.ClassDef) -> Iterator[tuple[Source, ast.ClassDef]]:
    """Yield the project's own base classes, for their inherited methods; none for errors and protocols."""
    for base in _bases(node):
        if base not in NOT_CALLED and not _is_error(node):
            try:
                found_in, found = _resolve(module, base.partition("[")[0])
            except LookupError:
                continue
            if isinstance(found, ast.ClassDef):
                yield from _parents(found_in, found)
                yield found_in, found


def _method(owner: str, module: Source, node: Function) -> Iterator[str]:
    yield f"\n#### `{owner}.{node.name}`\n"
    if _is_property(node):
        yield _code(f"{node.name}: {_annotation(node.returns)}")
    else:
        yield _code(_signature(module, node))
    yield _text(ast.get_docstring(node))


# Signatures


def _signature(module: Source, node: Function) -> str:
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {_annotation(node.returns)}" if node.returns else ""
    told = [f"@{name}\n" for decorator in node.decorator_list if (name := _written(decorator)) in DECORATORS]
    return "".join(told) + _arranged(f"{word} {node.name}(", _parameters(module, node), f"){returns}")


def _is_property(node: Function) -> bool:
    return "property" in [_written(decorator) for decorator in node.decorator_list]


def _annotation(node: ast.expr | None) -> str:
    """Return an annotation without the quotes of forward references."""
    text = _written(node) if node is not None else "None"
    return text if "Literal[" in text else text.replace('"', "")


def _parameters(module: Source, node: Function) -> list[str]:
    """Return the parameters in order, without self and cls."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = zip(positional, [*defaults, *arguments.defaults], strict=True)
    found = [_parameter(module, *pair) for pair in pairs if pair[0].arg not in ("self", "cls")]
    if arguments.vararg:
        found.append(f"*{_parameter(module, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_parameter(module, *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        found.append(f"**{_parameter(module, arguments.kwarg, None)}")
    return found


def _parameter(module: Source, argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation:
        text += f": {_annotation(argument.annotation)}"
    if default is not None:
        text += f" = {_default(module, default)}" if argument.annotation else f"={_default(module, default)}"
    return text


def _default(module: Source, default: ast.expr) -> str:
    """Return a default as written; for a constant of the project, its value."""
    text = _written(default)
    if text.isupper() and text.isidentifier():
        node = _resolve(module, text)[1]
        if isinstance(node, ast.AnnAssign) and node.value is not None and not isinstance(node.value, ast.Call):
            return _written(node.value)
    return text


def _arranged(start: str, parts: Sequence[str], end: str) -> str:
    """Return a signature on one line, or with one line for each part if it is too long."""
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) <= SIGNATURE_CHARACTERS_MAX:
        return line
    return "\n".join([start, *(f"    {part}," for part in parts), end])


# Docstrings


def _code(text: str) -> str:
    return f"\n```python\n{text}\n```\n"


def _prose(text: str) -> str:
    return text.replace("``", "`")


def _text(docstring: str | None) -> str:
    """Return a docstring as Markdown."""
    blocks: list[str] = []
    for title, lines in _sections(inspect.cleandoc(docstring or "").splitlines()):
        body = textwrap.dedent("\n".join(lines)).strip("\n")
        if title == "Example":
            blocks.append(_code(body))
        elif title:
            blocks.append(f"\n{title}:\n\n" + "".join(_items(body)))
        elif body:
            blocks.append(f"\n{_prose(body)}\n")
    return "".join(blocks)


def _sections(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Split a docstring into (title, lines); a section ends with its indentation."""
    title = ""
    found: list[str] = []
    for line in lines:
        heading = SECTION.match(line)
        if heading or (title and line and not line.startswith(" ")):
            yield title, found
            title, found = heading[1] if heading else "", []
        if not heading:
            found.append(line)
    yield title, found


def _items(body: str) -> Iterator[str]:
    """Yield the items of a section; the continuation lines of an item are indented further."""
    for item in re.split(r"\n(?=\S)", body):
        found = ITEM.match(" ".join(item.split()))
        if found is None:
            yield f"- {_prose(' '.join(item.split()))}\n"
        else:
            names = ", ".join(f"`{name.strip('` ')}`" for name in found[1].split(","))
            yield f"- {names}: {_prose(found[2])}\n"
