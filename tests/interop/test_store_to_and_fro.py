"""A store that both write in turns."""

from collections import Counter
from pathlib import Path

from . import rocketmq
from .java import Java, Jvm, found, message
from .process import eventually
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


# Each is refused by RocketMQ where a file has another size.
SIZES = {
    "mappedFileSizeCommitLog": 3_000_320,
    "mappedFileSizeConsumeQueue": 20 * 70,
    "maxHashSlotNum": 4999,
    "maxIndexNum": 30_011,
    "mappedFileSizeTimerLog": 5 << 20,
}
FOLDERS = {
    "commitlog": SIZES["mappedFileSizeCommitLog"],
    "consumequeue": SIZES["mappedFileSizeConsumeQueue"],
    "index": 40 + 4 * SIZES["maxHashSlotNum"] + 20 * SIZES["maxIndexNum"],
    "timerlog": SIZES["mappedFileSizeTimerLog"],
}


def sizes(data: Path) -> dict[str, set[int]]:
    files = [path for path in data.rglob("*") if path.is_file()]
    found = {folder: {path.stat().st_size for path in files if data / folder in path.parents} for folder in FOLDERS}
    return {folder: sizes for folder, sizes in found.items() if sizes}


def test_a_store_goes_to_and_fro_with_the_sizes_that_it_was_made_with(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm, data: Path
) -> None:
    """Martlet runs with its default sizes, and RocketMQ accepts what it has left."""
    real = real_broker(settings={name: str(size) for name, size in SIZES.items()})
    clients = Java(jvm, names.address)
    fill(clients, "one")
    clients.producer().send(message("Later", "timed", setDelayTimeMs=3_600_000))
    clients.close()
    real.stop()
    expected = {folder: {size} for folder, size in FOLDERS.items()}
    assert sizes(data) == expected
    ours = martlet(settings={"store.segment_bytes": str(1 << 30)})
    clients = Java(jvm, ours.name_server)
    fill(clients, "two")
    clients.close()
    assert ours.stop() == 0
    assert sizes(data) == expected
    real.start()
    clients = Java(jvm, names.address)
    fill(clients, "three")
    got = read(clients, 3 * (COUNT + 11))
    assert Counter(m.body for m in got) == everything("one") + everything("two") + everything("three")
    queries = clients.queries()
    for prefix in ("one", "two", "three"):
        [by_key] = eventually(lambda prefix=prefix: found(lambda: queries.by_key("Kept", f"{prefix}-17")))  # type: ignore[misc]
        assert by_key.body == f"{prefix} 17".encode()
    clients.close()
