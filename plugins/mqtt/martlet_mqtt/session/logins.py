"""Authentication: user name and password, a client certificate, or enhanced authentication (MQTT 5 section 4.12)."""

from typing import Final, final

from martlet.access import Authentication
from martlet.contracts import Exchange, Identity, LoginOrigin, Proved
from martlet.errors import Reason, Refused
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.names import check_user_name
from martlet_mqtt.wire.packets import Auth, Connect
from martlet_mqtt.wire.properties import Properties, Property

__all__ = ["EnhancedLogin", "login_reason", "needs_password_check"]

STEPS_MAX: Final = 16
DATA_BYTES_MAX: Final = 65_535
_ANY_BYTES: Final = 1 << 30


def needs_password_check(authentication: Authentication, connect: Connect, proved: Identity) -> bool:
    """Return whether to check user name and password; otherwise the client has the identity *proved* by certificate.

    A user name without a password is enough if the certificate has the same name.

    Raises:
      MqttError: the user name is not allowed.
    """
    user = connect.user_name
    check_user_name(user or "")
    if connect.password is None and (user is None or (proved.name and user == proved.name)):
        return False
    return bool(authentication.authenticators)


def login_reason(refused: Refused, *, is_enhanced: bool) -> ReasonCode | None:
    """Return the reason code for a login that was *refused*; None if *refused* has another cause."""
    if refused.reason is Reason.CREDENTIALS:
        return ReasonCode.NOT_AUTHORIZED if is_enhanced else ReasonCode.BAD_USER_NAME_OR_PASSWORD
    return ReasonCode.BAD_AUTHENTICATION_METHOD if refused.reason is Reason.NOT_SUPPORTED and is_enhanced else None


@final
class EnhancedLogin:
    """The AUTH exchange with the method of a client's CONNECT; the client may repeat it later.

    User name and password are ignored. ``final`` has the method and the broker's last authentication data.
    """

    __slots__ = ("_authentication", "_connect", "_exchange", "_is_asking", "_origin", "_steps", "final", "method")

    def __init__(self, authentication: Authentication, connect: Connect, method: str, origin: LoginOrigin) -> None:
        self.method = method
        self.final = Properties({})
        self._authentication = authentication
        self._connect = connect
        self._origin = origin
        self._exchange: Exchange | None = None
        self._is_asking = False
        self._steps = 0

    def take(self, packet: Auth, *, is_open: bool) -> None:
        """Check that *packet* may come now; the caller then calls `answer`.

        Raises:
          MqttError: the packet breaks the order of the exchange, or has another method.
        """
        method = packet.properties.text(Property.AUTHENTICATION_METHOD)
        if method is None:
            raise MqttError("AUTH has no authentication method; repeat that of CONNECT")
        if method != self.method:
            text = f"AUTH has the authentication method {method[:40]!r}; CONNECT had {self.method[:40]!r}"
            raise MqttError(text, ReasonCode.BAD_AUTHENTICATION_METHOD)
        if self._is_asking:
            raise MqttError("AUTH came before the last one was answered")
        if packet.reason == ReasonCode.RE_AUTHENTICATE and is_open:
            self._exchange = None
        elif packet.reason != ReasonCode.CONTINUE_AUTHENTICATION or self._exchange is None:
            raise MqttError(f"AUTH with reason {packet.reason:#04x} continues nothing")
        self._is_asking = True

    async def answer(self, properties: Properties) -> Auth | Identity:
        """Return the next AUTH of the exchange, or the client's identity at its end.

        Raises:
          Refused: the proof is wrong, or the method is not offered.
          MqttError: the exchange takes too many steps, or its answer is too large for the client.
        """
        if self._exchange is None:
            self._exchange, self._steps = self._authentication.begin(self.method), 0
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise MqttError(f"authentication takes more than {STEPS_MAX} steps", ReasonCode.NOT_AUTHORIZED)
        self._is_asking = True
        data = properties.data(Property.AUTHENTICATION_DATA) or b""
        result = await self._authentication.proceed(self._exchange, data, self._origin)
        self._is_asking = False
        self.final = self._with(result.data)
        if isinstance(result, Proved):
            self._exchange = None
            check_user_name(result.identity.name)
            return result.identity
        return self._checked(Auth(ReasonCode.CONTINUE_AUTHENTICATION, self.final))

    def success(self) -> Auth:
        """Return the AUTH that ends a repeated exchange. Raises `MqttError` if it is too large for the client."""
        return self._checked(Auth(ReasonCode.SUCCESS, self.final))

    def _with(self, data: bytes) -> Properties:
        """Return properties with the method [MQTT-4.12.0-5] and *data*. Raises `MqttError` if *data* is too long."""
        values: dict[Property, object] = {Property.AUTHENTICATION_METHOD: self.method}
        if len(data) > DATA_BYTES_MAX:
            raise MqttError(f"method {self.method!r} says {len(data)} bytes at once", ReasonCode.UNSPECIFIED_ERROR)
        if data:
            values[Property.AUTHENTICATION_DATA] = data
        return Properties(values)

    def _checked(self, packet: Auth) -> Auth:
        """Return *packet*. Raises `MqttError` if it is larger than the client accepts [MQTT-3.1.2-24]."""
        size = len(encode_packet(packet, V5))
        limit = self._connect.properties.number(Property.MAXIMUM_PACKET_SIZE, _ANY_BYTES)
        if size > limit:
            text = f"AUTH has {size} bytes, but the client accepts at most {limit}; raise its maximum packet size"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)
        return packet
