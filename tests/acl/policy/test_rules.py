"""Single rules: their fields, and what is wrong with one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.rules import ACTIONS, StoredRule, parse_rule


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        (StoredRule("x", ("get",), "allow"), r"^resource: resource 'x' has no kind"),
        (
            StoredRule("*", ("read",), "allow"),
            r"^actions: action 'read' is unknown; write publish, subscribe, .*or all",
        ),
        (StoredRule("*", ("get", "All"), "allow"), r"^actions: action 'All' is unknown"),
        (StoredRule("*", (), "allow"), r"^actions: there are no actions"),
        (StoredRule("*", ("get",), "Allow"), r"^decision: decision 'Allow' is unknown; write allow or deny"),
        (StoredRule("*", ("get",), "allow", ("10.0.0.0/33",)), r"^networks: network '10.0.0.0/33' is no address"),
        (StoredRule("*", ("get",), "allow", ("10.0.*.*",)), r"^networks: network '10.0.\*.\*' is no address"),
        (StoredRule("*", ("get",), "allow", ("10.0.0.0/255.0.0.0",)), r"has no number after the slash"),
        (StoredRule("*", ("get",), "allow", ("10.0.0.0/",)), r"has no number after the slash"),
        (StoredRule("*", ("get",), "allow", ("fe80::1%eth0",)), r"names an interface"),
        (StoredRule("*", ("get",), "allow", ("::ffff:10.0.0.0/104",)), r"has IPv4 clients; write 10.0.0.0/8"),
        (StoredRule("*", ("get",), "allow", ("1",)), r"network '1' is no address"),
        (StoredRule("*", ("get",), "allow", ("",)), r"network '' is no address"),
        (StoredRule("*", ("get",), "allow", ("10.0.0.1",) * 257), r"^networks: there are 257 networks; a rule has 256"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name(stored: StoredRule, error: str) -> None:
    with pytest.raises(PolicyError, match=error):
        parse_rule(stored)


def test_a_rule_is_stored_in_one_form() -> None:
    stored = StoredRule(
        "topic:a*", ("get", "publish", "get"), "deny", ("10.1.2.3/8", "10.0.0.0/8", "10.0.0.1", "fd00::/8")
    )
    assert parse_rule(stored).stored() == StoredRule(
        "topic:a*", ("publish", "get"), "deny", ("10.0.0.0/8", "10.0.0.1", "fd00::/8")
    )
    assert parse_rule(StoredRule("*", ACTIONS, "allow")).stored().actions == ("all",)


@given(
    st.builds(
        StoredRule,
        resource=st.sampled_from(("*", "topic:a")) | st.text(max_size=8),
        actions=st.lists(st.sampled_from((*ACTIONS, "all")) | st.text(max_size=4), max_size=3).map(tuple),
        decision=st.sampled_from(("allow", "deny")) | st.text(max_size=5),
        networks=st.lists(
            st.ip_addresses().map(str) | st.text("0123456789abcdef.:/%", max_size=20) | st.text(max_size=5), max_size=2
        ).map(tuple),
    )
)
def test_any_texts_are_a_rule_or_refused(stored: StoredRule) -> None:
    try:
        rule = parse_rule(stored)
    except PolicyError:
        return
    assert parse_rule(rule.stored()) == rule
    assert str(rule).startswith(stored.decision)
