"""What is easy to promise and easy to forget: short functions, good names, and each kind of effect in one module.

The rules are read from the sources that are installed, so they hold for the wheel as well.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGES = (
    "martlet",
    "martlet_acl",
    "martlet_client",
    "martlet_columns",
    "martlet_filter_sql92",
    "martlet_mqtt",
    "martlet_remoting",
    "martlet_stomp",
    "martlet_tiered",
    "martlet_timer",
    "martlet_tx",
)
LINES_MAX = 70
LINES_USUAL = 45
ROOT = Path(__file__).parent.parent
# Phrases to avoid. Write instead: created, rebuilt or restarted; the path of a message; cannot be read, or is unknown;
# now; at most; continues; is notified of; wait for; follows.
BANNED = re.compile(
    r"made anew|begins? anew|begun anew|the way of a message|not to be had|\bjust now\b|\bthe most is\b"
    r"|\bgoes? on by (?:itself|themselves)\b|\bis told of\b|\bto be waited for\b|\bstands behind\b"
)
BAD_NAMES = ("Manager", "Service", "Impl", "Util", "Utils", "Helper", "Helpers")

# what -> (names, as they are written; the only modules and packages that may say them, and why)
EFFECTS = {
    "plugins are resolved": (
        {"import pluggy"},
        {"martlet/plugins/hooks.py": "declares the hooks", "martlet/plugins/loader.py": "calls them"},
    ),
    "the disk is touched": (
        {"open", "os.open", "os.pread", "os.pwrite", "os.fdatasync", "os.fsync", "os.rename", "os.replace", "os.unlink"}
        | {"os.ftruncate", "os.listdir", "os.makedirs", "shutil.rmtree", "tempfile.mkstemp", "mmap.mmap"}
        | {".read_text", ".read_bytes", ".write_text", ".write_bytes", ".mkdir", ".rmdir"},
        {
            "martlet/store/disk/files.py": "the one place with disk access, but for",
            "martlet/store/disk/syncers.py": "the thread that makes files durable",
            "martlet/config.py": "reads the configuration file",
            "martlet/cli/new_plugin.py": "writes the files of a plugin to begin with",
            "martlet/runtime/fsync.py": "makes what others have written durable",
            "martlet/runtime/clock.py": "reads from the kernel when this process began",
            "martlet/runtime/installed.py": "reads what pip has written about the installed packages",
            "martlet/runtime/malloc_trim.py": "reads from the kernel how much memory this process has",
            "martlet/net/unix_sockets.py": "finds a socket by its directory",
            "martlet/net/certificates/self_signed.py": "hands a key to OpenSSL in a file that is on no disk",
            "martlet/net/tls.py": "reads when the certificate of a port ends",
            "martlet_acl/audit.py": "appends to the audit trail",
            "martlet_acl/commands/importing.py": "reads the files that it imports",
            "martlet_acl/tokens.py": "reads the keys of who issues tokens",
            "martlet/store/keys/active_file.py": "maps memory that belongs to no file",
            "martlet_remoting/commands/send.py": "reads the files that it sends",
            "martlet_tiered/credentials.py": "reads the credentials of a store of objects",
            "martlet_tiered/local.py": "keeps objects in a directory",
            "martlet_tiered/upload/worker.py": "tells the kernel to end it before its broker if memory is exhausted",
            "martlet_tiered/reading/sqlite_file.py": "keeps an index, which SQLite reads and writes",
        },
    ),
    "the time of day is read": (
        {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"},
        {"martlet/runtime/clock.py": "the one place with a wall clock"},
    ),
    "chance is used": (
        {"import random", "import secrets", "import uuid", "os.urandom"},
        {
            "martlet/runtime/ids.py": "the one place that makes randomness",
            "martlet/app/startup.py": "gives it the system's seed",
            "martlet/testing/": "makes failures from a seed",
            "martlet_client/": "is the other side: it runs in its user's process, not in the broker's",
        },
    ),
    "a socket is opened": (
        {"socket.socket", "socket.create_server", "socket.create_connection", "trio.open_tcp_stream"}
        | {"trio.open_tcp_listeners", "trio.serve_tcp", "trio.socket.socket", "asyncio.start_server"},
        {
            "martlet/net/server.py": "the one place that listens",
            "martlet/net/unix_sockets.py": "the same for the broker's own administrators, by the file system",
            "martlet/cli/server.py": "connects the commands of protocols to a broker",
            "martlet_client/": "is the other side: it runs in its user's process, not in the broker's",
            "martlet_remoting/dialing.py": "reaches name servers elsewhere, to register there",
            "martlet/app/startup.py": "tells systemd that it accepts",
        },
    ),
    "code is made from data": (
        {"eval", "exec", "import pickle", "import marshal", "import shelve", "__import__"},
        {},
    ),
}


def sources() -> list[tuple[str, Path]]:
    """Every module as ("martlet/store/store.py", where it is)."""
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None, f"{package} is not installed"
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        found += [(f"{package}/{path.relative_to(folder)}", path) for path in sorted(folder.rglob("*.py"))]
    return found


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(name, ast.parse(path.read_text(), name)) for name, path in sources()]


def functions() -> Iterator[tuple[str, int]]:
    """Every function with its length in lines, its decorators and docstring not counted."""
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1 + (node.body[0].lineno - node.lineno)
                yield f"{name}:{node.lineno} {node.name}", length


@cache
def spoken(tree: ast.Module) -> list[tuple[int, str]]:
    """Every import and every call with its line, as it is written: "import pluggy", "os.open", ".mkdir"."""
    return list(_spoken(tree))


def _spoken(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {alias.name.partition('.')[0]}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, f"import {(node.module or '').partition('.')[0]}"
        elif isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            yield node.lineno, text
            if isinstance(node.func, ast.Attribute):
                yield node.lineno, f".{node.func.attr}"


def test_no_function_is_longer_than_a_page() -> None:
    assert [(where, lines) for where, lines in functions() if lines > LINES_MAX] == []


def test_nineteen_functions_in_twenty_are_short() -> None:
    lengths = [lines for _, lines in functions()]
    long = sum(lines > LINES_USUAL for lines in lengths)
    assert long * 20 <= len(lengths)


def test_classes_are_nouns_of_the_domain() -> None:
    bad = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(BAD_NAMES)
    ]
    assert bad == []


def test_no_error_is_swallowed_whole() -> None:
    bad = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (ast.unparse(node.type) in ("Exception", "BaseException") and isinstance(node.body[0], ast.Pass))
        )
    ]
    assert bad == []


@pytest.mark.parametrize("effect", EFFECTS)
def test_each_effect_lives_in_its_own_modules(effect: str) -> None:
    names, modules = EFFECTS[effect]
    bad = [
        f"{name}:{line} {text}"
        for name, tree in trees()
        if not name.startswith(tuple(modules))
        for line, text in spoken(tree)
        if text in names
    ]
    assert bad == []


@pytest.mark.parametrize("effect", EFFECTS)
def test_every_exception_is_needed(effect: str) -> None:
    names, modules = EFFECTS[effect]
    used = {name for name, tree in trees() for _, text in spoken(tree) if text in names}
    assert [module for module in modules if not any(name.startswith(module) for name in used)] == []


def test_banned_phrases_do_not_return() -> None:
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    texts = sources() + [(str(path.relative_to(ROOT)), path) for path in pages if path.exists()]
    found = [
        f"{name}: {phrase}" for name, path in texts for phrase in BANNED.findall(" ".join(path.read_text().split()))
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    assert [name for name, tree in trees() if not ast.get_docstring(tree)] == []


WIDTH = 120
# Printed by `tools.manual`, a line for each signature or key.
MADE = ("cli.md", "client-api.md", "config.md", "plugin-api.md")


def prose_lines(page: Path) -> Iterator[str]:
    """The lines of *page* outside of code, tables and headings."""
    is_code = False
    for line in page.read_text("utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith(("|", "#", "    ", "<")):
            yield line


def test_prose_is_wrapped() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in MADE]
    pages += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for line in prose_lines(page)
        if len(line) > WIDTH and " " in re.sub(r"`[^`]*`|\]\([^)]*\)", "", line.strip())[:WIDTH]
    ]
    assert not wide, "wrap at 120 columns:\n" + "\n".join(wide)
