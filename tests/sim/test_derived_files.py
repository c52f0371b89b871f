"""Each derived file, damaged after a stop: clients see no difference."""

import pytest

from .derived import DAMAGES, FILES, STOPS, Damage, damage_one

# Each file once, with all twelve pairs of damage and stop in turn; ``python -m tests.sim --derived`` runs the product.
CASES = [(name, DAMAGES[row % len(DAMAGES)], STOPS[row % len(STOPS)]) for row, name in enumerate(FILES)]


@pytest.mark.parametrize(
    ("prefix", "damage", "stop"),
    [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}-{each[2]}") for each in CASES],
)
def test_a_damaged_derived_file_changes_nothing(prefix: str, damage: Damage, stop: str) -> None:
    outcome = damage_one(prefix, damage, stop)
    assert outcome.failure is None, outcome.report()
