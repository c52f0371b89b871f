"""The subscriptions of one client: SUBSCRIBE and UNSUBSCRIBE (MQTT 5 sections 3.8 to 3.11)."""

from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Final, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps, finish_now
from martlet.sessions.session import Session
from martlet_mqtt.admin.sys_topics import SysTopics, is_sys
from martlet_mqtt.inbound.incoming import Incoming
from martlet_mqtt.mapping.frames import Grant
from martlet_mqtt.outbound.outgoing import Outgoing
from martlet_mqtt.outbound.selectors import selector_of
from martlet_mqtt.outbound.stored_subscriptions import Rest, grant_of, options_of, rest_of
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.connection import MqttConnection, State
from martlet_mqtt.wire.errors import MqttError, NotAccepted, reason_of
from martlet_mqtt.wire.names import SharedFilter, check_filter, is_shared, split_shared
from martlet_mqtt.wire.packets import FilterSubscription, Suback, Subscribe, Unsuback, Unsubscribe

__all__ = ["FILTER_US", "ClientSubscriptions", "start_of"]

# Time for one filter of SUBSCRIBE or UNSUBSCRIBE.
FILTER_US: Final = 30.0
# Filters that a shared subscription counts as: its group may have to be opened.
STEPS_A_SHARE: Final = 8


def start_of(session: Session) -> int | None:
    """Return the log position from which to follow the log for an old *session*; None for the end of the log."""
    return session.position if any(map(_is_durable, session.filters.items())) else None


