"""A change of the rules reaches every cached decision, and costs nothing for identities that remember no grant."""

from unittest.mock import patch

import pytest
from tests.delivery.pushing import broker_in_memory

from martlet.access import rules as rules_module
from martlet.access.rules import Decisions, Rules
from martlet.contracts import Identity
from martlet.errors import Refused


async def test_a_grant_that_was_remembered_twice_is_forgotten_at_each_change() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        denied: set[str] = set()
        broker.authorizers = (lambda identity, action, name: name not in denied,)
        gate = broker.gate(Identity("ann"))
        for _ in range(3):
            gate.check_publish("t")
            gate.consume("G", "t")
            assert "t" in gate.publishable
            denied.add("t")
            broker.rules.changed()
            assert "t" not in gate.publishable
            for check in (lambda: gate.check_publish("t"), lambda: gate.consume("G", "t")):
                with pytest.raises(Refused):
                    check()
            denied.clear()
            broker.rules.changed()


async def test_only_decisions_that_remember_a_grant_are_visited_at_a_change() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (lambda identity, action, name: True,)
        gates = [broker.gate(Identity(f"user{number}")) for number in range(100)]
        for gate in gates:
            assert gate.allows("subscribe", "t")
        for gate in gates[:3]:
            gate.check_publish("t")
            gate.consume("G", "t")
        with patch.object(Decisions, "forget", autospec=True) as forget:
            broker.rules.changed()
        assert forget.call_count == 3


def test_decisions_that_are_gone_are_not_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_module, "REMEMBERING_SPARE", 10)
    rules = Rules()
    kept = rules.of(Identity("kept"))
    for number in range(1000):
        rules.note_remembering(rules.of(Identity(f"user{number}")))
    assert len(rules._remembering) <= 10 + 2 * 2 + 1
    rules.note_remembering(kept)
    assert rules._remembering[-1]() is kept
