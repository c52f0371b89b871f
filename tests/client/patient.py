"""Clients that wait for an answer as long as it takes; patient.py SCRIPT WORDS... runs a script with such clients.

Their own 3 seconds are over when a busy machine stands still for a moment, and what was sent is sent again then.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from martlet_client import ClientSettings, Producer

PATIENCE_S = 200.0


class PatientSettings(ClientSettings, frozen=True):  # type: ignore[misc]
    """Settings that wait."""

    request_timeout_s: float = PATIENCE_S
    connect_timeout_s: float = PATIENCE_S
    close_timeout_s: float = PATIENCE_S


def patient(name_server: str, **options: Any) -> ClientSettings:
    """Return settings of such clients; a producer also needs `PATIENCE_S` as its ``send_timeout_s``."""
    options |= dict.fromkeys(("request_timeout_s", "connect_timeout_s", "close_timeout_s"), PATIENCE_S)
    return ClientSettings(name_server, **options)


def command(script: Path, *words: str) -> list[str]:
    """Return the command line that runs *script* so."""
    return [sys.executable, __file__, str(script), *words]


def be_patient() -> None:
    """Let every client of this process wait that does not say how long."""
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "martlet_client" and getattr(module, "ClientSettings", None) is ClientSettings:
            module.Settings = PatientSettings  # type: ignore[attr-defined]
    defaults = Producer.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update({name: PATIENCE_S for name in defaults if name.endswith("timeout_s")})


if __name__ == "__main__":
    be_patient()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
