"""The broker as plugins use it. Publishing is synchronous, and hence atomic.

All callers run on the one event loop and never see a half-done step: nothing waits between reading shared state and
writing it. The server waits for the disk and for clients after it has handled a whole socket read.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeGuard, TypeVar, final

from martlet.access import UNLIMITED, Authentication, Gate, Quotas, Replies, Revocation, RoundPublishes, Rules
from martlet.contracts import NO_ORIGIN, Authorizer, Compile, Identity, LoginOrigin, Peer, Router, Stage
from martlet.delivery.feed import Cursors
from martlet.delivery.routing.selection import Selection, Selections
from martlet.delivery.subscriptions import Subscriptions
from martlet.delivery.tail_reader import Tails
from martlet.draining import Draining
from martlet.errors import LocalProtocolError, MartletError, Reason, Refused
from martlet.groups.shared_groups import SharedGroups
from martlet.message import PROPERTIES_BYTES_MAX, Message, Placed
from martlet.records.compression import DELIVERED_BYTES_MAX
from martlet.runtime.clock import Clock
from martlet.runtime.ids import Ids
from martlet.runtime.native import kernel_name
from martlet.runtime.stats import Stats
from martlet.runtime.turns import Turns
from martlet.sessions.sessions import Sessions
from martlet.settings import BrokerConfig, DeliveryConfig
from martlet.stages import Stages
from martlet.state import Projections
from martlet.state.journal import Journal
from martlet.store import Store
from martlet.store.append.items import AppendItem, AppendResult, body_of
from martlet.store.format.light import DISPATCH, OFFSETS, may_be_indexed, with_light_topics
from martlet.store.queues.queues import Queue
from martlet.tables.groups import Groups
from martlet.tables.saved import Tables
from martlet.tables.topics import WRITE, Topic, Topics

__all__ = ["OWN_STATE", "Broker"]

# The owner of the core's projections, in place of a plugin's name.
OWN_STATE: Final = "martlet"

T = TypeVar("T")


@final
class Broker:
    """The broker as plugins get it in their hooks.

    Its components are attributes: ``config`` (`BrokerConfig`), ``topics`` (`Topics`), ``groups`` (`Groups`),
    ``subscriptions`` (`Subscriptions`), ``shared_groups`` (`SharedGroups`), ``sessions`` (`Sessions`), ``turns``
    (`Turns`), ``projections`` (`Projections`), ``tables`` (`Tables`), ``store``, ``clock`` (``clock.now_ms()``),
    ``ids`` (``ids.below(n)``, and ``ids.unique()``, which nobody can guess), ``stats`` (``stats.add(name, function)``),
    ``rules`` (`Rules`), ``revocation`` (`Revocation`), ``quotas`` (`Quotas`), ``replies`` (`Replies`),
    ``round_publishes`` (`RoundPublishes`) and ``authentication`` (`Authentication`). All methods are for the event
    loop and never wait.

    A protocol acts for its clients through a `gate`. Calls without a gate are actions of the broker itself, such as the
    delivery of a timer: no authorizer is asked, and the internal topics are open.
    """

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        groups: Groups,
        clock: Clock,
        ids: Ids,
        stats: Stats,
        delivery: DeliveryConfig | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.topics = topics
        self.groups = groups
        self.clock = clock
        self.ids = ids
        self.stats = stats
        self.turns = Turns(store.disk.off_loop)  # runs all long work of this broker in slices
        self.stages = Stages()
        self._routing = Stages()  # the messages that each router wants
        self.routers: tuple[tuple[str, Router], ...] = ()
        self._filters: dict[str, Compile] = {}
        self._selections = Selections(self.filter_compiler)
        self.authentication = Authentication(ids.key(), clock.now_ms)
        self.replies = Replies()
        self.round_publishes = RoundPublishes()  # the messages of this round that are not stored yet
        self.rules = Rules()
        self.capabilities: dict[type, object] = {}
        self.refused = 0
        self._journals: dict[str, Journal] = {}
        # Set by persistence.run: registers a callback for the time when the tables are written.
        self.saver: Callable[[Callable[[str], None]], None] | None = None
        self.projections = Projections(store, self.turns)
        self.tables = Tables(store)
        delivery = delivery or DeliveryConfig()
        self.tails = Tails(store, topics, delivery.encoded_bytes)
        self.cursors = Cursors(store, topics, self.tails)
        self.cursors.asks = lambda: bool(self.rules.authorizers)
        self.cursors.on_opened = self.rules.add_named
        self.rules.on_changed.append(self.cursors.forget_routes)
        self.subscriptions = Subscriptions(store, topics, self.tails, delivery)
        journal = self.journal("shared-groups")
        self.shared_groups = SharedGroups(store, topics, groups, self.tails, journal, clock, delivery)
        self.projections.add(OWN_STATE, self.shared_groups.state)
        self.sessions = Sessions(store, self.journal("sessions"), self.turns, clock, delivery)
        self.projections.add(OWN_STATE, self.sessions.table)
        self.sessions.writer.is_current = lambda: self.projections.has_applied(self.sessions.table)
        self.sessions.writer.wait_current = lambda: self.projections.wait_applied(self.sessions.table)
        self.quotas = Quotas()
        self.rules.on_changed.append(self.quotas.changed)
        self.revocation = Revocation()
        self.revocation.waiting += [self.quotas.accounts]
        self.revocation.waiting += [self.cursors.waiting, self.subscriptions.waiting, self.shared_groups.waiting]
        self.rules.on_changed.append(self.revocation.recheck_all)
        self.draining = Draining(store, topics, groups, self.shared_groups.progress, self.sessions, self.turns)
        for table in (topics.table, groups.table, groups.offsets.table, groups.offsets.light_table):
            self.tables.register(table)
        stats.add("broker", self.statistics)
        stats.add("turns", self.turns.statistics)
        stats.add("logins", self.authentication.statistics)
        stats.add("projections", self.projections.statistics)
        stats.add("tails", self.tails.statistics)
        stats.add("cursors", self.cursors.statistics)
        stats.add("subscriptions", self.subscriptions.statistics)
        stats.add("shares", self.shared_groups.statistics)
        stats.add("sessions", self.sessions.statistics)
        stats.add("quotas", self.quotas.statistics)

    def set_stages(self, stages: Sequence[tuple[str, Stage]], routers: Sequence[tuple[str, Router]] = ()) -> None:
        """Make messages pass *stages*, then ask *routers* which light queues index them; each is paired with its
        plugin.
        """
        self.routers = tuple(routers)
        if routers and not self.groups.offsets.keeps_light:
            self.groups.offsets.keeps_light = True
            self.groups.offsets.note_changed()
        self.store.writer.light_queues = bool(routers)
        self._routing = Stages([(name, Stage(self._route, each.properties, each.sys_flag)) for name, each in routers])
        self.stages = Stages([*stages, ("", self._last_stage())] if routers else stages)

    def _last_stage(self) -> Stage:
        """Return the stage that asks the routers; it wants the messages that any router wants."""
        routing = self._routing
        if routing.every_message:
            return Stage(self._route)
        # The stage also wants these two properties, to remove names that no router has given.
        return Stage(self._route, (*routing.words, DISPATCH, OFFSETS), routing.sys_flag)

    def publish(self, message: Message, passed: str = "") -> Placed:
        """Store *message* and return its location; it is durable once the log is flushed up to `Placed.end`.

        A protocol passes that position to `Peer.hold_until` before it acknowledges the message.

        Args:
          passed: the plugin whose stage has held the message until now: only the stages after its own run.

        Raises:
          Refused: there is no such topic or queue, the topic is not writable, the message is too large, or the store is
            read-only or busy.
          StoreFailed: the disk failed.
        """
        stages = self.stages.after(passed) if passed else self.stages
        return self.store.writer.append_all((self._item_of(self._apply_stages(message, stages)),)).placed(0)

    def publish_all(
        self,
        items: Sequence[AppendItem | Message],
        *,
        atomic: bool = False,
        notes: Sequence[tuple[Journal, bytes]] = (),
        own: Callable[[Message], Message] | None = None,
        passed: str = "",
    ) -> AppendResult:
        """Store messages of any topics, and return their locations; a refused message does not affect the others.

        An item is a `Message`, or a tuple for a queue from `find_queue`: slices of the receive buffer, no object per
        message. Tuples pass no stage, so no stage may want one of them: the caller checks that with `Stages.words` and
        `Stages.sys_flag`. Hold the answers until `AppendResult.end`.

        Args:
          atomic: store all messages or none, also after a crash.
          notes: journal entries to store with the messages, such as the acknowledgements of others; requires *atomic*.
            If only notes are stored, hold the answers until `NEXT_COMMIT`.
          own: makes from each `Message`, as the stages left it, a record for a topic of the plugin, to store with the
            messages; requires *atomic*.
          passed: as for `publish`.

        Raises:
          LocalProtocolError: a stage wants every message, and an item is a tuple.
          Refused: with *atomic* only: a message is refused, or they are too many or too large together; none was
            stored.
          StoreFailed: the disk failed.
        """
        assert atomic or not (notes or own), "journal entries and own records are stored all or none"
        if not (notes or own) and self._are_usual(items):
            return self.store.writer.append_all(items, atomic=atomic)
        stages = self.stages.after(passed) if passed else self.stages
        appended: list[AppendItem] = []
        own_records: list[Message] = []
        refused: dict[int, Refused] = {}
        for index, item in enumerate(items):
            try:
                if isinstance(item, Message):
                    message = self._apply_stages(item, stages)
                    appended.append(self._item_of(message))
                    if own is not None:
                        own_records.append(own(message))
                else:
                    self._check_tuple(item)
                    appended.append(item)
            except Refused as error:
                if atomic:
                    raise
                refused[index] = error
        records = [*own_records, *self._records_of(notes)] if atomic else []
        appended += [self.store.writer.item(record, 0) for record in records]
        result = self.store.writer.append_all(appended, atomic=atomic)
        if records:
            result.forget_last(len(records))
        if refused:
            result.add_refused(refused)
        return result

    def find_queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return queue *queue_id* of *topic* for a tuple of `publish_all`; None if the item must be a `Message`.

        A `Message` is needed if a stage wants every message, and if `publish` would choose the queue or refuse.
        """
        known_topic = self.topics.get(topic)
        if self.stages.every_message or known_topic is None or not 0 <= queue_id < known_topic.open_queues:
            return None
        return known_topic.queue(queue_id)

    @property
    def delivered_bytes_max(self) -> int:
        """The longest body that is decompressed for subscribers: as long as a message may be, and at least 16 MiB.

        So it takes no more memory than an uncompressed body, or than RocketMQ's producers allow.
        """
        return max(DELIVERED_BYTES_MAX, self.config.message_bytes_max)

    def _records_of(self, notes: Sequence[tuple[Journal, bytes]]) -> list[Message]:
        """Return records with *notes*; writes the earlier notes of their journals first."""
        by_journal: dict[Journal, list[bytes]] = {}
        for journal, note in notes:
            by_journal.setdefault(journal, []).append(note)
        records: list[Message] = []
        for journal, journal_notes in by_journal.items():
            records += journal.records_of(journal_notes)
        for journal in by_journal:
            journal.write()
        return records

    def reserve(self, message: Message) -> Message:
        """Return *message* as `publish` would store it: after the stages, with its queue. It is not stored.

        A plugin stores it later with `Writer.append_all`.

        Raises:
          Refused: as for `publish`.
          StoreFailed: the disk failed.
        """
        message = self._apply_stages(message, self.stages)
        message.queue_id = self.queue_for_later(message)
        return message

    def journal(self, name: str) -> Journal:
        """Return the journal *name*, in which a plugin keeps its notes; use the plugin's name.

        Raises:
          ValueError: the name contains other characters than a-z, 0-9, _ and -, or is too long.
        """
        journal = self._journals.get(name)
        if journal is None:
            journal = self._journals[name] = Journal(self.store, name)
        return journal

    def queue_for_later(self, message: Message) -> int:
        """Return the queue of a *message* that a stage stores in another topic until it is due; choose one if needed.

        After a crash, a topic whose file is not written yet is recreated from its records. *message* is no record of
        its topic, so for a topic without records a note in the log is written instead.

        Raises:
          Refused: as for `publish`.
          StoreFailed: the disk failed.
        """
        topic = self._open_topic(message)
        queue_id = self._choose_queue(topic, message.queue_id)
        self.shared_groups.keep_topic(topic.name, of_personal=False)
        for queue in topic.queues.values():
            if queue.next_offset or queue.noted >= 0:
                break
        else:
            self.store.notes.note_offsets([topic.queue(queue_id)])
        return queue_id

    def _item_of(self, message: Message) -> AppendItem:
        """Return *message*, which has passed the stages, as an item for its queue. Raises as `publish`."""
        topic, queue_id = self._open_topic(message), message.queue_id
        if not 0 <= queue_id < topic.write_queues:
            queue_id = self._choose_queue(topic, queue_id)
        return self.store.writer.item(message, queue_id)

    def _are_usual(self, items: Sequence[AppendItem | Message]) -> TypeGuard[Sequence[AppendItem]]:
        """Return whether all *items* are tuples, which the broker stores unchanged."""
        if self.stages.every_message:
            return False
        limit = self.config.message_bytes_max
        for item in items:  # noqa: SIM110 - a generator would cost as much as the rest
            if type(item) is Message or len(body_of(item)) > limit:
                return False
        return True

    def _check_tuple(self, item: AppendItem) -> None:
        """Raise if *item* must be a `Message`, or is too large."""
        if self.stages.every_message:
            text = "a stage wants every message, which a tuple does not bring it; publish a Message"
            raise LocalProtocolError(text)
        size, limit = len(body_of(item)), self.config.message_bytes_max
        if size > limit:
            raise Refused(Reason.ILLEGAL, f"message body is {size} bytes; broker.message_bytes_max is {limit}")

    def _choose_queue(self, topic: Topic, queue_id: int) -> int:
        """Return *queue_id* if *topic* has it; choose a queue of the topic if it is negative."""
        if queue_id < 0:
            return self.ids.below(topic.write_queues)
        topic.check_queue(queue_id)
        return queue_id

    def _open_topic(self, message: Message) -> Topic:
        """Return the topic of *message* if the message may be stored there, else raise `Refused`."""
        name, size, properties_size = message.topic, len(message.body), len(message.properties)
        topic = self.topics.get(name)
        if topic is None:
            text = f"topic[{name}] not exist, apply first please! Create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text)
        if not topic.perm & WRITE or not topic.write_queues:
            text = f"topic[{name}] is not writable; its perm is {topic.perm} with {topic.write_queues} write queues"
            raise Refused(Reason.NO_PERMISSION, text)
        limit = self.config.message_bytes_max
        if size > limit:
            raise Refused(Reason.ILLEGAL, f"message body is {size} bytes; broker.message_bytes_max is {limit}")
        if properties_size > PROPERTIES_BYTES_MAX:
            text = f"message properties are {properties_size} bytes; a record holds {PROPERTIES_BYTES_MAX}"
            raise Refused(Reason.ILLEGAL, text)
        return topic

    def _apply_stages(self, message: Message, stages: Stages) -> Message:
        """Return *message* as *stages* leave it."""
        if not stages.pairs or not stages.may_want(message):
            return message
        for index, (plugin, stage) in enumerate(stages.pairs):
            if not stages.wants(index, message):
                continue
            try:
                changed: object = stage.change(message)
                if not isinstance(changed, Message):
                    raise TypeError(f"it returned {changed!r}; return the message")
                message = changed
            except Refused:
                self.refused += 1
                raise
            except Exception as error:
                self.refused += 1
                text = f"plugin {plugin!r} failed in its stage; {type(error).__name__}: {error}"
                raise Refused(Reason.UNAVAILABLE, text) from error
        return message

    def _route(self, message: Message) -> Message:
        """Apply the last stage: name in *message* exactly the light queues that index it."""
        if not may_be_indexed(message.topic.encode()):
            return message
        topics: dict[str, None] = {}
        for index, (plugin, router) in enumerate(self.routers):
            if not self._routing.wants(index, message):
                continue
            try:
                topics.update(dict.fromkeys(map(_check_name, router.names(message))))
            except Refused:
                raise
            except Exception as error:
                text = f"plugin {plugin!r} failed in its router; {type(error).__name__}: {error}"
                raise Refused(Reason.UNAVAILABLE, text) from error
        message.properties = with_light_topics(message.properties, topics)
        return message

    def call_when_saved(self, tell: Callable[[str], None]) -> None:
        """Call *tell* once the current topics and groups are on disk; immediately in a broker that does not save them.

        The argument of *tell* is empty, or the reason why a table could not be written yet; the broker retries.
        """
        if self.saver is None:
            tell("")
        else:
            self.saver(tell)

    @property
    def filters(self) -> dict[str, Compile]:
        """The filter languages of plugins by name; setting them drops cached selections."""
        return self._filters

    @filters.setter
    def filters(self, filters: dict[str, Compile]) -> None:
        self._filters = filters
        self._selections.forget()

    def filter_compiler(self, language: str) -> Compile | None:
        """Return the compiler of filter *language*; None if no plugin provides one."""
        return self._filters.get(language)

    def selection(self, language: str, expression: str, *, exact: bool = True) -> Selection:
        """Return the compiled selection for *expression* of filter language *language*; selections are cached.

        The language ``TAG`` always exists: ``A || B``, or ``*`` for everything.

        Args:
          exact: if False, a message also passes if only the hash of its tag is a wanted one; RocketMQ's consumers
            compare the tags again.

        Raises:
          Refused: the expression cannot be compiled (Reason.ILLEGAL), or no plugin provides the language
            (Reason.NOT_SUPPORTED).
        """
        return self._selections.get(language, expression, exact)

    def gate(self, identity: Identity, origin: LoginOrigin = NO_ORIGIN, peer: Peer | None = None) -> Gate:
        """Return the gate through which a protocol acts for *identity*; cheap, create one per connection.

        Args:
          origin: where the client is: rules may be about networks.
          peer: the client's connection, which is counted and slowed by the quotas of *identity*. Without it there are
            none. Several gates of one peer and identity count as one connection.

        Raises:
          Refused: with *peer* only: its quotas allow no more connections (Reason.QUOTA), or their plugin failed.
        """
        allowance = self.quotas.admit(identity, peer) if peer is not None else UNLIMITED
        return Gate(self, self.rules.of(identity, origin.address, origin.protocol), allowance)

    @property
    def authorizers(self) -> tuple[Authorizer, ...]:
        """The authorizers, which decide for all gates; setting them drops cached decisions."""
        return self.rules.authorizers

    @authorizers.setter
    def authorizers(self, authorizers: tuple[Authorizer, ...]) -> None:
        self.rules.authorizers = authorizers

    def end_clients(self, matches: Callable[[Identity], bool], reason: str) -> None:
        """End what clients do whose identity *matches*: they are disabled, say, or their password was changed.

        Their connections end in the next turns of the event loop, each with *reason* in the words of its protocol.
        Requests that they have signed and that wait are refused, and so are their logins in progress. Sessions and
        durable subscriptions remain. Change what the authenticators answer before you call this, so that clients that
        come back are checked by that; it includes `Authentication.changed`. *matches* may be called for a while.
        """
        refused = Refused(Reason.ENDED, reason)
        self.authentication.end_logins(matches, refused)
        self.revocation.end_logins(matches, refused)

    def capability(self, kind: type[T]) -> T | None:
        """Return the object that a plugin offers under the type *kind*; None if no plugin does."""
        offered = self.capabilities.get(kind)
        if offered is not None and not isinstance(offered, kind):
            raise MartletError(
                f"capability {kind.__name__} is a {type(offered).__name__}; the plugin must offer a {kind.__name__}"
            )
        return offered

    def statistics(self) -> dict[str, object]:
        return {
            "kernel": kernel_name(),
            "topics": len(self.topics),
            **self.groups.statistics(),
            "refused_by_stages": self.refused,
            "refused_by_authenticators": self.authentication.refused,
            "refused_by_authorizers": self.rules.denied,
        }


def _check_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"it returned {name!r} as a topic; return strings")
    return name
