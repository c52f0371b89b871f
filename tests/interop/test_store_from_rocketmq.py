"""A store that RocketMQ wrote opens in Martlet."""

from pathlib import Path

import pytest

from . import rocketmq
from .java import Java, Jvm
from .store_exchange import COUNT, ENDS, OurBroker, RealBroker, check, consume_all, fill, read


@pytest.mark.parametrize("end", ENDS)
def test_a_store_written_by_rocketmq_opens_in_martlet(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    record_crcs = end.endswith("record CRCs")
    real = real_broker(record_crcs=record_crcs)
    clients = Java(jvm, names.address)
    fill(clients, "real")
    consume_all(clients, data)
    before = read(clients, COUNT + 11)
    clients.close()
    if end == "stopped":
        real.stop()
    else:
        real.kill()
    ours = martlet(record_crcs=record_crcs)
    clients = Java(jvm, ours.name_server)
    assert all(("__CRC32#" in m.properties) == record_crcs for m in before)
    check(clients, before, "real")
    clients.close()
    assert ours.stop() == 0
