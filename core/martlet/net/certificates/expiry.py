"""The end of certificates: read from their DER (RFC 5280 section 4.1), in statistics, and in warnings."""

import logging
import ssl
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import trio

from martlet.contracts import Protocol
from martlet.runtime.clock import Clock

__all__ = ["certificate_days", "certificate_end_ms", "watch_certificates"]

log = logging.getLogger("martlet.tls")

DAY_MS: Final = 24 * 3600 * 1000
WARNING_DAYS: Final = 14

BEGIN: Final = "-----BEGIN CERTIFICATE-----"
END: Final = "-----END CERTIFICATE-----"
CONSTRUCTED_0: Final = 0xA0  # the version, absent in version 1
UTC_TIME: Final = 0x17  # two digits of the year: 1950 to 2049


def certificate_end_ms(pem: str) -> int:
    """Return when the first certificate in *pem* ends, in epoch milliseconds; 0 if that cannot be read."""
    begin = pem.find(BEGIN)
    if begin < 0:
        return 0
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(END, begin) + len(END)])
        _, certificate, _ = _element(der, 0)
        _, tbs, _ = _element(der, certificate)
        at = tbs
        if der[at] == CONSTRUCTED_0:
            at = _element(der, at)[2]
        for _ in range(3):  # serial number, signature algorithm, issuer
            at = _element(der, at)[2]
        _, not_before, _ = _element(der, at)
        kind, start, end = _element(der, _element(der, not_before)[2])
        text = der[start:end].decode("ascii")
        if kind == UTC_TIME:
            text = f"{'19' if text[:2] >= '50' else '20'}{text}"
        moment = datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)
    except (ValueError, IndexError):
        return 0


def certificate_days(protocols: Iterable[Protocol], clock: Clock) -> Mapping[str, float]:
    """Return by port in how many days its certificate ends; negative if it has ended."""
    now_ms = clock.now_ms()
    ends = [(protocol.name, protocol.certificate_end_ms()) for protocol in protocols]
    return {f"{name}_days": round((end_ms - now_ms) / DAY_MS, 1) for name, end_ms in ends if end_ms}


async def watch_certificates(protocols: Iterable[Protocol], clock: Clock) -> None:
    """Warn each day about certificates that end within 14 days."""
    ports = list(protocols)
    while True:
        for port, days in certificate_days(ports, clock).items():
            name = port.removesuffix("_days")
            if days < 0:
                log.warning("the certificate of %s has ended %.1f days ago; replace it and send SIGHUP", name, -days)
            elif days < WARNING_DAYS:
                log.warning("the certificate of %s ends in %.1f days; replace it and send SIGHUP", name, days)
        await trio.sleep(DAY_MS / 1000)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at *at*, where its content begins, and where it ends."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length >= 0x80:
        begin += length - 0x80
        length = int.from_bytes(der[at + 2 : begin], "big")
    if begin + length > len(der):
        raise ValueError(f"element at {at} ends beyond the certificate")
    return tag, begin, begin + length
