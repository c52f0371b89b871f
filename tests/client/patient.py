"""Clients that wait for an answer as long as it takes; patient.py SCRIPT WORDS... runs a script with such clients.

Their own 3 seconds are over when a busy machine stands still for a moment, and what was sent is sent again then.
"""

import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from martlet_remoting.client import Producer, Settings

PATIENCE_S = 200.0


def patient(name_server: str, **options: Any) -> Settings:
    """Return settings of such clients; a producer also needs `PATIENCE_S` as its ``send_timeout_s``."""
    options |= dict.fromkeys(("request_timeout_s", "connect_timeout_s", "close_timeout_s"), PATIENCE_S)
    return Settings(name_server, **options)


def command(script: Path, *words: str) -> list[str]:
    """Return the command line that runs *script* so."""
    return [sys.executable, __file__, str(script), *words]


def be_patient() -> None:
    """Let every client of this process wait that does not say how long."""
    for function in (Settings.__init__, Producer.__init__):
        parameters = inspect.signature(function).parameters.values()
        patient = {p.name: PATIENCE_S if p.name.endswith("timeout_s") else p.default for p in parameters}
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
        function.__defaults__ = tuple(patient[p.name] for p in positional)
        function.__kwdefaults__ = {p.name: patient[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}


if __name__ == "__main__":
    be_patient()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
