"""What a broker that serves MQTT takes while nobody talks to it."""

import re
import subprocess
import sys
from pathlib import Path

IDLE_KB_MAX = 60_000


def test_an_idle_broker_with_mqtt_takes_60_mb_at_most(tmp_path: Path) -> None:
    """With all plugins of a start without arguments."""
    command = [sys.executable, "-m", "martlet", "run", "--data", str(tmp_path / "data")]
    for port in ("remoting", "nameserver", "mqtt", "stomp"):
        command += ["--set", f"{port}.listen=127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            assert " mqtt=" in process.stdout.readline()
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            assert found is not None
            assert int(found[1]) <= IDLE_KB_MAX
        finally:
            process.terminate()
            assert process.wait() == 0
