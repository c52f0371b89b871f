"""What goes wrong with a store of objects or with the table in it; each text is for the person who runs the broker."""

from typing import final

from martlet.errors import ConfigError, MartletError

__all__ = [
    "AccessRefused",
    "Fenced",
    "FileTooLarge",
    "LogUnreadable",
    "ObjectChanged",
    "ObjectDamaged",
    "ObjectExists",
    "ObjectMissing",
    "RangeRefused",
    "StoreHung",
    "StoreUnavailable",
    "StoreUnusable",
    "TableRefused",
    "TierError",
    "UploadProcessFailed",
    "missing_package",
]


class TierError(MartletError):
    """The base of all errors of the cold tier."""


@final
class ObjectMissing(TierError):
    """The store has no object with this name."""


@final
class ObjectExists(TierError):
    """The store has another object with this name already."""


@final
class ObjectChanged(TierError):
    """The object is not the version that was to be replaced."""


@final
class ObjectDamaged(TierError):
    """The object is shorter than what was written."""


@final
class AccessRefused(TierError):
    """The store refuses the credentials, or what they may not do."""


@final
class FileTooLarge(TierError):
    """A file would need more memory than it may; upload a smaller range."""


@final
class LogUnreadable(TierError):
    """The broker's own log cannot be read where it should have records."""


@final
class StoreUnavailable(TierError):
    """The store cannot be reached, or answers that it cannot serve the request now; it may be able to later."""


@final
class StoreHung(TierError):
    """The store did not answer in time; the request may have taken effect."""


@final
class StoreUnusable(TierError):
    """The store or its settings have to be changed: the bucket is missing, or there are no conditional writes."""


@final
class UploadProcessFailed(TierError):
    """The process that uploads cannot be started, has ended, or hangs; it is started again."""


@final
class TableRefused(TierError):
    """The table belongs to another broker, needs a newer program, is damaged, or is none at all."""


@final
class RangeRefused(TierError):
    """The range does not continue the table, whose last range ends at *end*; None: the table has no range."""

    def __init__(self, text: str, end: int | None) -> None:
        super().__init__(text)
        self.end = end


@final
class Fenced(TierError):
    """Another broker has taken the table over, with a higher *epoch*; this one must not write to it again."""

    def __init__(self, text: str, epoch: int) -> None:
        super().__init__(text)
        self.epoch = epoch


def missing_package(error: ModuleNotFoundError) -> ConfigError:
    """Return the error for a package of the cold tier that cannot be imported."""
    return ConfigError(f"the cold tier needs the package {error.name!r}; pip install 'martlet[tiered]'")
