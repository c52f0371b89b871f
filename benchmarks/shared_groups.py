"""What a message of a shared group costs inside the process: read, leased, encoded, acknowledged, committed.

    python benchmarks/shared_groups.py [--rounds 20]

Two members take 40 messages of 256 bytes from four queues as they arrive, and acknowledge each by itself; the commit
after that writes what the group notes of it. Prints the least and the median of many rounds, in microseconds a
message, without the append. Beside another checkout: `beside.py`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import trio

from martlet.delivery.fanout import Encoding, parts
from martlet.groups.membership import Membership
from martlet.message import Message
from martlet.store import StoreConfig
from martlet.testing.peers import RecordingPeer, serving

AT_ONCE = 40
ARRIVALS = 100
QUEUES = 4
ENCODING = Encoding("bench", lambda piece: [body for _, _, _, body, _ in parts(piece)])


async def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async", keys_index=False)) as served:
            broker, clock = served.broker, time.process_time
            broker.topics.update("T", read_queues=QUEUES, write_queues=QUEUES)
            join = broker.shared_groups.join
            members = [
                join(RecordingPeer(), "T", "G", ENCODING, Membership(lease_s=60.0, credit=100)) for _ in range(2)
            ]
            properties, taken = b"TAGS\x01TagA\x02", 0
            costs = []
            for _ in range(rounds):
                spent = 0.0
                for _ in range(ARRIVALS):
                    for number in range(AT_ONCE):
                        broker.publish(Message("T", b"x" * 256, properties, number % QUEUES))
                    broker.store.committer.commit()
                    began = clock()
                    for member in members:
                        for delivery in member.collect(1 << 20):
                            for offset in range(delivery.first, delivery.first + delivery.count):
                                taken += member.ack(delivery.queue_id, offset)
                    broker.store.committer.commit()
                    spent += clock() - began
                costs.append(spent * 1e6 / (ARRIVALS * AT_ONCE))
                await trio.sleep(0.02)
            assert taken == rounds * ARRIVALS * AT_ONCE, taken
            print(f"leased and acknowledged: least {min(costs):6.2f} us, median {statistics.median(costs):6.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    trio.run(run, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
