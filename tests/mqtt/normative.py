"""The numbered normative statements of MQTT 3.1.1 and 5, and which test shows that the broker meets each.

Each line has the number that appendix B of the OASIS specification gives a statement, whom it binds, and in short what
it says. A test names what it shows with `statement`; `page` renders all of it as a page of the documentation.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from enum import Enum, unique
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

import pytest
from tests.wire_clients.mqtt import MqttBroker, MqttClient, leave

from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Disconnect, Packet
from martlet_mqtt.wire.properties import encode_data, encode_text, encode_varint

__all__ = [
    "ELSEWHERE",
    "STATEMENTS",
    "VERSIONS",
    "Binds",
    "Statement",
    "after_connect",
    "answer_to",
    "before_fence",
    "check_disconnect",
    "check_refusal",
    "connect_packet",
    "filter_packet",
    "leave",
    "packet",
    "page",
    "publish_packet",
    "shown_by",
    "statement",
    "stay",
]

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = "test_normative_*.py"
WORDS_MAX: Final = 12
F = TypeVar("F", bound=Callable[..., Any])
VERSIONS: Final = pytest.mark.parametrize("version", [V4, V5])


@unique
class Binds(Enum):
    """Whom a statement binds."""

    SERVER = "server"
    CLIENT = "client"
    BOTH = "both"


@final
class Statement(NamedTuple):
    """One numbered statement of the specification of *version*."""

    version: int
    number: str
    binds: Binds
    summary: str

    @property
    def binds_a_server(self) -> bool:
        return self.binds is not Binds.CLIENT


_V4: Final = """
1.5.3-1 both text is well-formed UTF-8 without surrogates; else the receiver closes
1.5.3-2 both text has no U+0000; else the receiver closes
1.5.3-3 both U+FEFF at any place of a text is a character and stays
2.2.2-1 both reserved flags have the values that table 2.2 gives
2.2.2-2 both invalid flags make the receiver close the connection
2.3.1-1 both SUBSCRIBE, UNSUBSCRIBE and PUBLISH above QoS 0 have an identifier, not 0
2.3.1-2 client a new packet gets a packet identifier that is not in use
2.3.1-3 client a packet sent again keeps its identifier until it is acknowledged
2.3.1-4 server the rules for identifiers of clients hold for PUBLISH to clients
2.3.1-5 both PUBLISH with QoS 0 has no packet identifier
2.3.1-6 both PUBACK, PUBREC and PUBREL have the identifier of their PUBLISH
2.3.1-7 server SUBACK and UNSUBACK have the identifier of the packet they answer
3.1.0-1 client the first packet of a client is CONNECT
3.1.0-2 server a second CONNECT is a violation and ends the connection
3.1.2-1 server a CONNECT with another protocol name is not treated as MQTT 3.1.1
3.1.2-2 server an unknown protocol level is answered with return code 1, then closed
3.1.2-3 server a CONNECT with the reserved flag ends the connection
3.1.2-4 server without clean session the stored session continues, or a new one begins
3.1.2-5 server a stored session collects messages of QoS 1 and 2 while away
3.1.2-6 both a clean session discards the old one and ends with its connection
3.1.2-7 server retained messages outlive the session of their publisher
3.1.2-8 server a will is stored, and published when the connection ends without DISCONNECT
3.1.2-9 both with the will flag, will topic and message are in the payload
3.1.2-10 server a will is removed once published, and by DISCONNECT
3.1.2-11 client without the will flag, will QoS, RETAIN, topic and message are absent
3.1.2-12 server without the will flag no will is published
3.1.2-13 client without the will flag the will QoS is 0
3.1.2-14 client the will QoS is 0, 1 or 2, never 3
3.1.2-15 client without the will flag will retain is 0
3.1.2-16 server a will without will retain is not retained
3.1.2-17 server a will with will retain is retained
3.1.2-18 client without its flag no user name is in the payload
3.1.2-19 client with its flag a user name is in the payload
3.1.2-20 client without its flag no password is in the payload
3.1.2-21 client with its flag a password is in the payload
3.1.2-22 client without a user name there is no password
3.1.2-23 client a client sends something, or PINGREQ, within its keep alive
3.1.2-24 server silence of one and a half keep alives ends the connection
3.1.3-1 client the fields of the payload of CONNECT have one fixed order
3.1.3-2 both the client identifier names the session on both sides
3.1.3-3 client the client identifier is the first field of the payload
3.1.3-4 client the client identifier is a valid string
3.1.3-5 server identifiers of 1 to 23 ASCII letters and digits are accepted
3.1.3-6 server an empty client identifier, if accepted, becomes a unique one
3.1.3-7 client an empty client identifier needs a clean session
3.1.3-8 server an empty identifier without clean session: return code 2, then closed
3.1.3-9 server a rejected client identifier: return code 2, then closed
3.1.3-10 client the will topic is a valid string
3.1.3-11 client the user name is a valid string
3.1.4-1 server an invalid CONNECT ends the connection without CONNACK
3.1.4-2 server a new connection of a client identifier ends the older one
3.1.4-3 server clean session is acted on once CONNECT is valid
3.1.4-4 server a valid CONNECT is answered with CONNACK and return code 0
3.1.4-5 server nothing after a rejected CONNECT is processed
3.2.0-1 server CONNACK is the first packet of the server
3.2.2-1 server with clean session CONNACK has no session present flag
3.2.2-2 server a stored session sets the session present flag
3.2.2-3 server without a stored session the session present flag is 0
3.2.2-4 server a return code above 0 comes without session present
3.2.2-5 server after a return code above 0 the connection is closed
3.2.2-6 server if no return code fits, the connection closes without CONNACK
3.3.1-1 both a PUBLISH that is sent again has DUP
3.3.1-2 both PUBLISH with QoS 0 has no DUP
3.3.1-3 server DUP to subscribers does not come from the publisher
3.3.1-4 both no PUBLISH has QoS 3; one that has ends the connection
3.3.1-5 server a message with RETAIN is kept for later subscribers, with its QoS
3.3.1-6 server a new subscription gets the retained message of every matching name
3.3.1-7 server QoS 0 with RETAIN replaces the retained message of its name
3.3.1-8 server RETAIN is set on messages sent because a subscription began
3.3.1-9 server RETAIN is not set on messages for an existing subscription
3.3.1-10 server RETAIN with an empty payload removes the retained message and is delivered
3.3.1-11 server an empty message is never retained
3.3.1-12 server without RETAIN the retained message stays as it is
3.3.2-1 both the topic name comes first in PUBLISH and is a valid string
3.3.2-2 both a topic name in PUBLISH has no wildcards
3.3.2-3 server the name of a delivered message matches a filter of its receiver
3.3.4-1 both PUBLISH is answered as its QoS demands
3.3.5-1 server overlapping subscriptions deliver with the highest of their QoS
3.3.5-2 server a PUBLISH without permission is acknowledged, or the connection closes
3.6.1-1 both PUBREL has the flags 0010; others end the connection
3.8.1-1 both SUBSCRIBE has the flags 0010; others end the connection
3.8.3-1 client topic filters in SUBSCRIBE are valid strings
3.8.3-2 server without support for wildcards, filters with them are rejected
3.8.3-3 client SUBSCRIBE has at least one filter
3.8.3-4 server reserved bits or QoS 3 in SUBSCRIBE end the connection
3.8.4-1 server SUBSCRIBE is answered with SUBACK
3.8.4-2 server SUBACK has the identifier of its SUBSCRIBE
3.8.4-3 server an equal filter replaces the subscription; retained messages come, nothing is lost
3.8.4-4 server several filters act like several packets with one SUBACK
3.8.4-5 server SUBACK has for each filter the granted QoS or a failure
3.8.4-6 server a message has the lower QoS of publisher and subscription
3.9.3-1 server codes in SUBACK have the order of the filters
3.9.3-2 server SUBACK has no codes other than 0, 1, 2 and 0x80
3.10.1-1 both UNSUBSCRIBE has the flags 0010; others end the connection
3.10.3-1 client topic filters in UNSUBSCRIBE are valid strings
3.10.3-2 client UNSUBSCRIBE has at least one filter
3.10.4-1 server UNSUBSCRIBE removes a filter that is equal in every character
3.10.4-2 server after a subscription is removed no new messages are added
3.10.4-3 server messages in flight are completed after their subscription is removed
3.10.4-4 server UNSUBSCRIBE is answered with UNSUBACK of the same identifier
3.10.4-5 server UNSUBACK comes also if nothing was removed
3.10.4-6 server several filters act like several packets with one UNSUBACK
3.12.4-1 server PINGREQ is answered with PINGRESP
3.14.1-1 server reserved flags of DISCONNECT end the connection
3.14.4-1 client a client closes after DISCONNECT
3.14.4-2 client a client sends nothing after DISCONNECT
3.14.4-3 server DISCONNECT discards the will
4.1.0-1 both the state of a session is kept as long as it lasts
4.1.0-2 both a session lasts at least as long as its connection
4.3.1-1 both messages of QoS 0 are sent with QoS 0 and without DUP
4.3.2-1 both QoS 1 sender: new identifier, no DUP, in flight until PUBACK
4.3.2-2 both QoS 1 receiver: PUBACK, after which the identifier is new again
4.3.3-1 both QoS 2 sender: PUBLISH until PUBREC, then PUBREL until PUBCOMP
4.3.3-2 both QoS 2 receiver: PUBREC once stored, no duplicates until PUBREL, then PUBCOMP
4.4.0-1 both a session that continues sends unacknowledged PUBLISH and PUBREL again
4.5.0-1 server an accepted message is added to every session with a matching subscription
4.5.0-2 client every PUBLISH is acknowledged, whatever the application does with it
4.6.0-1 both PUBLISH packets are sent again in their original order
4.6.0-2 both PUBACK packets have the order of their PUBLISH packets
4.6.0-3 both PUBREC packets have the order of their PUBLISH packets
4.6.0-4 both PUBREL packets have the order of their PUBREC packets
4.6.0-5 server every topic is ordered unless an administrator says otherwise
4.6.0-6 server messages of a publisher to a topic are delivered in order
4.7.1-1 both topic names have no wildcards
4.7.1-2 both # is a whole level, and the last one
4.7.1-3 both + is a whole level
4.7.2-1 server a filter that begins with a wildcard matches no name with $
4.7.3-1 both names and filters have at least one character
4.7.3-2 both names and filters have no U+0000
4.7.3-3 both names and filters have at most 65,535 bytes
4.7.3-4 server names and filters are compared without normalization
4.8.0-1 both a violation of the protocol ends its connection
4.8.0-2 both a transient error while a packet is processed ends its connection
6.0.0-1 both packets come in binary WebSocket frames; others end the connection
6.0.0-2 both WebSocket frames and packets need not begin together
6.0.0-3 client a WebSocket client offers the subprotocol mqtt
6.0.0-4 server the subprotocol that the server selects is mqtt
7.0.0-1 server a server that connects to servers is also a conforming client
7.0.0-2 both nothing outside the specification is needed to interoperate
7.1.1-1 server a server has an ordered, lossless transport in both directions
7.1.2-1 client a client has an ordered, lossless transport in both directions
"""

_V5: Final = """
1.5.4-1 both text is well-formed UTF-8 without surrogates
1.5.4-2 both text has no U+0000
1.5.4-3 both U+FEFF at any place of a text is a character and stays
1.5.5-1 both a variable byte integer takes the fewest bytes possible
1.5.7-1 both both texts of a pair are valid strings
2.1.3-1 both reserved flags have the values that table 2-2 gives
2.2.1-2 both PUBLISH with QoS 0 has no packet identifier
2.2.1-3 client a new packet gets an unused packet identifier, not 0
2.2.1-4 server a new PUBLISH to a client gets an unused identifier, not 0
2.2.1-5 both PUBACK, PUBREC, PUBREL and PUBCOMP have the identifier of their PUBLISH
2.2.1-6 server SUBACK and UNSUBACK have the identifier of the packet they answer
2.2.2-1 both a packet without properties has the property length 0
3.1.0-1 client the first packet of a client is CONNECT
3.1.0-2 server a second CONNECT is a protocol error and ends the connection
3.1.2-1 both the protocol name is MQTT; after another one the server closes
3.1.2-2 server an unsupported version may be told 0x84, and the server closes
3.1.2-3 server the reserved flag of CONNECT has to be 0
3.1.2-4 both clean start discards the old session and begins a new one
3.1.2-5 server without clean start an existing session continues
3.1.2-6 server without clean start and without a session a new one begins
3.1.2-7 server a will is stored with the session
3.1.2-8 server a will is published after its delay or when the session ends
3.1.2-9 both with the will flag, will properties, topic and payload are there
3.1.2-10 server a will is removed once published, and by DISCONNECT 0x00
3.1.2-11 client without the will flag the will QoS is 0
3.1.2-12 client the will QoS is 0, 1 or 2
3.1.2-13 client without the will flag will retain is 0
3.1.2-14 server a will without will retain is not retained
3.1.2-15 server a will with will retain is retained
3.1.2-16 client without its flag no user name is in the payload
3.1.2-17 client with its flag a user name is in the payload
3.1.2-18 client without its flag no password is in the payload
3.1.2-19 client with its flag a password is in the payload
3.1.2-20 client a client sends something, or PINGREQ, within its keep alive
3.1.2-21 client a server keep alive replaces that of the client
3.1.2-22 server silence of one and a half keep alives ends the connection
3.1.2-23 both a session with an expiry interval above 0 is kept after disconnection
3.1.2-24 server no packet is larger than the client's maximum packet size
3.1.2-25 server a message that is too large is dropped as if sent
3.1.2-26 server no topic alias exceeds the client's topic alias maximum
3.1.2-27 server without a topic alias maximum the client gets no aliases
3.1.2-28 server response information is not sent to clients that do not want it
3.1.2-29 server without problem information only PUBLISH, CONNACK and DISCONNECT explain
3.1.2-30 client a client that authenticates sends only AUTH and DISCONNECT until CONNACK
3.1.3-1 client the fields of the payload of CONNECT have one fixed order
3.1.3-2 both the client identifier names the session on both sides
3.1.3-3 client the client identifier is the first field of the payload
3.1.3-4 client the client identifier is a valid string
3.1.3-5 server identifiers of 1 to 23 ASCII letters and digits are accepted
3.1.3-6 server an empty client identifier, if accepted, becomes a unique one
3.1.3-7 server an assigned client identifier acts as a given one; CONNACK has it
3.1.3-8 server after a rejected client identifier, told with 0x85, the server closes
3.1.3-9 server a client that returns within its will delay prevents the will
3.1.3-10 server user properties of a will keep their order
3.1.3-11 client the will topic is a valid string
3.1.3-12 client the user name is a valid string
3.1.4-1 server an invalid CONNECT ends the connection
3.1.4-2 server a CONNECT that fails authentication or a check ends the connection
3.1.4-3 server an older connection of the client identifier is ended with 0x8E
3.1.4-4 server clean start is acted on
3.1.4-5 server a valid CONNECT is answered with CONNACK 0x00
3.1.4-6 server nothing after a rejected CONNECT is processed, except AUTH
3.2.0-1 server CONNACK 0x00 comes before any other packet but AUTH
3.2.0-2 server there is one CONNACK per connection
3.2.2-1 server the upper seven flags of CONNACK are 0
3.2.2-2 server after clean start session present is 0
3.2.2-3 server session present says whether the session existed
3.2.2-4 client a client that does not know the session closes
3.2.2-5 client a client forgets its state if the server has none
3.2.2-6 server a refusing CONNACK has no session present
3.2.2-7 server after a refusing CONNACK the server closes
3.2.2-8 server CONNACK has one of its reason codes
3.2.2-9 server a server without QoS 1 or 2 announces its maximum QoS
3.2.2-10 server subscriptions may ask for any QoS, whatever the maximum is
3.2.2-11 client a client publishes with at most the maximum QoS
3.2.2-12 server a will with a QoS above the maximum is refused
3.2.2-13 server a retained will is refused by servers that retain nothing
3.2.2-14 client without retain available a client sets no RETAIN
3.2.2-15 client no packet is larger than the server's maximum packet size
3.2.2-16 server CONNACK has the assigned client identifier, which no other session has
3.2.2-17 client no topic alias exceeds the server's topic alias maximum
3.2.2-18 client without a topic alias maximum the server gets no aliases
3.2.2-19 server a reason string does not make CONNACK too large
3.2.2-20 server user properties do not make CONNACK too large
3.2.2-21 client the server keep alive replaces the client's
3.2.2-22 server without a server keep alive the client's counts
3.3.1-1 both a PUBLISH that is sent again has DUP
3.3.1-2 both PUBLISH with QoS 0 has no DUP
3.3.1-3 server DUP to subscribers does not come from the publisher
3.3.1-4 both no PUBLISH has QoS 3
3.3.1-5 server RETAIN makes a message replace the retained one of its name
3.3.1-6 server an empty retained message is delivered, and removes the retained one
3.3.1-7 server an empty message is never retained
3.3.1-8 server without RETAIN the retained message stays as it is
3.3.1-9 server retain handling 0 brings the retained messages
3.3.1-10 server retain handling 1 brings them to a new subscription only
3.3.1-11 server retain handling 2 brings no retained messages
3.3.1-12 server without retain as published RETAIN is 0 on delivery
3.3.1-13 server with retain as published RETAIN is as the publisher set it
3.3.2-1 both the topic name comes first in PUBLISH and is a valid string
3.3.2-2 both a topic name in PUBLISH has no wildcards
3.3.2-3 server the name of a delivered message matches a filter of its receiver
3.3.2-4 server the payload format indicator is delivered unchanged
3.3.2-5 server an expired message is not delivered
3.3.2-6 server the expiry interval is delivered less the time spent waiting
3.3.2-7 both topic aliases do not outlive their connection
3.3.2-8 both no topic alias is 0
3.3.2-9 client no topic alias exceeds the server's maximum
3.3.2-10 client a client accepts all aliases up to its maximum
3.3.2-11 server no topic alias exceeds the client's maximum
3.3.2-12 server the server accepts all aliases up to its maximum
3.3.2-13 both a response topic is a valid string
3.3.2-14 both a response topic has no wildcards
3.3.2-15 server the response topic is delivered unchanged
3.3.2-16 server the correlation data is delivered unchanged
3.3.2-17 server the user properties are delivered unchanged
3.3.2-18 server the user properties are delivered in order
3.3.2-19 both a content type is a valid string
3.3.2-20 server the content type is delivered unchanged
3.3.4-1 both PUBLISH is answered as its QoS demands
3.3.4-2 server overlapping subscriptions deliver with the highest of their QoS
3.3.4-3 server subscription identifiers of overlapping subscriptions are sent
3.3.4-4 server a single copy has the identifiers of all matching subscriptions
3.3.4-5 server each of several copies has the identifier of its subscription
3.3.4-6 client a client sends no subscription identifier in PUBLISH
3.3.4-7 client a client respects the server's receive maximum
3.3.4-8 client a full window of a client delays PUBLISH only
3.3.4-9 server the server respects the client's receive maximum
3.3.4-10 server a full window of the server delays PUBLISH only
3.4.2-1 both PUBACK has one of its reason codes
3.4.2-2 both a reason string does not make PUBACK too large
3.4.2-3 both user properties do not make PUBACK too large
3.5.2-1 both PUBREC has one of its reason codes
3.5.2-2 both a reason string does not make PUBREC too large
3.5.2-3 both user properties do not make PUBREC too large
3.6.1-1 both PUBREL has the flags 0010; others end the connection
3.6.2-1 both PUBREL has one of its reason codes
3.6.2-2 both a reason string does not make PUBREL too large
3.6.2-3 both user properties do not make PUBREL too large
3.7.2-1 both PUBCOMP has one of its reason codes
3.7.2-2 both a reason string does not make PUBCOMP too large
3.7.2-3 both user properties do not make PUBCOMP too large
3.8.1-1 both SUBSCRIBE has the flags 0010; others end the connection
3.8.3-1 client topic filters in SUBSCRIBE are valid strings
3.8.3-2 client SUBSCRIBE has at least one filter with its options
3.8.3-3 server with no local a client does not get its own messages
3.8.3-4 client no local with a shared subscription is a protocol error
3.8.3-5 server reserved bits of subscription options are malformed
3.8.4-1 server SUBSCRIBE is answered with SUBACK
3.8.4-2 server SUBACK has the identifier of its SUBSCRIBE
3.8.4-3 server an equal filter that is not shared replaces the subscription
3.8.4-4 server replacing sends retained messages with handling 0, and loses nothing
3.8.4-5 server several filters act like several packets with one SUBACK
3.8.4-6 server SUBACK has a reason code for each filter
3.8.4-7 server each code is the granted QoS or says why not
3.8.4-8 server a message has the lower QoS of publisher and subscription
3.9.2-1 server a reason string does not make SUBACK too large
3.9.2-2 server user properties do not make SUBACK too large
3.9.3-1 server reason codes in SUBACK have the order of the filters
3.9.3-2 server SUBACK has only its reason codes
3.10.1-1 both UNSUBSCRIBE has the flags 0010; others end the connection
3.10.3-1 client topic filters in UNSUBSCRIBE are valid strings
3.10.3-2 client UNSUBSCRIBE has at least one filter
3.10.4-1 server UNSUBSCRIBE removes a filter that is equal in every character
3.10.4-2 server after UNSUBSCRIBE no new messages are added
3.10.4-3 server messages in flight are completed after UNSUBSCRIBE
3.10.4-4 server UNSUBSCRIBE is answered with UNSUBACK
3.10.4-5 server UNSUBACK has the same identifier, and comes even if nothing was removed
3.10.4-6 server several filters act like several packets with one UNSUBACK
3.11.2-1 server a reason string does not make UNSUBACK too large
3.11.2-2 server user properties do not make UNSUBACK too large
3.11.3-1 server reason codes in UNSUBACK have the order of the filters
3.11.3-2 server UNSUBACK has only its reason codes
3.12.4-1 server PINGREQ is answered with PINGRESP
3.14.0-1 server DISCONNECT of a server comes only after CONNACK below 0x80
3.14.1-1 both reserved flags of DISCONNECT are answered with 0x81
3.14.2-1 both DISCONNECT has one of its reason codes
3.14.2-2 server DISCONNECT of a server has no session expiry interval
3.14.2-3 both a reason string does not make DISCONNECT too large
3.14.2-4 both user properties do not make DISCONNECT too large
3.14.4-1 both nothing is sent after DISCONNECT
3.14.4-2 both the sender of DISCONNECT closes
3.14.4-3 server DISCONNECT 0x00 discards the will
3.15.1-1 both AUTH has the flags 0000; others end the connection
3.15.2-1 both AUTH has one of its reason codes
3.15.2-2 both a reason string does not make AUTH too large
3.15.2-3 both user properties do not make AUTH too large
4.1.0-1 both the session is kept while the connection is open
4.1.0-2 server the session is discarded after its expiry interval
4.2.0-1 both there is an ordered, lossless transport in both directions
4.3.1-1 both messages of QoS 0 are sent with QoS 0 and without DUP
4.3.2-1 both QoS 1: a new message gets an unused identifier
4.3.2-2 both QoS 1: PUBLISH has the identifier, QoS 1 and no DUP
4.3.2-3 both QoS 1: PUBLISH is in flight until PUBACK
4.3.2-4 both QoS 1: an accepted message is answered with PUBACK
4.3.2-5 both QoS 1: after PUBACK the identifier means a new message
4.3.3-1 both QoS 2: a new message gets an unused identifier
4.3.3-2 both QoS 2: PUBLISH has the identifier, QoS 2 and no DUP
4.3.3-3 both QoS 2: PUBLISH is in flight until PUBREC
4.3.3-4 both QoS 2: PUBREC below 0x80 is answered with PUBREL
4.3.3-5 both QoS 2: PUBREL is in flight until PUBCOMP
4.3.3-6 both QoS 2: PUBLISH is not sent again after PUBREL
4.3.3-7 both QoS 2: a message that was sent does not expire
4.3.3-8 both QoS 2: an accepted message is answered with PUBREC
4.3.3-9 both QoS 2: after a refusing PUBREC the identifier means a new message
4.3.3-10 both QoS 2: until PUBREL a repeated PUBLISH gets PUBREC and nothing else
4.3.3-11 both QoS 2: PUBREL is answered with PUBCOMP
4.3.3-12 both QoS 2: after PUBCOMP the identifier means a new message
4.3.3-13 both QoS 2: expiry does not stop the acknowledgements
4.4.0-1 both a session that continues sends unacknowledged packets again, only then
4.4.0-2 both a PUBLISH that its receiver refused is not sent again
4.5.0-1 server an accepted message is added to every session with a matching subscription
4.5.0-2 client every PUBLISH is acknowledged, whatever the application does with it
4.6.0-1 client PUBLISH packets are sent again in their original order
4.6.0-2 client PUBACK packets have the order of their PUBLISH packets
4.6.0-3 client PUBREC packets have the order of their PUBLISH packets
4.6.0-4 client PUBREL packets have the order of their PUBREC packets
4.6.0-5 server messages of a publisher to an ordered topic are delivered in order
4.6.0-6 server by default every topic is ordered, except for shared subscriptions
4.7.0-1 both topic names have no wildcards
4.7.1-1 both # is a whole level, and the last one
4.7.1-2 both + is a whole level
4.7.2-1 server a filter that begins with a wildcard matches no name with $
4.7.3-1 both names and filters have at least one character
4.7.3-2 both names and filters have no U+0000
4.7.3-3 both names and filters have at most 65,535 bytes
4.7.3-4 server names and filters are compared without normalization
4.8.2-1 both a shared filter begins with $share/ and has a group
4.8.2-2 both a group has no wildcards; a slash and a filter follow
4.8.2-3 server each member of a group gets the QoS granted to it
4.8.2-4 server QoS 2 in a group is completed when the member returns
4.8.2-5 server QoS 2 in a group goes to nobody after the session ends
4.8.2-6 server what a member of a group refuses goes to nobody else
4.9.0-1 both the first quota is above 0, at most the receive maximum
4.9.0-2 both without quota no PUBLISH above QoS 0 is sent
4.9.0-3 both without quota all other packets are still processed
4.12.0-1 server an unsupported authentication method ends the connection
4.12.0-2 server AUTH of the server asks for more with 0x18
4.12.0-3 client AUTH of the client answers with 0x18
4.12.0-4 server a server that rejects the authentication closes
4.12.0-5 both all AUTH packets and CONNACK repeat the method of CONNECT
4.12.0-6 server without a method the server sends neither AUTH nor a method
4.12.0-7 client without a method the client sends no AUTH
4.12.1-1 client re-authentication uses the method of CONNECT
4.12.1-2 both a failed re-authentication ends the connection
4.13.1-1 server a malformed packet or protocol error ends the connection
4.13.2-1 both reason codes from 0x80 on in CONNACK or DISCONNECT end the connection
6.0.0-1 both packets come in binary WebSocket frames; others end the connection
6.0.0-2 both WebSocket frames and packets need not begin together
6.0.0-3 client a WebSocket client offers the subprotocol mqtt
6.0.0-4 server the subprotocol that the server selects is mqtt
"""


def _table() -> Iterator[Statement]:
    for version, text in ((V4, _V4), (V5, _V5)):
        for line in text.strip().splitlines():
            number, binds, summary = line.split(" ", 2)
            yield Statement(version, f"MQTT-{number}", Binds(binds), summary)


STATEMENTS: Final = {(each.version, each.number): each for each in _table()}

_CRASH: Final = "tests/mqtt/test_mqtt_crash.py::test_kill_9_loses_nothing_and_repeats_nothing_of_qos_2"
# Statements that a test outside of the modules `MODULES` shows.
ELSEWHERE: Final = {
    (V4, "MQTT-7.1.1-1"): _CRASH,  # over TCP
    (V5, "MQTT-4.2.0-1"): _CRASH,
}

# What `statement` noted: each statement with its tests.
_TESTS: Final[dict[tuple[int, str], set[str]]] = {}


def statement(version: int, *numbers: str) -> Callable[[F], F]:
    """Note that the decorated test shows that the broker meets *numbers* (``MQTT-3.1.0-1``) of *version*."""
    unknown = [number for number in numbers if (version, number) not in STATEMENTS]
    if unknown or not numbers:
        raise LookupError(f"MQTT {version} has no statements {unknown}; give some of those in the table")

    def note(test: F) -> F:
        path = Path(test.__code__.co_filename).relative_to(ROOT)
        for number in numbers:
            _TESTS.setdefault((version, number), set()).add(f"{path.as_posix()}::{test.__name__}")
        return test

    return note


def shown_by() -> dict[tuple[int, str], list[str]]:
    """Return the tests of each statement that has some, as pytest names them."""
    for path in sorted(Path(__file__).parent.glob(MODULES)):
        importlib.import_module(f"tests.mqtt.{path.stem}")
    found = {key: sorted(names) for key, names in _TESTS.items()}
    for key, name in ELSEWHERE.items():
        found[key] = [*found.get(key, ()), name]
    return found


@cache
def defined_tests(path: Path) -> set[str]:
    """Return the names of the tests in the file *path*."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


