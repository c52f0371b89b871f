"""A broker whose configuration names a cold tier moves old messages there, and clients notice nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import Process

from martlet_client import Message
from martlet_client.blocking import Producer, PullConsumer
from martlet_tiered.config import TieredConfig
from martlet_tiered.plugin import TieredPlugin

from .cold import Tier

COUNT = 400
BODIES = [b"%05d " % number * 100 for number in range(COUNT)]
# Segments of 64 KiB, and each but the last is removed as soon as the tier has it.
SETTINGS = (
    *("store.segment_bytes=65536", "store.page_bytes=16384", "store.cache_bytes=65536", "store.flush=async"),
    *("store.disk_used_ratio_max=0.0", "store.disk_clean_ratio=0.0", "store.disk_full_ratio=1.0"),
    *("store.retention_interval_ms=20", "tiered.range_bytes=65536", "tiered.range_ms=100"),
    'plugins.enabled=["remoting","nameserver","mqtt","stomp","tiered"]',
)


@contextmanager
def running(folder: Path, place: Tier) -> Iterator[tuple[str, Process]]:
    settings = [
        *SETTINGS,
        f"tiered.url={place.url}",
        *(f"tiered.{key}={value}" for key, value in place.settings.items()),
    ]
    words = [word for each in settings for word in ("--set", each)]
    process = Process(folder, "run", *words, environment=place.environ)
    try:
        yield process.addresses()["nameserver"], process
        assert process.stop() == 0, process.log.read_text()
    finally:
        process.end()


def first_segment(process: Process) -> int:
    return min(int(path.name) for path in (process.data / "commitlog").iterdir())


def history(name_server: str) -> list[bytes]:
    with PullConsumer(name_server, "readers") as consumer:
        found: dict[int, bytes] = {}
        for queue in consumer.queues("T"):
            assert consumer.min_offset(queue) == 0
            found.update({int(message.body[:5]): message.body for message in consumer.read(queue, 0)})
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_clients_read_the_whole_history_before_and_after_a_restart(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place: Tier = request.getfixturevalue(f"{kind}_tier")
    with running(tmp_path, place) as (name_server, process):
        with Producer(name_server, "producers") as producer:
            for body in BODIES:
                producer.send(Message("T", body))
        process.until(lambda: first_segment(process) >= 65536 * 3)
        assert history(name_server) == BODIES
    with running(tmp_path, place) as (name_server, _):
        assert history(name_server) == BODIES
    (tmp_path / "data" / "config" / "tiered.index").unlink()
    with running(tmp_path, place) as (name_server, _):
        assert history(name_server) == BODIES


def test_without_a_url_there_is_no_tier() -> None:
    plugin = TieredPlugin(TieredConfig())
    assert plugin.martlet_services(None) == ()  # type: ignore[arg-type]
    assert plugin.martlet_cold_tiers(None) == ()  # type: ignore[arg-type]


def test_the_table_of_another_broker_ends_the_start(tmp_path: Path, local_tier: Tier) -> None:
    local_tier.exact_table("another")
    words = [word for each in (*SETTINGS, f"tiered.url={local_tier.url}") for word in ("--set", each)]
    process = Process(tmp_path, "run", *words)
    assert process.wait() != 0
    assert "belongs to broker 'another'" in process.log.read_text()


@pytest.mark.parametrize("plugins", ['["remoting","nameserver"]', '["remoting","nameserver","tiered"]'])
def test_a_restored_directory_does_not_start_without_its_tier(tmp_path: Path, plugins: str) -> None:
    config = tmp_path / "data/config"
    config.mkdir(parents=True)
    (config / "tiered.restored").write_text('{"position": 1000}')
    process = Process(tmp_path, "run", "--set", f"plugins.enabled={plugins}")
    assert process.wait() != 0
    assert "was restored from a cold tier" in process.log.read_text()
    assert "set tiered.url" in process.log.read_text()
