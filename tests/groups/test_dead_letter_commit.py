"""A dead letter is committed at once, with what others appended before it in the same round."""

from pathlib import Path

import pytest

from martlet.errors import Refused
from martlet.groups.handing_out.dead_letters import put_dead_letter
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, small_config


async def test_a_dead_letter_that_meets_a_full_disk_fails_the_commit_of_its_round() -> None:
    disk = FakeDisk()
    async with serving(Path("/data"), store=small_config(), clock=ManualClock(), disk=disk) as made:
        broker, store = made.broker, made.broker.store
        broker.topics.ensure("T", 1)
        dead = broker.publish(Message("T", b"dead", b"", 0))
        store.committer.commit()
        record = decode_record(store.pages.read(dead.position, dead.end - dead.position))
        put_dead_letter(broker.store, broker.topics, "G", record)
        broker.publish(Message("T", b"of another peer", b"", 0))
        disk.fail_next("write", 28)
        with pytest.raises(Refused):
            put_dead_letter(broker.store, broker.topics, "G", record)
        with pytest.raises(Refused):
            store.committer.commit()
        store.committer.commit()
