"""Sends transactional messages: a half message, then what the local transaction decides, then answers to checks."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, unique
from functools import partial
from typing import Any, Final, TypeAlias, Unpack, final

import trio
from msgspec import Struct

from martlet_client.arguments import check_callable, check_integer, check_type
from martlet_client.link import Answer
from martlet_client.listening import CONCURRENCY_MAX
from martlet_client.messages import Message, SendResult, SendStatus
from martlet_client.network import ClientSettings
from martlet_client.producer import Producer, ProducerOptions
from martlet_client.pulling import decode_messages
from martlet_remoting.wire.answers.errors import ClientError, MessageRefused, RouteNotFound
from martlet_remoting.wire.answers.messages import ReceivedMessage, parse_message_id
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

__all__ = ["Check", "Execute", "TransactionProducer", "TransactionResult", "TransactionState"]

log = logging.getLogger(__name__)

PREPARED: Final = 0x4  # in sysFlag of a half message


@final
@unique
class TransactionState(Enum):
    """The outcome of a local transaction. ``UNKNOWN``, or an exception: the broker asks later."""

    COMMIT = 0x8
    ROLLBACK = 0xC
    UNKNOWN = 0


# Does the local transaction, called once the half message is stored: with the message and its transaction id.
Execute: TypeAlias = Callable[[Message, str], TransactionState] | Callable[[Message, str], Awaitable[TransactionState]]
# Looks up what became of a local transaction, called with the message that the broker asks about.
Check: TypeAlias = (
    Callable[[ReceivedMessage], TransactionState] | Callable[[ReceivedMessage], Awaitable[TransactionState]]
)


@final
class TransactionResult(Struct, frozen=True):
    """Where the half message was stored, what the local transaction decided, and whether the broker confirmed that.

    If it did not, the broker asks ``check`` later.
    """

    sent: SendResult
    state: TransactionState
    confirmed: bool


class TransactionProducer(Producer):
    """Sends messages that are delivered only if their local transaction commits; all else is as in `Producer`.

    Example:
        async with TransactionProducer("127.0.0.1:9876", "sellers", check) as producer:
            await producer.send_in_transaction(Message("Greetings", b"hello"), pay)

    Args:
      name_server, group, options: as for `Producer`. Any producer of the group may be asked about a transaction.
      check: looks up what became of a local transaction; a plain function runs in a thread.
      checks_max: how many calls of *check* and of local transactions run at once.

    Raises:
      TypeError, ValueError, MessageRefused: an argument is wrong.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        check: Check,
        *,
        checks_max: int = 16,
        **options: Unpack[ProducerOptions],
    ) -> None:
        super().__init__(name_server, group, **options)
        check_callable("check", check, "def check(message): ...", 1)
        check_integer("checks_max", checks_max, 1, CONCURRENCY_MAX)
        self._check = check
        self._limiter = trio.CapacityLimiter(checks_max)
        self.network.handlers[RequestCode.CHECK_TRANSACTION_STATE] = self._answer_check

    async def send_in_transaction(
        self, message: Message, execute: Execute, *, timeout_s: float | None = None
    ) -> TransactionResult:
        """Store *message* so that nobody receives it, call *execute*, and commit the message or roll it back.

        *execute* is called with the message and its transaction id. It is not called if the broker could not store the
        message as safely as configured; the message is then rolled back.

        Raises:
          TypeError, ValueError: an argument is wrong.
          MessageRefused: the message cannot be sent as it is, or it is delayed.
          SendFailed, BrokerError, RouteNotFound, NameServerUnreachable: as for `Producer.send`.
        """
        check_callable("execute", execute, "def execute(message, transaction_id): ...", 2)
        check_type("message", message, Message, "for example Message('Greetings', b'hello')")
        if message.delay_level or message.delay_ms or message.deliver_at_ms:
            raise MessageRefused("message of a transaction is delayed; RocketMQ would lose it, so remove the delay")
        client_properties = {"TRAN_MSG": "true", "PGROUP": self.group}
        header, body, key = self._prepare(message, None, timeout_s, client_properties)
        header.sys_flag |= PREPARED
        sent = (await self._sending.send(header, body, RequestCode.SEND_MESSAGE_V2, timeout_s)).result(key)
        state = TransactionState.ROLLBACK
        if sent.status is SendStatus.OK:
            state = await self._ask_user(execute, message, sent.transaction_id or key)
        return TransactionResult(sent, state, await self._end_sent(sent, state))

    async def _ask_user(self, function: Callable[..., Any], *arguments: object) -> TransactionState:
        """Call the user's *function*; an exception means that nobody knows."""
        call = partial(function, *arguments)
        try:
            if inspect.iscoroutinefunction(function):
                async with self._limiter:
                    state = await call()
            else:
                # In a tuple: trio refuses a coroutine as the result of a thread.
                (result,) = await trio.to_thread.run_sync(lambda: (call(),), limiter=self._limiter)
                state = await result if inspect.isawaitable(result) else result
        except Exception:  # user code may raise anything; the outcome of the transaction is unknown then
            log.exception("transaction is unknown to its producer; the broker will ask about it")
            return TransactionState.UNKNOWN
        check_type("result of a local transaction", state, TransactionState, "for example TransactionState.COMMIT")
        assert isinstance(state, TransactionState)
        return state

    async def _end_sent(self, sent: SendResult, state: TransactionState) -> bool:
        _, position = parse_message_id(sent.offset_message_id)
        ext = {
            "tranStateTableOffset": sent.queue_offset,
            "commitLogOffset": position,
            "msgId": sent.message_id,
            "transactionId": sent.transaction_id,
            "topic": sent.queue.topic,
            "fromTransactionCheck": False,
        }
        return await self._end(sent.queue.topic, sent.queue.broker_name, state, ext)

    async def _end(self, topic: str, broker_name: str, state: TransactionState, ext: dict[str, object]) -> bool:
        """Tell the broker how the transaction ended; return whether it confirmed that."""
        if state is TransactionState.UNKNOWN:
            return False  # brokers do not answer that, and ask later in any case
        ext |= {"producerGroup": self.group, "commitOrRollback": state.value, "bname": broker_name}
        try:
            address = await self._master(topic, broker_name)
            await self.network.ask(address, RequestCode.END_TRANSACTION, ext)
        except ClientError as error:
            log.warning("transaction %s was not ended, the broker will ask about it: %s", ext["transactionId"], error)
            return False
        return True

    async def _master(self, topic: str, broker_name: str) -> str:
        route = self.network.routes.get(topic) or await self.network.fetch_route(topic)
        address = route.master(broker_name)
        if address is None:
            raise RouteNotFound(topic, f"has no master at broker {broker_name!r}")
        return address

    async def _answer_check(self, command: Command) -> Answer:
        broker_name = command.text("bname", "")
        (message, *_) = decode_messages(command.body, broker_name)
        if not isinstance(message, ReceivedMessage) or message.properties.get("PGROUP") != self.group:
            log.warning("broker %s asked about a transaction of another group, or a damaged one", broker_name)
            return Answer()
        state = await self._ask_user(self._check, message)
        ext: dict[str, object] = {
            "tranStateTableOffset": command.integer("tranStateTableOffset"),
            "commitLogOffset": command.integer("commitLogOffset"),
            "msgId": command.text("msgId", message.message_id),
            "transactionId": command.text("transactionId", message.message_id),
            "topic": message.topic,
            "fromTransactionCheck": True,
        }
        await self._end(message.topic, broker_name or self._only_broker(message.topic), state, ext)
        return Answer()

    def _only_broker(self, topic: str) -> str:
        """Return the broker of *topic*; brokers of RocketMQ 4 do not say which of several asks."""
        route = self.network.routes.get(topic)
        names = {queue.broker_name for queue in route.write_queues(topic)} if route is not None else set()
        return names.pop() if len(names) == 1 else ""
