"""The limits of the dependencies' versions, and what `.ci/audit` makes of pip-audit's report."""

import json
from importlib.metadata import version
from typing import Any

import pytest
from packaging.requirements import Requirement

from .audit import requirements, verdict

FINE = {"name": "trio", "version": "0.35.0", "vulns": []}
SKIPPED = {"name": "isal", "skip_reason": "not found"}
FAULTY = {"name": "h11", "version": "0.15", "vulns": [{"id": "CVE-1", "fix_versions": ["0.16"], "aliases": []}]}


@pytest.mark.parametrize("line", sorted(set(requirements())))
def test_each_dependency_has_an_upper_bound_and_is_tested_within_its_bounds(line: str) -> None:
    """A new major version must not reach users before the tests ran with it."""
    requirement = Requirement(line)
    operators = {each.operator for each in requirement.specifier}
    assert operators == {">=", "<"}, f"{line}: write it as NAME>=TESTED,<NEXT"
    if requirement.marker is None or requirement.marker.evaluate():
        assert version(requirement.name) in requirement.specifier


@pytest.mark.parametrize(
    ("packages", "code", "text"),
    [
        ([FINE, FINE], 0, "2 packages have no known vulnerability"),
        ([FINE, FAULTY], 1, "h11 0.15 has CVE-1; fixed in 0.16"),
        ([FINE, SKIPPED], 1, "isal could not be looked up: not found"),
        ([SKIPPED, SKIPPED], 0, "NOT AUDITED: none of 2 packages could be looked up: not found"),
    ],
)
def test_the_audit_fails_for_what_is_faulty_or_unknown(packages: list[dict[str, Any]], code: int, text: str) -> None:
    assert verdict(json.dumps({"dependencies": packages, "fixes": []}), "") == (code, [text])


def test_an_audit_that_could_not_run_says_so() -> None:
    assert verdict("", "Traceback\nConnectionError: no route\n") == (
        0,
        ["NOT AUDITED: pip-audit failed: ConnectionError: no route"],
    )
