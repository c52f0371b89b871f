"""The checks of the kernel's wheels find each thing that can be wrong with them."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from .native_wheels import (
    LIBRARY,
    MACHINES,
    ROOT,
    crate_problems,
    folder_problems,
    kernel_version,
    machine_of,
    sdist_problems,
    wheel_files,
    wheel_problems,
)

PLATFORM = "manylinux2014_x86_64"
NAME = "martlet_native-1.2.3-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
METADATA = "Name: martlet-native\nVersion: 1.2.3\nRequires-Python: >=3.11\nLicense-Expression: Apache-2.0\n"
WHEEL = "Wheel-Version: 1.0\nTag: cp311-abi3-manylinux2014_x86_64\nTag: cp311-abi3-manylinux_2_17_x86_64\n"
INFO = "martlet_native-1.2.3.dist-info"
TREE = """martlet-native v1.2.3 (/work)|Apache-2.0
memchr v2.7.6|Unlicense OR MIT
libc v0.2.1|MIT OR Apache-2.0
libc v0.2.1|MIT OR Apache-2.0 (*)
"""
PAGE = """These crates are in it:

crate    offered under       used under
libc     MIT OR Apache-2.0   Apache-2.0
memchr   Unlicense OR MIT    Unlicense

Unlicense, of memchr:

