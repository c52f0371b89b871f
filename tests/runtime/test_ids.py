"""Identifiers that protect something cannot be computed from other ones."""

import random
from pathlib import Path
from typing import Final

from martlet.app.config import Config
from martlet.app.startup import build
from martlet.runtime.ids import Ids
from martlet.runtime.stats import Stats
from martlet.store import Store
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, small_config

WORDS: Final = 624  # the state of a Mersenne Twister, each of 32 bits


def test_identifiers_of_a_seeded_source_repeat_and_can_be_predicted() -> None:
    """The control for the next test: the prediction works."""
    first, second = Ids(random.Random(5)), Ids(random.Random(5))
    assert [first.unique() for _ in range(3)] == [second.unique() for _ in range(3)]
    assert predict_next(first) == first.unique()


async def test_identifiers_of_a_broker_cannot_be_predicted_from_others() -> None:
    config = Config(store=small_config())
    store = await Store.open(Path("/data"), config.store, ManualClock(), FakeDisk())
    ids = build(config, store, ManualClock(), Stats()).ids
    assert predict_next(ids) != ids.unique()


def test_numbers_tell_nothing_about_identifiers() -> None:
    ids = Ids()
    outputs = [ids.below(1 << 32) for _ in range(WORDS)]
    assert continuation(outputs).randbytes(16).hex().upper() != ids.unique()


def predict_next(ids: Ids) -> str:
    """Return the next identifier of *ids*, if they come from a Mersenne Twister."""
    seen = b"".join(bytes.fromhex(ids.unique()) for _ in range(WORDS // 4))
    outputs = [int.from_bytes(seen[at : at + 4], "little") for at in range(0, len(seen), 4)]
    return continuation(outputs).randbytes(16).hex().upper()


def continuation(outputs: list[int]) -> random.Random:
    """Return a Mersenne Twister that continues after *outputs*, as many as its state has words."""
    twin = random.Random()
    twin.setstate((3, (*map(untempered, outputs), WORDS), None))
    return twin


def untempered(output: int) -> int:
    """Undo the tempering of MT19937 (Matsumoto and Nishimura, 1998)."""
    output ^= output >> 18
    output ^= output << 15 & 0xEFC60000
    word = output
    for _ in range(4):
        word = output ^ (word << 7 & 0x9D2C5680)
    output = word & 0xFFFFFFFF
    for _ in range(2):
        word = output ^ word >> 11
    return word & 0xFFFFFFFF
