"""How long `martlet run` takes until it prints its ready line, and how much memory it has then.

    python benchmarks/startup.py [--runs 15] [PYTHON ...]

Each PYTHON is an interpreter with Martlet (default: this one); they take turns, so that two versions can be compared.
Each run starts a broker with nothing but a data directory, first an empty one, and again on what that left. The default
ports (9876, 10911, 1883, 61613) must be free. Before it an interpreter imports Trio and does nothing else: what that
takes says how fast the machine is at that moment, and is part of each start.
A row has the least and the median of the time from exec to the ready line, of the processor time until then, and the
median of the resident memory when the broker is idle (of Trio: when it is imported).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from idle import cpu_s

IDLE_AFTER_S = 0.5  # the module for WebSocket is imported once the broker is ready


class Start(NamedTuple):
    """What one start took."""

    elapsed_ms: float
    processor_ms: float
    resident_mib: float


def resident_mib(pid: int) -> float:
    """Return the resident set of process *pid*."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def start(python: str, data: str) -> Start:
    """Start a broker on the directory *data*, and stop it when it is idle."""
    command = [python, "-m", "martlet", "run", "--data", data]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = time.perf_counter()
    broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert broker.stdout is not None
        line = broker.stdout.readline()
        elapsed_ms, used_ms = (time.perf_counter() - before) * 1000, cpu_s(broker.pid) * 1000
        if not line.startswith("martlet ready"):
            raise SystemExit("the broker did not start; are its default ports free?")
        time.sleep(IDLE_AFTER_S)
        return Start(elapsed_ms, used_ms, resident_mib(broker.pid))
    finally:
        broker.terminate()
        broker.wait()


def import_trio(python: str) -> Start:
    """Start an interpreter that imports Trio."""
    code = "import resource, trio; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    used = os.times()
    before = time.perf_counter()
    resident_kib = int(subprocess.run([python, "-c", code], capture_output=True, check=True, text=True).stdout)
    elapsed_ms, after = (time.perf_counter() - before) * 1000, os.times()
    used_s = after.children_user + after.children_system - used.children_user - used.children_system
    return Start(elapsed_ms, used_s * 1000, resident_kib / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[Start]] = {}
    for _ in range(arguments.runs):
        for python in arguments.pythons:
            found.setdefault((python, "Trio alone"), []).append(import_trio(python))
            with tempfile.TemporaryDirectory() as data:
                for what in ("empty directory", "restart"):
                    found.setdefault((python, what), []).append(start(python, data))
    for (python, what), starts in found.items():
        elapsed, used, resident = zip(*starts, strict=True)
        print(
            f"{python} {what:16} elapsed {min(elapsed):4.0f} / {median(elapsed):4.0f} ms"
            f"  processor {min(used):4.0f} / {median(used):4.0f} ms  {median(resident):.1f} MiB"
        )


if __name__ == "__main__":
    main()
