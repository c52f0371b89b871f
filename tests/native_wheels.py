"""Checks what `.ci/wheels` builds: the wheels and the source distribution of the native kernel, and its crates.

``python -m tests.native_wheels files FOLDER PLATFORM...`` names what is wrong in FOLDER, which must hold the source
distribution and one wheel for each platform, such as ``musllinux_1_2_x86_64``. ``python -m tests.native_wheels crates``
reads the output of ``cargo tree --prefix none --format '{p}|{l}'`` and compares it with `native/LICENSE-CRATES`.
"""

import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

ROOT: Final = Path(__file__).parent.parent
LIBRARY: Final = "martlet_native/martlet_native.abi3.so"
# manylinux2014 is the old name of manylinux_2_17 (PEP 600); a wheel has the tags of both.
ALIASES: Final = {"manylinux2014": "manylinux_2_17"}
# e_machine of the ELF header, at byte 18 (ELF-64 Object File Format, "ELF Header").
MACHINES: Final = {"x86_64": 62, "aarch64": 183}
LICENSE: Final = "Apache-2.0"


def kernel_version() -> str:
    """Return the version that `native/pyproject.toml` gives the kernel; Martlet has the same."""
    version: str = tomllib.loads((ROOT / "native/pyproject.toml").read_text())["project"]["version"]
    return version


def wheel_problems(wheel: Path, platform: str, version: str) -> list[str]:
    """Return what is wrong with *wheel* as the kernel's only wheel for *platform*."""
    try:
        name, found_version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        return [str(error)]
    info = f"martlet_native-{version}.dist-info"
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        found = _file_differences(names, wheel_files(version))
        if found:
            return found
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        wheel_tags = Parser().parsestr(archive.read(f"{info}/WHEEL").decode()).get_all("Tag", [])
        library = archive.read(LIBRARY)
    wanted_tags = platform_tags(platform)
    facts = [
        ("distribution", str(name), "martlet-native"),
        ("version in its name", str(found_version), version),
        ("version", metadata["Version"], version),
        ("Requires-Python", metadata["Requires-Python"], ">=3.11"),
        ("License-Expression", metadata["License-Expression"], LICENSE),
        ("tags in its name", _sorted_tags(tags), _sorted_tags(wanted_tags)),
        ("tags", sorted(wheel_tags), _sorted_tags(wanted_tags)),
        ("machine", machine_of(library), next(name for name in MACHINES if platform.endswith(name))),
    ]
    problems = [f"{what} {value!r} is not {wanted!r}" for what, value, wanted in facts if value != wanted]
    if f"{Path.home()}/".encode() in library:
        problems.append(f"{LIBRARY} has paths below the home directory of who built it")
    return problems


def wheel_files(version: str) -> set[str]:
    """Return the names of all files in a wheel of the kernel."""
    info = f"martlet_native-{version}.dist-info"
    licenses = {f"licenses/{path.name}" for path in (ROOT / "native").glob("LICENSE*")}
    inside = {"METADATA", "RECORD", "WHEEL", "sboms/martlet-native.cyclonedx.json", *licenses}
    return {"martlet_native/__init__.py", LIBRARY, *(f"{info}/{name}" for name in inside)}


def platform_tags(platform: str) -> set[Tag]:
    """Return the tags of a wheel for *platform* and all versions of CPython from 3.11 on."""
    policy, _, rest = platform.partition("_")
    names = {platform, f"{ALIASES.get(policy, policy)}_{rest}"}
    return {Tag("cp311", "abi3", name) for name in names}


def machine_of(library: bytes) -> str:
    """Return the machine that an ELF library is for, or what else it is."""
    if library[:4] != b"\x7fELF":
        return "not ELF"
    number = int.from_bytes(library[18:20], "little")
    return next((name for name, each in MACHINES.items() if each == number), f"e_machine {number}")


def sdist_problems(sdist: Path, version: str, tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with *sdist*, which must have the *tracked* files of `native/` and what maturin adds."""
    top = f"martlet_native-{version}"
    if sdist.name != f"{top}.tar.gz":
        return [f"the source distribution is not {top}.tar.gz"]
    with tarfile.open(sdist) as archive:
        names = {member.name for member in archive if not member.isdir()}
    wanted = {f"{top}/{name}" for name in [*tracked, "Cargo.lock", "PKG-INFO"]}
    return _file_differences(names, wanted)


def folder_problems(folder: Path, platforms: Sequence[str], tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with the files in *folder*."""
    version, problems, seen = kernel_version(), [], set[Path]()
    for platform in platforms:
        wheels = sorted(folder.glob(f"*{platform}*.whl"))
        if len(wheels) != 1:
            problems.append(f"{folder} has {len(wheels)} wheels for {platform}, not one")
        for wheel in wheels:
            problems += [f"{wheel.name}: {problem}" for problem in wheel_problems(wheel, platform, version)]
        seen.update(wheels)
    sdists = sorted(folder.glob("*.tar.gz"))
    if len(sdists) != 1:
        problems.append(f"{folder} has {len(sdists)} source distributions, not one")
    for sdist in sdists:
        problems += [f"{sdist.name}: {problem}" for problem in sdist_problems(sdist, version, tracked)]
    strays = set(folder.iterdir()) - seen - set(sdists)
    return problems + sorted(f"{folder} has {path.name}, which nothing expects" for path in strays)


def crate_problems(tree: str, page: str) -> list[str]:
    """Return how the table of *page* differs from *tree*, the crates that are linked into the kernel.

    A crate needs a row with the licenses that it offers. One of these applies; if it is not that of the kernel itself,
    the page has its text, below a line such as ``MIT, of generic-array:``.
    """
    linked = dict(sorted(_offers(tree)))
    rows = re.findall(r"^([\w-]+) {2,}(\S.*?) {2,}(\S+)$", page, re.MULTILINE)
    table = {name: (offered, used) for name, offered, used in rows if name != "crate"}
    problems = [f"crate {name} ({linked[name]}) has no row" for name in linked if name not in table]
    for name, (offered, used) in table.items():
        if name not in linked:
            problems.append(f"crate {name} has a row, but is not linked")
        elif linked[name] != offered:
            problems.append(f"crate {name} offers {linked[name]!r}, but its row says {offered!r}")
        if used not in re.split(r" OR |/", offered):
            problems.append(f"crate {name} is used under {used}, which it does not offer")
        if used != LICENSE and f"\n{used}, of {name}:\n" not in page:
            problems.append(f"the text of {used} of crate {name} is missing")
    return problems


def _offers(tree: str) -> set[tuple[str, str]]:
    lines = [line.removesuffix(" (*)") for line in tree.splitlines() if line]
    pairs = {(line.split()[0], line.partition("|")[2].strip()) for line in lines}
    return {pair for pair in pairs if pair[0] != "martlet-native"}


def _sorted_tags(tags: Iterable[Tag]) -> list[str]:
    return sorted(str(tag) for tag in tags)


def _file_differences(names: set[str], wanted: set[str]) -> list[str]:
    return [
        *(f"lacks {name}" for name in sorted(wanted - names)),
        *(f"has the stray file {name}" for name in sorted(names - wanted)),
    ]


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands and return its exit code."""
    match arguments:
        case ["files", folder, *platforms]:
            words = ["git", "-C", str(ROOT / "native"), "ls-files"]
            tracked = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
            problems = folder_problems(Path(folder), platforms, tracked)
        case ["crates"]:
            problems = crate_problems(sys.stdin.read(), (ROOT / "native/LICENSE-CRATES").read_text())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