Anyone is free to copy.
"""


def elf(machine: str) -> bytes:
    return b"\x7fELF".ljust(18, b"\0") + MACHINES[machine].to_bytes(2, "little")


def wheel_content() -> dict[str, bytes]:
    """Return the files of a wheel that is right."""
    content = dict.fromkeys(wheel_files("1.2.3"), b"")
    return content | {f"{INFO}/METADATA": METADATA.encode(), f"{INFO}/WHEEL": WHEEL.encode(), LIBRARY: elf("x86_64")}


def problems_of(folder: Path, content: dict[str, bytes], name: str = NAME) -> list[str]:
    with ZipFile(folder / name, "w") as archive:
        for each, data in content.items():
            archive.writestr(each, data)
    return wheel_problems(folder / name, PLATFORM, "1.2.3")


def test_a_wheel_that_is_right_has_no_problems(tmp_path: Path) -> None:
    assert problems_of(tmp_path, wheel_content()) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files.pop(f"{INFO}/licenses/LICENSE-CRATES"), f"lacks {INFO}/licenses/LICENSE-CRATES"),
        (lambda files: files.update({"libgcc_s.so.1": b""}), "has the stray file libgcc_s.so.1"),
        (
            lambda files: files.update({f"{INFO}/METADATA": METADATA.replace("1.2.3", "1.2.4").encode()}),
            "version '1.2.4' is not '1.2.3'",
        ),
        (
            lambda files: files.update({f"{INFO}/METADATA": METADATA.replace(">=3.11", ">=3.12").encode()}),
            "Requires-Python '>=3.12' is not '>=3.11'",
        ),
        (
            lambda files: files.update({f"{INFO}/METADATA": METADATA.replace("Apache-2.0", "MIT").encode()}),
            "License-Expression 'MIT' is not 'Apache-2.0'",
        ),
        (
            lambda files: files.update({f"{INFO}/WHEEL": WHEEL.replace("abi3", "cp311").encode()}),
            "tags ['cp311-cp311-manylinux2014_x86_64', 'cp311-cp311-manylinux_2_17_x86_64'] is not "
            "['cp311-abi3-manylinux2014_x86_64', 'cp311-abi3-manylinux_2_17_x86_64']",
        ),
        (lambda files: files.update({LIBRARY: elf("aarch64")}), "machine 'aarch64' is not 'x86_64'"),
        (lambda files: files.update({LIBRARY: b"#!/bin/sh"}), "machine 'not ELF' is not 'x86_64'"),
        (
            lambda files: files.update({LIBRARY: elf("x86_64") + f"{Path.home()}/crates/lib.rs".encode()}),
            f"{LIBRARY} has paths below the home directory of who built it",
        ),
    ],
)
def test_what_is_wrong_inside_a_wheel_is_named(
    tmp_path: Path, change: Callable[[dict[str, bytes]], object], problem: str
) -> None:
    content = wheel_content()
    change(content)
    assert problems_of(tmp_path, content) == [problem]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (NAME.replace("1.2.3", "1.2.2"), "version in its name '1.2.2' is not '1.2.3'"),
        (NAME.replace("_native", "_kernel"), "distribution 'martlet-kernel' is not 'martlet-native'"),
        (
            NAME.replace("manylinux2014_x86_64.manylinux_2_17", "linux"),
            "tags in its name ['cp311-abi3-linux_x86_64'] is not "
            "['cp311-abi3-manylinux2014_x86_64', 'cp311-abi3-manylinux_2_17_x86_64']",
        ),
    ],
)
def test_the_name_of_a_wheel_is_checked(tmp_path: Path, name: str, problem: str) -> None:
    assert problems_of(tmp_path, wheel_content(), name) == [problem]


def test_a_file_that_is_no_wheel_by_its_name_is_named(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, wheel_content(), "martlet_native.whl")
    assert "martlet_native" in problem


def test_an_unknown_machine_is_told_by_its_number() -> None:
    assert machine_of(b"\x7fELF".ljust(18, b"\0") + b"\xf3\0") == "e_machine 243"


def write_sdist(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return path


def test_a_source_distribution_has_the_tracked_files_and_no_others(tmp_path: Path) -> None:
    top = "martlet_native-1.2.3"
    right = write_sdist(tmp_path / f"{top}.tar.gz", [f"{top}/{name}" for name in ("PKG-INFO", "Cargo.lock", "a.rs")])
    assert sdist_problems(right, "1.2.3", ["a.rs"]) == []
    assert sdist_problems(right, "1.2.3", ["b.rs"]) == [f"lacks {top}/b.rs", f"has the stray file {top}/a.rs"]
    assert sdist_problems(right, "1.2.4", ["a.rs"]) == ["the source distribution is not martlet_native-1.2.4.tar.gz"]


def test_a_folder_has_one_wheel_for_each_platform_and_one_source_distribution(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert folder_problems(tmp_path, [PLATFORM], []) == [
        f"{tmp_path} has 0 wheels for {PLATFORM}, not one",
        f"{tmp_path} has 0 source distributions, not one",
        f"{tmp_path} has notes.txt, which nothing expects",
    ]
    assert kernel_version() in (ROOT / "native/Cargo.toml").read_text()


@pytest.mark.parametrize(
    ("tree", "page", "problems"),
    [
        (TREE, PAGE, []),
        (TREE + "sha1 v0.10.6|MIT\n", PAGE, ["crate sha1 (MIT) has no row"]),
        (
            TREE.replace("libc", "libm"),
            PAGE,
            ["crate libm (MIT OR Apache-2.0) has no row", "crate libc has a row, but is not linked"],
        ),
        (
            TREE.replace("MIT OR Apache", "MIT/Apache"),
            PAGE,
            ["crate libc offers 'MIT/Apache-2.0', but its row says 'MIT OR Apache-2.0'"],
        ),
        (
            TREE,
            PAGE.replace("   Apache-2.0\n", "   ISC\n"),
            ["crate libc is used under ISC, which it does not offer", "the text of ISC of crate libc is missing"],
        ),
        (TREE, PAGE.replace("Unlicense, of memchr:", ""), ["the text of Unlicense of crate memchr is missing"]),
    ],
)
def test_each_linked_crate_has_its_license_on_the_page(tree: str, page: str, problems: list[str]) -> None:
    assert crate_problems(tree, page) == problems


def test_the_page_of_the_crates_contradicts_itself_nowhere() -> None:
    page = (ROOT / "native/LICENSE-CRATES").read_text()
    found = crate_problems("", page)
    assert found
    assert [each for each in found if not each.endswith("has a row, but is not linked")] == []
