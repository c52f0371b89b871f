"""The dependencies of users for pip-audit, and its verdict in a sentence (see `.ci/audit`).

``python -m tests.audit requirements`` prints them, ``python -m tests.audit report REPORT ERRORS`` reads what pip-audit
wrote as JSON and on stderr.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

OURS = "martlet-"  # distributions of this project


def requirements() -> list[str]:
    """Return what an installation with all extras requires of others, and what a build does."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    return [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra if not each.startswith(OURS)),
        *content["build-system"]["requires"],
    ]


def verdict(report: str, errors: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines to print; *report* is empty if pip-audit failed."""
    if not report:
        lines = [line for line in errors.splitlines() if line.strip()] or ["pip-audit wrote nothing"]
        return 0, [f"NOT AUDITED: pip-audit failed: {lines[-1].strip()}"]
    packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        reason = skipped[0]["skip_reason"] if skipped else "there are none"
        return 0, [f"NOT AUDITED: none of {len(packages)} packages could be looked up: {reason}"]
    lines = [f"{package['name']} could not be looked up: {package['skip_reason']}" for package in skipped]
    for package in packages:
        for each in package.get("vulns", ()):
            fixed = ", ".join(each["fix_versions"]) or "no version yet"
            lines.append(f"{package['name']} {package['version']} has {each['id']}; fixed in {fixed}")
    return int(bool(lines)), lines or [f"{len(packages)} packages have no known vulnerability"]


def main(arguments: list[str]) -> int:
    """Run one of the two commands and return its exit code."""
    match arguments:
        case ["requirements"]:
            print("\n".join(requirements()))
            return 0
        case ["report", report, errors]:
            content = Path(report).read_text() if Path(report).exists() else ""
            code, lines = verdict(content, Path(errors).read_text())
            print("\n".join(lines))
            return code
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