HEAD: Final = """\
# MQTT conformance

Generated from the marks of the tests by `python -m tests.mqtt.normative`.

The specifications of MQTT 3.1.1 and MQTT 5 number what an implementation must do. This page has every number, its
subject in short, the side that it binds, and the tests that show that the broker meets it. CI runs all of them for each
change, so each is met in the version that this page belongs to. The specification has the exact words.

"""


def page() -> str:
    """Return the table of all statements and their tests as Markdown."""
    tests, parts = shown_by(), [HEAD]
    for version, name in ((V4, "MQTT 3.1.1"), (V5, "MQTT 5")):
        rows = [each for each in STATEMENTS.values() if each.version == version]
        bound = [each for each in rows if each.binds_a_server]
        tested = sum((version, each.number) in tests for each in bound)
        parts.append(
            f"## {name}\n\n{len(rows)} statements; {len(bound)} bind a server, of which {tested} are tested.\n\n"
        )
        parts.append("| number | binds | what it says | tests |\n|---|---|---|---|\n")
        parts += [_row(each, tests.get((version, each.number), [])) for each in rows]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _row(each: Statement, tests: list[str]) -> str:
    shown = "<br>".join(f"`{name.rpartition('/')[2]}`" for name in tests)
    return f"| {each.number} | {each.binds.value} | {each.summary.replace('|', chr(92) + '|')} | {shown} |\n"


