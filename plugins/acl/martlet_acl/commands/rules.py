"""``martlet acl allow``, ``deny``, ``list``, ``remove``, ``explain`` and ``observe``."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json, table
from martlet.contracts import RuleLevel
from martlet_acl.commands.channel import Channel, opened, rows_of
from martlet_acl.requests import ExplainRequest, ListRules, Observe, PutRule, RemoveRule, Report

__all__ = ["add_subject", "explain", "list_rules", "observe", "print_notes", "put_rule", "remove_rule"]

RULE_HEADS: Final = ("subject", "level", "decision", "actions", "resource", "networks")
CONSIDERED_HEADS: Final = (*RULE_HEADS, "outcome")


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a subject."""
    parser.add_argument("subject", metavar="SUBJECT", help="user:NAME, group:NAME, everybody or anonymous")


def put_rule(arguments: Any) -> int:
    actions = tuple(each.strip() for each in arguments.actions.split(","))
    level: RuleLevel = "default" if arguments.default else "custom"
    rule = PutRule(arguments.subject, arguments.decision, actions, arguments.resource, tuple(arguments.networks), level)
    with opened(arguments) as channel:
        answer = channel.ask(rule)
    print_notes(answer.rows)
    where = f" from {', '.join(rule.networks)}" if rule.networks else ""
    print(f"{rule.subject}, {level}: {rule.decision} {', '.join(actions)} on {rule.resource}{where}")
    return Exit.OK


def print_notes(rows: Iterable[Mapping[str, object]]) -> None:
    """Print what the answer to a change says may be a mistake."""
    for row in rows:
        print(f"note: {row['note']}", file=sys.stderr)


def remove_rule(arguments: Any) -> int:
    level: RuleLevel = "default" if arguments.default else "custom"
    with opened(arguments) as channel:
        channel.ask(RemoveRule(arguments.subject, arguments.resource, level))
    print(f"{arguments.subject}, {level}: the rule on {arguments.resource} was removed")
    return Exit.OK


def list_rules(arguments: Any) -> int:
    with opened(arguments) as channel:
        rows = rows_of(channel, ListRules(arguments.subject or ""))
    if arguments.json:
        print_json(rows)
    else:
        print(table(RULE_HEADS, [_cells(row, RULE_HEADS) for row in rows]))
    return Exit.OK


def _cells(row: dict[str, Any], heads: tuple[str, ...]) -> list[object]:
    return [", ".join(row[head]) if isinstance(row[head], list) else row[head] for head in heads]


def explain(arguments: Any) -> int:
    request = ExplainRequest(arguments.user, arguments.action, arguments.resource, arguments.address or "")
    with opened(arguments) as channel:
        rows: list[dict[str, Any]] = channel.ask(request).rows
    verdict, *rules = rows
    if arguments.json:
        print_json({**verdict, "considered": rules})
        return Exit.OK
    where = f" from {request.address}" if request.address else ""
    may = "may" if verdict["allowed"] else "may not"
    print(f"{request.user} {may} {request.action} {request.resource}{where}")
    if verdict["rule"]:
        print(f"rule    {verdict['rule']}")
    deciding = [step["about"] for step in verdict["steps"] if step["decides"]]
    for rule in rules:
        if rule["about"] in deciding and rule["outcome"] == "decides":
            print(f"place   {rule['place']}")
    if verdict["reason"]:
        print(f"reason  {verdict['reason']}")
    if verdict["observe"]:
        print("note    rules are only observed now: nothing is refused")
    if not verdict["user_exists"]:
        print(f"note    user {request.user!r} does not exist; these rules would count if he did")
    if rules:
        _print_steps(verdict["steps"], rules)
    return Exit.OK


def _print_steps(steps: list[dict[str, Any]], rules: list[dict[str, Any]]) -> None:
    """Print the rules of each step; two steps, first the topic and then the name, with a heading each."""
    for number, step in enumerate(steps, 1):
        print()
        if len(steps) > 1:
            print(f"step {number}, {step['about']}: {_step_text(step, steps)}")
        found = [_cells(rule, CONSIDERED_HEADS) for rule in rules if rule["about"] == step["about"]]
        print(table(CONSIDERED_HEADS, found) if found else "no rules")


def _step_text(step: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    if step["decides"]:
        return f"{step['opinion']}; this decides"
    is_asked = step is steps[0] or steps[0]["opinion"] != "denied"
    return str(step["opinion"]) if is_asked else f"{step['opinion']}, but not asked because step 1 denies"


def observe(arguments: Any) -> int:
    with opened(arguments) as channel:
        if arguments.what == "report":
            return _report(arguments, channel)
        channel.ask(Observe(arguments.what == "on"))
    print("nothing is refused; see `martlet acl observe report`" if arguments.what == "on" else "rules are enforced")
    return Exit.OK


def _report(arguments: Any, channel: Channel) -> int:
    rows = rows_of(channel, Report())
    if arguments.json:
        print_json(rows)
        return Exit.OK
    if not rows:
        print("nothing would have been refused since the broker started, or since observing began")
        return Exit.OK
    heads = ("subject", "action", "resource", "count", "protocol", "address", "first", "last", "reason")
    print(table(heads, [_observed(row) for row in rows]))
    commands = dict.fromkeys(row["command"] for row in rows if row["command"])
    print("\nThese commands would allow it; run those that you want:")
    for command in commands:
        print(command)
    return Exit.OK


def _observed(row: dict[str, Any]) -> list[object]:
    resource = f"{row['kind']}:{row['name']}" if row["kind"] not in ("", "cluster") else row["kind"] or row["name"]
    times = (datetime.fromtimestamp(row[each] / 1000).isoformat(" ", "seconds") for each in ("first_ms", "last_ms"))
    subject = row["subject"] or "anonymous"
    from_where = row["protocol"], row["address"]  # of the last one
    return [subject, row["action"], resource, row["count"], *from_where, *times, row["rule"] or row["reason"]]
