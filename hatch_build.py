"""Compile the hot modules with mypyc while the wheel is built, where ``MARTLET_COMPILE=1`` asks for it.

    MARTLET_COMPILE=1 python -m build --wheel

The wheel holds the same Python files, and beside those in HOT their compiled form, which
is imported in their place. Without the variable nothing here does anything, and the
wheel is pure. ``MARTLET_COMPILE_LEVEL=1`` optimises less and compiles faster, for tests of
the wheel; the default is 3.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE_FOLDERS = {
    "martlet": "core",
    "martlet_filter_sql92": "plugins/filter_sql92",
    "martlet_mqtt": "plugins/mqtt",
    "martlet_remoting": "plugins/remoting",
    "martlet_stomp": "plugins/stomp",
    "martlet_timer": "plugins/timer",
    "martlet_tx": "plugins/tx",
}

# The modules that each message passes. Modules that define msgspec's records stay as they are, because mypyc passes no
# keywords such as frozen=True to a metaclass. So do those of which tests replace parts.
HOT = (
    "martlet/broker.py",
    "martlet/delivery/fanout.py",
    "martlet/delivery/lease.py",
    "martlet/delivery/lease_returns.py",
    "martlet/delivery/lease_table.py",
    "martlet/delivery/lease_timers.py",
    "martlet/delivery/leases.py",
    "martlet/message.py",
    "martlet/net/peer.py",
    "martlet/net/pending.py",
    "martlet/net/reader.py",
    "martlet/net/rounds.py",
    "martlet/stages.py",
    "martlet/delivery/subscriptions.py",
    "martlet/net/transports.py",
    "martlet/store/page_cache.py",
    "martlet/store/admission.py",
    "martlet/records/codec.py",
    "martlet/store/committer.py",
    "martlet/store/flusher.py",
    "martlet/store/key_index.py",
    "martlet/records/layout.py",
    "martlet/store/log.py",
    "martlet/store/needle_match.py",
    "martlet/store/passed_records.py",
    "martlet/store/queue_reader.py",
    "martlet/store/lookup.py",
    "martlet/store/queues.py",
    "martlet/store/readable.py",
    "martlet/store/readers.py",
    "martlet/store/reading.py",
    "martlet/store/scan.py",
    "martlet/store/segments.py",
    "martlet/store/tags.py",
    "martlet/store/writer.py",
    "martlet_mqtt/client.py",
    "martlet_mqtt/client_frames.py",
    "martlet_mqtt/codec.py",
    "martlet_mqtt/connection.py",
    "martlet_mqtt/due.py",
    "martlet_mqtt/figures.py",
    "martlet_mqtt/flight.py",
    "martlet_mqtt/frames.py",
    "martlet_mqtt/handler.py",
    "martlet_mqtt/handshake.py",
    "martlet_mqtt/incoming.py",
    "martlet_mqtt/messages.py",
    "martlet_mqtt/names.py",
    "martlet_mqtt/outgoing.py",
    "martlet_mqtt/properties.py",
    "martlet_mqtt/scanner.py",
    "martlet_mqtt/storing.py",
    "martlet_remoting/batches.py",
    "martlet_remoting/codec.py",
    "martlet_remoting/connection.py",
    "martlet_remoting/context.py",
    "martlet_remoting/counters.py",
    "martlet_remoting/handler.py",
    "martlet_remoting/handlers/pull.py",
    "martlet_remoting/handlers/send.py",
    "martlet_remoting/handlers/transactions.py",
    "martlet_remoting/headers.py",
    "martlet_remoting/packets.py",
    "martlet_remoting/long_poll.py",
    "martlet_remoting/templates.py",
    "martlet_stomp/codec.py",
    "martlet_stomp/connection.py",
    "martlet_stomp/events.py",
    "martlet_stomp/scanner.py",
    "martlet_tx/formats.py",
    "martlet_tx/halves.py",
    "martlet_tx/held.py",
    "martlet_tx/projection.py",
)

# For this check, which is part of -Wall, gcc looks for each line of the generated 446,000 from far before it.
QUICK_CHECKS = "-Wno-misleading-indentation"

SCRIPT = """
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(
    name="hot",
    packages=[],
    ext_modules=mypycify(
        ["--strict", "--disable-error-code=type-abstract", "--ignore-missing-imports"]
        + ["--no-warn-unused-ignores", *sys.argv[4:]],
        opt_level=sys.argv[3],
    ),
    script_args=sys.argv[1:3],
)
"""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds compiled modules to the wheel."""

    def dependencies(self) -> list[str]:
        # mypyc also needs the types of Martlet's dependencies.
        return ["mypy[mypyc]>=1.13,<3", "setuptools", *self.metadata.core.dependencies] if self._wanted() else []

    def _wanted(self) -> bool:
        return os.environ.get("MARTLET_COMPILE") == "1" and self.target_name == "wheel"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted() or version == "editable":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="martlet-compile-"))
        for package, folder in PACKAGE_FOLDERS.items():
            shutil.copytree(Path(self.root) / folder / package, self.folder / package)
        level = os.environ.get("MARTLET_COMPILE_LEVEL", "3")
        command = [sys.executable, "-c", SCRIPT, "build_ext", "--inplace", level, *HOT]
        flags = f"{os.environ.get('CFLAGS', '')} {QUICK_CHECKS}"
        environment = {**os.environ, "MYPYPATH": str(self.folder), "CFLAGS": flags}
        subprocess.run(command, cwd=self.folder, check=True, env=environment)
        for made in self.folder.rglob("*.so"):
            inside = made.relative_to(self.folder)
            if inside.parts[0] != "build":
                build_data["force_include"][str(made)] = str(inside)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        folder = getattr(self, "folder", None)
        if folder is not None:
            shutil.rmtree(folder)