@final
class ClientSubscriptions:
    """Begins and ends the subscriptions of one client; *outgoing* sends their messages."""

    __slots__ = (
        "_connection",
        "_context",
        "_gate",
        "_incoming",
        "_peer",
        "_session",
        "_sys",
        "outgoing",
    )

    def __init__(
        self,
        peer: Peer,
        connection: MqttConnection,
        context: Context,
        gate: Gate,
        session: Session,
        incoming: Incoming,
        outgoing: Outgoing,
        sys_topics: SysTopics,
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._context = context
        self._gate = gate
        self._session = session
        self._incoming = incoming
        self.outgoing = outgoing
        self._sys = sys_topics

    @property
    def _is_ended(self) -> bool:
        """Whether the client is gone, or lost its session to a failed commit."""
        return self._connection.state is State.ENDED

    def resume(self) -> Steps[None]:
        """Resume the subscriptions of the session; one that the client may no longer read stays, without messages."""
        self._note_subscriptions()
        budget = Budget(FILTER_US)
        for topic_filter, options in list(self._session.filters.items()):
            with suppress(Refused):
                self._resume_one(grant_of(topic_filter, options), rest_of(options))
            if budget.is_over(_steps_of(topic_filter)):
                yield
                if self._is_ended:
                    return

    def takes_slices(self) -> bool:
        """Return whether `resume` takes so long that it must run in slices."""
        filters = self._session.filters
        return len(filters) > FILTER_US or sum(map(_steps_of, filters)) > FILTER_US

    def _resume_one(self, grant: Grant, rest: Rest | None) -> None:
        """Resume a subscription whose retained messages *rest* are still to be sent. Raises `Refused`."""
        topic_filter = grant.subscription.topic_filter
        shared = split_shared(topic_filter)
        if shared is not None:
            self._connection.has_leases = True
            self.outgoing.shares.add(grant, shared)
        elif is_sys(topic_filter):
            self._gate.check("subscribe", topic_filter)
            self._sys.subscribe(self.outgoing, grant, with_values=False)
        else:
            self.outgoing.go_on(grant, rest)
            self._incoming.marks |= grant.subscription.no_local

    def subscribe(self, packet: Subscribe) -> Awaitable[None] | None:
        """Act on SUBSCRIBE. Raises `Refused` and `MqttError`."""
        if not self._context.broker.projections.has_applied(self._context.retained):
            return self._subscribe_late(packet)
        steps = sum([_steps_of(each.topic_filter) for each in packet.subscriptions])
        return self._in_slices(self._subscribe(packet), steps)

    def _in_slices(self, steps: Steps[None], count: int) -> Awaitable[None] | None:
        """Do *steps*, which handle *count* filters: in slices if there are many, otherwise at once."""
        if count > FILTER_US:
            return self._context.broker.turns.finish(steps)
        finish_now(steps)
        return None

    async def _subscribe_late(self, packet: Subscribe) -> None:
        """Subscribe once the projection has applied all retained messages that are acknowledged now."""
        await self._context.broker.projections.wait_applied(self._context.retained)
        if not self._is_ended:
            await self._context.broker.turns.finish(self._subscribe(packet))

    def _subscribe(self, packet: Subscribe) -> Steps[None]:
        budget = Budget(FILTER_US)
        numbers = packet.properties.identifiers
        identifier = numbers[0] if numbers else 0
        codes: list[int] = []
        begun: list[tuple[Grant, bool, Rest | None]] = []
        texts: list[str] = []
        for each in packet.subscriptions:
            try:
                selector = selector_of(self._context.broker, packet.properties) if self._may_select else ""
                begun.append(self._begin(Grant(self._with_options(each), identifier, selector)))
                codes.append(each.qos)
            except NotAccepted as error:
                codes.append(error.reason)
                texts.append(str(error))
            except Refused as refused:
                codes.append(_reason_of(refused))
                texts.append(str(refused))
                self._incoming.complain("refused a subscription", str(refused))
            if budget.is_over(_steps_of(each.topic_filter)) and not self._is_ended:
                yield
            if self._is_ended:
                return
        self._mark([grant for grant, _, _ in begun])
        self._peer.hold_until(self._session.until)
        self._send(Suback(packet.packet_id, tuple(codes)), texts[0] if texts else "")  # SUBACK has one reason
        for grant, is_new, rest in begun:
            self._send_retained(grant, is_new, rest)
            if budget.is_over():
                yield
                if self._is_ended:
                    return

    def _with_options(self, each: FilterSubscription) -> FilterSubscription:
        """Return *each*; for a bridge of MQTT 3 with the options that Mosquitto sets for bridges."""
        if not self._connection.is_bridge:
            return each
        return FilterSubscription(
            each.topic_filter, each.qos, not is_shared(each.topic_filter), retain_as_published=True
        )

    @property
    def _may_select(self) -> bool:
        """Whether SUBSCRIBE may have a selector in its user properties."""
        return self._context.config.selectors and self._connection.version == V5

    def _begin(self, grant: Grant) -> tuple[Grant, bool, Rest | None]:
        """Begin or change a subscription; return it, whether it is new, and the retained messages to send for it.

        Raises `Refused` and `MqttError`.
        """
        topic_filter, config = grant.subscription.topic_filter, self._context.config
        try:
            shared = split_shared(topic_filter)
            check_filter(topic_filter if shared is None else shared.topic_filter)
        except MqttError as error:
            raise NotAccepted(str(error), error.reason) from error
        if shared is not None and grant.subscription.no_local:
            raise MqttError(f"shared subscription {topic_filter[:80]!r} has the option no local")  # [MQTT-3.8.3-4]
        if len(topic_filter.encode()) > config.name_bytes_max:
            raise NotAccepted("the topic filter is too long", ReasonCode.TOPIC_FILTER_INVALID)
        is_new = topic_filter not in self._session.filters
        if is_new and len(self._session.filters) >= config.filters_max:
            raise Refused(Reason.BUSY, f"the session has {config.filters_max} filters; mqtt.filters_max allows no more")
        if is_new:
            self._gate.allowance.check_subscriptions()
        if is_sys(topic_filter):
            self._gate.check("subscribe", topic_filter)
        else:
            self.outgoing.check(topic_filter if shared is None else shared.topic_filter)
        if grant.selector and is_sys(topic_filter):
            text = f"topic filter {topic_filter[:80]!r} is for metrics, which a selector cannot select; leave it out"
            raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR)
        if shared is not None:
            self._share(grant, shared)
        rest = self.outgoing.rest_of_new(grant) if self._wants_retained(grant, is_new) else None
        try:
            self._session.subscribe(topic_filter, self._options_to_store(grant, rest), self._begin_of(grant))
        except Refused:
            if shared is not None and is_new:
                self.outgoing.shares.remove(topic_filter)
            raise
        if is_new:
            self._note_subscriptions()
        if shared is None and not is_sys(topic_filter):
            self.outgoing.subscribe(grant)
        return grant, is_new, rest

    def _note_subscriptions(self) -> None:
        """Count the filters of the session for the client's quotas."""
        self._gate.allowance.note_subscriptions(len(self._session.filters))

    def _wants_retained(self, grant: Grant, is_new: bool) -> bool:
        """Return whether *grant* asks for retained messages, and its filter may match some."""
        topic_filter, handling, retained = (
            grant.subscription.topic_filter,
            grant.subscription.retain_handling,
            self._context.retained,
        )
        if is_shared(topic_filter) or is_sys(topic_filter):
            return False  # shared subscriptions get no retained messages (MQTT 5 section 4.8.2)
        return retained.may_match(topic_filter) and (handling == 0 or (handling == 1 and is_new))

    def _options_to_store(self, grant: Grant, rest: Rest | None) -> bytes:
        """Return the options of *grant* for the session, with *rest*, the retained messages to send for it.

        If *rest* is None, the retained messages still to be sent for an earlier SUBSCRIBE remain.
        """
        if not self._session.is_stored or not grant.subscription.qos:
            return options_of(grant)
        before = self._session.filters.get(grant.subscription.topic_filter, b"")
        return options_of(grant, rest if rest is not None else rest_of(before))

    def _begin_of(self, grant: Grant) -> int:
        """Return the log position at which *grant* begins for the session; 0 for the session's own position.

        A subscription that already has QoS 1 or 2 keeps its beginning [MQTT-3.8.4-4]. A subscription that had QoS 0
        begins now, because a session that returns needs no older messages for it.
        """
        topic_filter = grant.subscription.topic_filter
        if not self._session.is_stored or not _is_durable((topic_filter, options_of(grant))):
            return 0
        before = self._session.filters.get(topic_filter)
        is_durable = before is not None and _is_durable((topic_filter, before))
        return 0 if is_durable else self._context.feed.end_position()

    def _share(self, grant: Grant, shared: SharedFilter) -> None:
        """Join a shared subscription. Raises `Refused`, and `NotAccepted` if other members have another selector."""
        self._connection.has_leases = True
        try:
            self.outgoing.shares.add(grant, shared)
        except Refused as refused:
            if refused.reason is not Reason.ILLEGAL:
                raise
            text = f"all clients of a shared subscription must have the same selector; {refused}"
            raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR) from refused

    def _mark(self, begun: Sequence[Grant] = ()) -> None:
        """Update whether to mark the client's messages as its own, after changes of subscriptions; *begun* are new."""
        if self._incoming.marks:  # the last subscription with no local may be gone
            self._incoming.marks = any(options[0] & 4 for options in self._session.filters.values())
        self._incoming.marks |= any(grant.subscription.no_local for grant in begun)

    def _send_retained(self, grant: Grant, is_new: bool, rest: Rest | None) -> None:
        handling = grant.subscription.retain_handling
        if is_sys(grant.subscription.topic_filter):
            with_values = handling == 0 or (handling == 1 and is_new)
            self._sys.subscribe(self.outgoing, grant, with_values=with_values)
        elif rest is not None:
            self.outgoing.send_retained(grant, rest)

    def unsubscribe(self, packet: Unsubscribe) -> Awaitable[None] | None:
        """Act on UNSUBSCRIBE. Raises `Refused`."""
        return self._in_slices(self._unsubscribe(packet), len(packet.filters))

    def _unsubscribe(self, packet: Unsubscribe) -> Steps[None]:
        budget = Budget(FILTER_US)
        codes: list[int] = []
        for topic_filter in packet.filters:
            is_known = topic_filter in self._session.filters
            if is_known:
                self._session.unsubscribe(topic_filter)
                self.outgoing.unsubscribe(topic_filter)
                self._sys.unsubscribe(self.outgoing, topic_filter)
            codes.append(ReasonCode.SUCCESS if is_known else ReasonCode.NO_SUBSCRIPTION_EXISTED)
            if budget.is_over() and not self._is_ended:
                yield
            if self._is_ended:
                return
        self._mark()
        self._note_subscriptions()
        self._peer.hold_until(self._session.until)
        self._send(Unsuback(packet.packet_id, tuple(codes)))

    def _send(self, packet: Suback | Unsuback, text: str = "") -> None:
        """Send *packet*, with the reason *text* if it fits. Raises `MqttError` if even *packet* alone is too large."""
        connection = self._connection
        if connection.version != V5:
            data = encode_packet(packet, connection.version)
        else:
            data = connection.explained(packet, text if connection.explains else "")
        if not data:
            count, limit = len(packet.codes), connection.accepted_bytes_max
            text = f"the client accepts {limit} bytes, fewer than the answer to {count} topic filters has; send fewer"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)
        self._context.counters.answers += 1
        self._peer.send(data)


def _is_durable(stored: tuple[str, bytes]) -> bool:
    """Return whether a session keeps messages for a stored filter: it has QoS 1 or 2, and is not shared or ``$SYS``."""
    topic_filter, options = stored
    return bool(options[0] & 3) and not is_shared(topic_filter) and not is_sys(topic_filter)


def _steps_of(topic_filter: str) -> int:
    return STEPS_A_SHARE if is_shared(topic_filter) else 1


def _reason_of(refused: Refused) -> ReasonCode:
    return ReasonCode.TOPIC_FILTER_INVALID if refused.reason is Reason.ILLEGAL else reason_of(refused)
