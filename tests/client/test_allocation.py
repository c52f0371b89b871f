"""Every strategy gives the queues that RocketMQ's own class of that name gave (allocations.json)."""

import json
from pathlib import Path
from typing import TypedDict

import pytest

from martlet_client import (
    Allocation,
    Average,
    AverageByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
    MessageQueue,
)


class Fact(TypedDict):
    strategy: str
    queues: list[tuple[str, str, int]]
    members: list[str]
    shares: list[list[int]]


# What RocketMQ 5.5.0's AllocateMessageQueue classes returned, each share as indices into the queues.
FACTS: list[Fact] = json.loads((Path(__file__).parent / "allocations.json").read_text())


def queue_room(queue: MessageQueue) -> str:
    return queue.broker_name.split("@")[0]


def member_room(member: str) -> str:
    return member.split("-")[0]


STRATEGIES: list[Allocation] = [
    Average(),
    AverageByCircle(),
    ByMachineRoom({"r1", "r2"}),
    ConsistentHash(),
    MachineRoomNearby(Average(), queue_room, member_room),
    MachineRoomNearby(AverageByCircle(), queue_room, member_room),
]
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


def name(fact: Fact) -> str:
    return f"{fact['strategy']}-{len(fact['queues'])}-{len(fact['members'])}"


@pytest.mark.parametrize("fact", FACTS, ids=name)
def test_shares_are_those_of_the_java_class(fact: Fact) -> None:
    queues = [MessageQueue(*queue) for queue in fact["queues"]]
    strategy = BY_NAME[fact["strategy"]]
    for member, share in zip(fact["members"], fact["shares"], strict=True):
        assert strategy.allocate("G", member, queues, fact["members"]) == [queues[index] for index in share]


def test_every_strategy_is_in_the_table() -> None:
    assert {fact["strategy"] for fact in FACTS} == set(BY_NAME)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_stranger_gets_nothing(strategy: Allocation) -> None:
    assert strategy.allocate("G", "r1-stranger", [MessageQueue("T", "r1@a", 0)], ["r1-member"]) == []


def test_config_gives_what_it_was_given() -> None:
    mine = [MessageQueue("T", "b", 3)]
    assert ByConfig(mine).allocate("G", "me", [], []) == mine
