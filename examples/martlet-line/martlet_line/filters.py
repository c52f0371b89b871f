"""The filter language PROPERTIES: ``name=value ...``, all of which a message must have."""

from martlet.contracts import Predicate, RecordView
from martlet.errors import Reason, Refused
from martlet.message import decode_properties
from martlet_line.codec import parse_properties

__all__ = ["compile_properties"]


def compile_properties(expression: str) -> Predicate:
    """Return whether a record has every property that *expression* names, with that value.

    Raises:
      Refused: a word is not ``name=value`` (Reason.ILLEGAL).
    """
    try:
        wanted = decode_properties(parse_properties(expression)).items()
    except ValueError as error:
        raise Refused(Reason.ILLEGAL, str(error)) from error
    if not wanted:
        raise Refused(Reason.ILLEGAL, "a PROPERTIES expression is name=value, one or more; this one is empty")

    def has_them(record: RecordView) -> bool:
        return wanted <= decode_properties(record.properties).items()

    return has_them
