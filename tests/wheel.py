"""Compares a wheel with the checkout: ``python -m tests.wheel WHEEL`` names the files that it lacks or that differ."""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent


def package_files(root: Path) -> dict[str, Path]:
    """Return the files of all packages by their names in the wheel."""
    content = tomllib.loads((root / "pyproject.toml").read_text())
    folders = [root / name for name in content["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    return {
        path.relative_to(folder.parent).as_posix(): path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


def differences(wheel: Path, files: Mapping[str, Path]) -> list[str]:
    """Return which of *files* the wheel lacks or has with other bytes."""
    with ZipFile(wheel) as archive:
        there = set(archive.namelist())
        return sorted(
            name for name, path in files.items() if name not in there or archive.read(name) != path.read_bytes()
        )


def main(wheel: str) -> int:
    files = package_files(ROOT)
    found = differences(Path(wheel), files)
    for name in found:
        print(f"{wheel} does not have {name} as the checkout has it", file=sys.stderr)
    return int(bool(found) or not files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
