"""Lets a broker in a process of its own load the plugin of examples/martlet-users."""

import os
from pathlib import Path

__all__ = ["users_plugin"]

PLUGIN = Path(__file__).parents[1] / "examples" / "martlet-users"


def users_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin's metadata to *folder*, as an installer does, and return the environment of the broker."""
    metadata = folder / "plugins" / "martlet_users-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: martlet-users\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[martlet.plugins]\nusers = martlet_users:UsersPlugin\n")
    path = [str(metadata.parent), str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}