# packets that the codec would not make


def packet(first: int, *parts: bytes) -> bytes:
    """Return a packet with the first byte *first* and the content *parts*."""
    content = b"".join(parts)
    return bytes((first,)) + encode_varint(len(content)) + content


def connect_packet(
    version: int,
    flags: int = 2,
    payload: bytes | None = None,
    *,
    name: bytes = b"\0\4MQTT",
    level: int | None = None,
    keep_alive_s: int = 0,
    properties: bytes = b"",
) -> bytes:
    """Return CONNECT with any *flags* and *payload*, which is the client identifier ``c`` if it is None."""
    head = name + bytes((version if level is None else level, flags)) + keep_alive_s.to_bytes(2)
    found = encode_varint(len(properties)) + properties if version == V5 else b""
    return packet(0x10, head, found, encode_text("c") if payload is None else payload)


def filter_packet(first: int, packet_id: int, version: int, *content: bytes) -> bytes:
    """Return SUBSCRIBE or UNSUBSCRIBE, which *first* says, without properties."""
    return packet(first, packet_id.to_bytes(2), b"\0" if version == V5 else b"", *content)


def publish_packet(version: int, name: bytes, payload: bytes = b"", flags: int = 0, properties: bytes = b"") -> bytes:
    """Return PUBLISH with any *flags*, with the packet identifier 1 if they have a QoS."""
    number = b"\0\1" if flags & 6 else b""
    found = encode_varint(len(properties)) + properties if version == V5 else b""
    return packet(0x30 | flags, encode_data(name), number, found, payload)


