"""Errors of the upload process, raised again in the broker with the same classes."""

import traceback
from typing import Final

from martlet.errors import MartletError
from martlet_tiered import errors
from martlet_tiered.errors import Fenced, RangeRefused, TierError
from martlet_tiered.upload.messages import Failed

__all__ = ["UploadDefect", "failure_of", "raised_by"]

# Errors that have no number.
PLAIN: Final = {
    kind.__name__: kind
    for kind in (
        errors.AccessRefused,
        errors.FileTooLarge,
        errors.LogUnreadable,
        errors.ObjectChanged,
        errors.ObjectDamaged,
        errors.ObjectExists,
        errors.ObjectMissing,
        errors.StoreHung,
        errors.StoreUnavailable,
        errors.StoreUnusable,
        errors.TableRefused,
    )
}
TEXT_MAX: Final = 64 << 10


class UploadDefect(Exception):
    """An error in the upload process that nobody expected; its traceback there is the cause."""


class _RemoteTraceback(Exception):
    """Shows a traceback of another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def failure_of(error: Exception) -> Failed:
    """Return *error* as a message."""
    name, text = type(error).__name__, str(error)[:TEXT_MAX]
    if name in PLAIN and isinstance(error, TierError):
        return Failed(name, text)
    if isinstance(error, Fenced):
        return Failed(name, text, error.epoch)
    if isinstance(error, RangeRefused):
        return Failed(name, text, error.end)
    if isinstance(error, MartletError):
        return Failed("TierError", text)
    if isinstance(error, OSError) and error.errno is not None:
        path = error.filename if isinstance(error.filename, str) else None
        return Failed("OSError", error.strerror or "", error.errno, path)
    origin = "".join(traceback.format_exception(error))[-TEXT_MAX:]
    return Failed("UploadDefect", f"{name}: {text}", traceback=origin)


def raised_by(failed: Failed) -> Exception:
    """Return the error that *failed* is the message of."""
    if failed.name in PLAIN:
        return PLAIN[failed.name](failed.text)
    if failed.name == "Fenced":
        return Fenced(failed.text, failed.number or 0)
    if failed.name == "RangeRefused":
        return RangeRefused(failed.text, failed.number)
    if failed.name == "OSError":
        return OSError(failed.number, failed.text, failed.path)
    if failed.name == "UploadDefect":
        defect = UploadDefect(failed.text)
        defect.__cause__ = _RemoteTraceback(failed.traceback)
        return defect
    return TierError(failed.text)
