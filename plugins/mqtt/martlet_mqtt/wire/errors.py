"""Protocol errors, with their reason codes."""

from typing import Final

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet_mqtt.wire.codes import ReasonCode

__all__ = ["Malformed", "MqttError", "NotAccepted", "reason_of"]

_REASONS: Final = {
    Reason.BUSY: ReasonCode.QUOTA_EXCEEDED,
    Reason.ENDED: ReasonCode.ADMINISTRATIVE_ACTION,
    Reason.EXPIRED: ReasonCode.MAXIMUM_CONNECT_TIME,
    Reason.ILLEGAL: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.MALFORMED: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,  # a value is malformed, but the packet is not
    Reason.NO_PERMISSION: ReasonCode.NOT_AUTHORIZED,
    Reason.QUOTA: ReasonCode.QUOTA_EXCEEDED,
    Reason.UNAVAILABLE: ReasonCode.QUOTA_EXCEEDED,
    Reason.NO_TOPIC: ReasonCode.TOPIC_NAME_INVALID,
}


class MqttError(RemoteProtocolError):
    """The client broke the protocol; ``reason`` is the code of the DISCONNECT or CONNACK that it gets."""

    def __init__(self, text: str, reason: ReasonCode = ReasonCode.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.reason = reason


class Malformed(MqttError):
    """The bytes are not a packet."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ReasonCode.MALFORMED_PACKET)


class NotAccepted(MqttError):
    """A valid packet asks for something that this broker does not do; its acknowledgement can carry the reason."""


def reason_of(error: Exception) -> ReasonCode:
    """Return the reason code for *error*."""
    if isinstance(error, MqttError):
        return error.reason
    if isinstance(error, Refused):
        return _REASONS.get(error.reason, ReasonCode.UNSPECIFIED_ERROR)
    return ReasonCode.UNSPECIFIED_ERROR
