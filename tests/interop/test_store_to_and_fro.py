"""A store that both write in turns."""

from collections import Counter

from . import rocketmq
from .java import Java, Jvm
from .store_exchange import COUNT, OurBroker, RealBroker, everything, fill, read


def test_a_store_goes_to_and_fro(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    fill(clients, "one")
    clients.close()
    assert ours.stop() == 0
    real = real_broker()
    clients = Java(jvm, names.address)
    fill(clients, "two")
    clients.close()
    real.stop()
    ours.start()
    clients = Java(jvm, ours.name_server)
    fill(clients, "three")
    got = read(clients, 3 * (COUNT + 11))
    clients.close()
    assert ours.stop() == 0
    assert Counter(m.body for m in got) == everything("one") + everything("two") + everything("three")
    for queue in range(4):
        offsets = sorted(m.offset for m in got if m.queue == queue)
        assert offsets == list(range(len(offsets)))
