"""Protocol errors, with the reason code for the client."""

from martlet.errors import RemoteProtocolError

from .codes import ReasonCode

__all__ = ["Malformed", "MqttError", "NotAccepted"]


class MqttError(RemoteProtocolError):
    """The client broke the protocol; ``reason`` is what its DISCONNECT or CONNACK says."""

    def __init__(self, text: str, reason: ReasonCode = ReasonCode.PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.reason = reason


class Malformed(MqttError):
    """Bytes that are no packet."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ReasonCode.MALFORMED_PACKET)


class NotAccepted(MqttError):
    """A valid packet asks for what this broker does not do; an acknowledgement can say so."""
