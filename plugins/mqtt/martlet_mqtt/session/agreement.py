"""Session expiry, keep alive and limits, negotiated by CONNECT and CONNACK (MQTT 5 sections 3.1.2, 3.2.2); pure."""

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.names import response_prefix
from martlet_mqtt.wire.packets import Connect
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

__all__ = ["connack_properties", "expiry_of", "keep_alive_of"]


def expiry_of(connect: Connect, config: MqttConfig) -> int:
    """Return the session expiry in seconds after the client left; 0 if the session ends with the connection."""
    limit = config.session_expiry_max_s
    if connect.version == V5:
        return min(connect.properties.number(Property.SESSION_EXPIRY, 0), limit)
    return 0 if connect.clean_start else limit


def keep_alive_of(connect: Connect, config: MqttConfig) -> int:
    """Return the client's keep alive in seconds; 0 for none."""
    asked_s, limit = connect.keep_alive_s, config.keep_alive_max_s
    return limit if connect.version == V5 and (not asked_s or asked_s > limit) else asked_s


def connack_properties(
    connect: Connect, context: Context, keep_alive_s: int, expiry_s: int, proof: Properties, is_assigned: bool
) -> Properties:
    """Return the properties of CONNACK.

    Args:
      keep_alive_s, expiry_s: the negotiated values; included if they differ from CONNECT.
      proof: authentication method and final data of enhanced authentication.
      is_assigned: whether the broker chose the client identifier.
    """
    if connect.version != V5:
        return NO_PROPERTIES
    asked, config = connect.properties, context.config
    values: dict[Property, object] = {
        Property.RECEIVE_MAXIMUM: config.receive_max,
        Property.MAXIMUM_PACKET_SIZE: context.packet_bytes_max,
        Property.TOPIC_ALIAS_MAXIMUM: config.alias_max,
    }
    if expiry_s != asked.number(Property.SESSION_EXPIRY, 0):
        values[Property.SESSION_EXPIRY] = expiry_s
    if keep_alive_s != connect.keep_alive_s:
        values[Property.SERVER_KEEP_ALIVE] = keep_alive_s
    if is_assigned:
        values[Property.ASSIGNED_CLIENT_IDENTIFIER] = connect.client_id
    if config.response_prefix and asked.number(Property.REQUEST_RESPONSE_INFORMATION, 0):
        values[Property.RESPONSE_INFORMATION] = response_prefix(config.response_prefix, connect.client_id)
    for which in Property.AUTHENTICATION_METHOD, Property.AUTHENTICATION_DATA:
        if proof.get(which) is not None:
            values[which] = proof.get(which)
    return Properties(values)
