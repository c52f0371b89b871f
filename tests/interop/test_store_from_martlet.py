"""A store that Martlet wrote opens in RocketMQ."""

from pathlib import Path

import pytest

from . import rocketmq
from .java import Java, Jvm
from .store_exchange import COUNT, ENDS, OurBroker, RealBroker, check, consume_all, fill, read


@pytest.mark.parametrize("end", ENDS)
def test_a_store_written_by_martlet_opens_in_rocketmq(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    record_crcs = end.endswith("record CRCs")
    ours = martlet(record_crcs=record_crcs)
    clients = Java(jvm, ours.name_server)
    fill(clients, "ours")
    consume_all(clients, data)
    before = read(clients, COUNT + 11)
    assert all(("__CRC32#" in m.properties) == record_crcs for m in before)
    clients.close()
    if end == "stopped":
        assert ours.stop() == 0
    else:
        ours.kill()
    real_broker(record_crcs=record_crcs)
    clients = Java(jvm, names.address)
    check(clients, before, "ours")
    clients.close()