async def answer_to(mqtt: MqttBroker, data: bytes, version: int) -> Packet | None:
    """Open a connection, send *data*, wait until the broker closes; return its last packet."""
    talk = mqtt.open(version)
    await talk.wire.send(data)
    return await talk.closed()


async def after_connect(mqtt: MqttBroker, data: bytes, version: int, client_id: str = "bad") -> Packet | None:
    """Send *data* on an accepted connection, wait until the broker closes; return its last packet."""
    talk = await mqtt.connect(client_id, version)
    await talk.wire.send(data)
    return await talk.closed()


async def before_fence(talk: MqttClient, publisher: MqttClient, name: str = "fence") -> list[bytes]:
    """Return the payloads that *talk* gets before a message that is published now; it must be subscribed to *name*."""
    await publisher.publish(name, b"the fence", 1, 65_000)
    found: list[bytes] = []
    while True:
        (one,) = await talk.messages(1)
        if one.qos:
            await talk.acknowledge(one)
        if one.payload == b"the fence":
            return found
        found.append(one.payload)


async def stay(mqtt: MqttBroker, client_id: str, version: int, **more: Any) -> MqttClient:
    """Connect to a session that is kept for 100 s, or for a long time with MQTT 3.1.1."""
    return await mqtt.connect(client_id, version, clean=False, expiry_s=100, **more)


def check_disconnect(last: Packet | None, version: int, reason: ReasonCode) -> None:
    """Check the last packet on an accepted connection, for which MQTT 3.1.1 has none."""
    if version == V5:
        assert isinstance(last, Disconnect), last
        assert last.reason == reason, last
    else:
        assert last is None


def check_refusal(last: Packet | None, version: int, reason: ReasonCode, code: int | None = None) -> None:
    """Check the answer to CONNECT; *code* is that of MQTT 3.1.1, None if it closes without CONNACK."""
    expected = reason if version == V5 else code
    if expected is None:
        assert last is None
        return
    assert isinstance(last, Connack), last
    assert (last.reason, last.session_present) == (expected, False)


if __name__ == "__main__":
    from tests.mqtt import normative  # the module that the tests import, which has their marks

    print(normative.page(), end="")
