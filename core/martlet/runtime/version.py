"""Martlet's version."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("martlet")
    except PackageNotFoundError:
        return "(not installed)"
