"""A broker in a process of its own, for tests of commands and examples."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["broker_process"]


@contextmanager
def broker_process(
    data: Path, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a broker with its store in *data*, and yield the address of its name server."""
    words = [sys.executable, "-m", "martlet", "run", "--data", str(data)]
    ports = (f"{name}.listen=127.0.0.1:0" for name in ("remoting", "nameserver", "mqtt", "stomp"))
    for setting in (*ports, "store.flush=async"):
        words += ["--set", setting]
    for name, value in (settings or {}).items():
        words += ["--set", f"{name}={value}"]
    given = {**os.environ, **(environment or {})}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=given) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield next(word.partition("=")[2] for word in line.split() if word.startswith("nameserver="))
        finally:
            process.terminate()
            process.wait()
