"""Which kernel is in use, and what happens without one, with another version, and after a bug in it."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.native.kernel import kernel_of
from tests.native.test_appends import IPV4, Item, World

from martlet.errors import ConfigError
from martlet.runtime import native
from martlet.runtime.installed import installed_version
from martlet.runtime.native import kernel_name, use_kernel
from martlet.store.append.usual import put_usual

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose anew in each test, and leave the choice of this process as it was."""
    monkeypatch.setattr(native, "_kernel", native._Kernel())
    monkeypatch.delenv("MARTLET_NATIVE", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let Python find a kernel of *version*, or none."""
    module: ModuleType | None = None
    if version is not None:
        module = ModuleType("martlet_native")
        module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "martlet_native", module)


def test_an_installed_kernel_is_used() -> None:
    assert kernel_name() == "native"
    assert native.native(put_usual) is kernel_of(put_usual)


@pytest.mark.parametrize("by_variable", [True, False])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    if by_variable:
        monkeypatch.setenv("MARTLET_NATIVE", "off")
    use_kernel("auto" if by_variable else "off")
    assert kernel_name() == "python"
    assert native.native(put_usual) is put_usual


def test_everything_works_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    use_kernel("auto")
    assert native.native(put_usual) is put_usual
    with pytest.raises(ConfigError, match=r"broker.native is 'require', but the native kernel is not installed .*pip"):
        use_kernel("require")


def test_a_kernel_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.0.7")
    use_kernel("auto")
    assert kernel_name() == "python"
    assert f"it is of version 0.0.7, but Martlet is {installed_version()}; install its own" in caplog.text
    with pytest.raises(ConfigError, match=r"version 0\.0\.7"):
        use_kernel("require")


def test_kernel_and_martlet_have_one_version() -> None:
    files = "pyproject.toml", "native/pyproject.toml", "native/Cargo.toml"
    versions = [re.search(r'^version = "(.+)"$', (ROOT / each).read_text(), re.MULTILINE) for each in files]
    assert [found and found[1] for found in versions] == [installed_version()] * 3
    assert f'"martlet-native=={installed_version()}"' in (ROOT / "pyproject.toml").read_text()


def test_each_function_has_one_twin_and_a_row_on_the_page() -> None:
    """`native` finds a function by its name alone: a second function of that name would get it, too."""
    kernel = import_module("martlet_native")
    functions = {name for name in vars(kernel) if callable(getattr(kernel, name))}
    found: list[tuple[str, str]] = []
    for package in [
        *(ROOT / "columns").glob("*/"),
        *(ROOT / "core").glob("*/"),
        *(ROOT / "plugins").glob("*/*/"),
        *(ROOT / "spark_connector").glob("*/"),
    ]:
        for file in package.rglob("*.py"):
            names = functions & set(re.findall(r"^def (\w+)\(", file.read_text(), re.MULTILINE))
            found += [(name, file.relative_to(package.parent).as_posix()) for name in names]
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", (ROOT / "docs/native.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(rows)
    assert len(found) == len(functions)


def test_the_version_names_the_kernel() -> None:
    found = subprocess.run([sys.executable, "-m", "martlet", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"martlet {installed_version()} (kernel: native)\n"


def test_a_bug_in_the_kernel_costs_one_message() -> None:
    """A queue that tells a wrong size makes the kernel panic, as a bug would; what was appended before it stays."""
    world, rest = World(4900, [0] * 4), (b"body", b"", 0, 0, 0, 0, IPV4, 0, 0)
    world.queues[1].overhead -= 5
    function: Any = kernel_of(put_usual)
    with pytest.raises(RuntimeError, match="the native kernel failed in put_usual: range end index"):
        world.put(function, [Item(0, rest), Item(1, rest), Item(0, rest)], IPV4, 1, 300, False, False, [])
    first, second, *_ = world.queues
    assert (first.next_offset, second.next_offset, len(world.pending)) == (1, 0, 1)
    assert world.tail.position == 1010 + first.overhead + 4
