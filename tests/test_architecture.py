"""docs/architecture.md shows the packages as they are, and docs/state.md the files of what survives a restart."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("core/martlet", "plugins/*/martlet_*", "spark_connector/martlet_spark", "columns/martlet_columns")
PAGE: Final = (ROOT / "docs/architecture.md").read_text()
ROWS: Final = dict(re.findall(r"^\| `([\w/]+)/` \| (.+) \|$", PAGE, re.MULTILINE))
PACKAGES: Final = sorted(
    file.parent.relative_to(ROOT)
    for pattern in PRODUCT
    for top in ROOT.glob(pattern)
    for file in top.rglob("__init__.py")
)
# Of docs/state.md: package, live object, journal writer, journal codec, projection.
STATES: Final = re.findall(
    r"^\| [\w ]+ \| `([\w/]+/)` \|(.*)\|(.*)\|(.*)\|(.*)\|$", (ROOT / "docs/state.md").read_text(), re.MULTILINE
)
PROJECTION: Final = {"apply", "freeze", "restore", "forget", "floor", "roll"}
# MQTT, STOMP and RocketMQ remoting have folders of the same names; a name in the same folder of each means the same.
PROTOCOLS: Final = re.compile(r"plugins/\w+/martlet_(?:mqtt|stomp|remoting)/(\w+)\b")
# The client's faces for asyncio and for threads have the names of the client.
FACES: Final = re.compile(r"martlet_client/(aio|blocking)\.py$")
# Applications make a `Message` for the client, plugins one for the broker.
TWICE: Final = {"Message"}
# Of docs/decisions/0044-large-classes.md: class, methods, attributes.
LARGE: Final = {
    (name, int(methods), int(attributes))
    for name, methods, attributes in re.findall(
        r"^\| `(\w+)` \| (\d+) \| (\d+) \|", (ROOT / "docs/decisions/0044-large-classes.md").read_text(), re.MULTILINE
    )
}
METHODS_MAX: Final = 30
ATTRIBUTES_MAX: Final = 20
LIST_METHODS: Final = 2  # a record of settings or counters, or an enumeration, has no more
# More files than a reader can hold at once; a package that grows beyond is divided.
FILES_MAX: Final = 30


def first_line(package: Path) -> str:
    found = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert found, f"{package} has no docstring"
    return found.split("\n")[0]


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_each_package_has_a_row_with_its_docstring(package: Path) -> None:
    assert ROWS.get(str(package)) == first_line(package)


def test_each_row_is_a_package() -> None:
    assert {Path(row) for row in ROWS} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_no_package_has_more_files_than_a_reader_can_hold(package: Path) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= FILES_MAX


def test_tests_mirror_the_core() -> None:
    core = {path.name for path in (ROOT / "core/martlet").iterdir() if (path / "__init__.py").exists()}
    untested = {package for package in core if not (ROOT / "tests" / package).is_dir()}
    # Their tests are with those of the packages that use them: records with the store, offline with damage and store.
    assert untested == {"contracts", "offline", "records", "testing"}


def test_the_page_names_only_files_that_exist() -> None:
    places = (ROOT, ROOT / "core/martlet", ROOT / "plugins/mqtt/martlet_mqtt")
    for name in set(re.findall(r"\b[\w/]+\.py\b", PAGE)):
        assert any((place / name).exists() for place in places), name


def test_the_page_on_state_names_only_files_that_exist() -> None:
    assert len(STATES) == 7
    for package, *cells in STATES:
        for cell in filter(None, map(str.strip, cells)):
            assert (ROOT / package / cell.strip("`")).is_file(), package + cell


def test_the_page_on_state_has_every_projection() -> None:
    projections = {
        file.relative_to(ROOT)
        for pattern in PRODUCT
        for top in ROOT.glob(pattern)
        for file in top.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases)
        if PROJECTION.issubset(each.name for each in node.body if isinstance(each, ast.FunctionDef))
    }
    assert {Path(row[0], row[-1].strip(" `")) for row in STATES} == projections


def test_a_journal_has_the_same_file_names_in_every_package() -> None:
    names = [[Path(cell.strip(" `")).name for cell in row[2:]] for row in STATES]
    assert {writer for writer, _, _ in names} == {"", "journal_writer.py"}
    assert {(codec, state) for _, codec, state in names} == {("journal_codec.py", "state.py"), ("", "retained.py")}


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, set[str]] = {}
    for file in (file for pattern in PRODUCT for top in ROOT.glob(pattern) for file in top.rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if FACES.search(path):
            continue
        protocol = PROTOCOLS.match(path)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(protocol[1] if protocol else path)
    assert {name for name, places in homes.items() if len(places) > 1} == TWICE


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the fields of a class, and the attributes that its methods assign."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and "ClassVar" not in ast.unparse(each)
    }
    assigned = {
        each.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return fields | assigned


def test_a_large_class_has_a_reason_on_the_page() -> None:
    large = set()
    for file in (file for pattern in PRODUCT for top in ROOT.glob(pattern) for file in top.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                attributes = attributes_of(node)
                is_large = len(methods) > METHODS_MAX or len(attributes) > ATTRIBUTES_MAX
                if is_large and len(methods) > LIST_METHODS:
                    large.add((node.name, len(methods), len(attributes)))
    assert large == LARGE
