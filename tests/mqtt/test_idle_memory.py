"""What a broker that serves MQTT takes while nobody talks to it."""

import re
from pathlib import Path

from tests.broker_process import BrokerProcess

IDLE_KB_MAX = 60_000


def test_an_idle_broker_with_mqtt_takes_60_mb_at_most(tmp_path: Path) -> None:
    """With all plugins of a start without arguments."""
    with BrokerProcess(tmp_path / "data") as process:
        assert process.addresses["mqtt"]
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        assert found is not None
        assert int(found[1]) <= IDLE_KB_MAX
        assert process.stop() == 0
