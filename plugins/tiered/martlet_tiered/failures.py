"""Errors of the libraries, as errors that say what to do.

The libraries' texts contain what servers answer, some of which repeat the access key or the signature of the request.
So only the status, the error code and a few known words of a text reach a person.
"""

import re
from typing import Final

from martlet_tiered.errors import AccessRefused, StoreHung, StoreUnavailable, StoreUnusable, TierError

__all__ = ["TRANSIENT", "explain", "says_no_bucket"]

# What a retry may mend.
TRANSIENT: Final = (StoreHung, StoreUnavailable)

STATUS: Final = re.compile(r"status code\W*(?:\x1b\[[0-9;]*m|\W)*([1-5]\d\d)\b")
CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
TIMEOUT: Final = re.compile(r"kind: Timeout|timed out|TimedOut")
CONNECT: Final = re.compile(r"kind: Connect\b|\(Connect\)|Connection refused|dns error")
TRANSPORT: Final = re.compile(r"HTTP error|error sending request|error decoding response|connection (?:closed|reset)")
NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
NO_CREDENTIALS: Final = re.compile(r"credential|169\.254\.169\.254|metadata\.google", re.IGNORECASE)
REFUSED_CODES: Final = frozenset(
    ("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch")
)
BUSY: Final = frozenset((408, 409, 429))
NOT_IMPLEMENTED: Final = 501


def says_no_bucket(error: BaseException) -> bool:
    """Whether the bucket is missing, not only an object in it."""
    return NO_BUCKET.search(str(error)) is not None


def explain(error: BaseException, where: str) -> TierError:
    """Return what the error of a library means; *where* is the URL of the store or of an object."""
    text = str(error)
    status = int(found[1]) if (found := STATUS.search(text)) else 0
    code = found[1] if (found := CODE.search(text)) else ""
    answer = f"{status} {code}".strip()
    if says_no_bucket(error):
        return StoreUnusable(f"{where!r} cannot be used: the bucket does not exist; create it, or correct tiered.url")
    if status in (401, 403) or code in REFUSED_CODES:
        return AccessRefused(
            f"{where!r} refuses access ({answer}); give the credentials the right to read, write, list and delete"
        )
    if (status >= 500 and status != NOT_IMPLEMENTED) or status in BUSY:
        return StoreUnavailable(f"{where!r} answers {answer}; it may be overloaded or under maintenance")
    if status == NOT_IMPLEMENTED:
        return StoreUnusable(f"{where!r} does not know a request ({answer}); use a store with conditional writes")
    if status:
        return StoreUnusable(f"{where!r} does not accept a request ({answer}); check tiered.url, endpoint and region")
    if NO_CREDENTIALS.search(text):
        return AccessRefused(
            f"{where!r} needs credentials, and there are none; set them in the environment or in a credentials_file"
        )
    return _without_answer(text, where)


def _without_answer(text: str, where: str) -> TierError:
    if TIMEOUT.search(text):
        return StoreHung(f"{where!r} does not answer in time; check the network, or raise tiered.request_timeout_ms")
    if CONNECT.search(text):
        return StoreUnavailable(f"{where!r} cannot be reached; check tiered.endpoint, the network and the store")
    if TRANSPORT.search(text):
        return StoreUnavailable(f"{where!r} gave no complete answer, or not in time; check the network and the store")
    return StoreUnusable(f"{where!r} cannot be used; check the settings of the section [tiered]")
