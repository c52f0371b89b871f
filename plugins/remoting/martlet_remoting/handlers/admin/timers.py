"""GET_TIMER_METRICS: counts of pending timed messages, and lists of them, which are Martlet's own (`martlet timer`)."""

from typing import Final

from martlet.contracts import Timers
from martlet.errors import Reason, Refused
from martlet_remoting.handlers.context import Handle, RequestContext, reply
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.fastjson import dumps
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.recall_handles import RecallHandle, encode_handle

__all__ = ["TABLE"]

LISTED_MAX: Final = 1000
# RocketMQ's TimerMetrics.timerDist.
WITHIN_S: Final = (5, 60, 300, 900, 3600, 14_400, 28_800, 86_400)


async def timer_metrics(context: RequestContext, command: Command) -> bytes:
    """Answer counts; with the fields ``from`` and ``count`` also *count* messages that are due at ``from`` or later."""
    context.gate(command).queries.broker()
    count = min(max(command.integer("count", 0), 0), LISTED_MAX)
    broker = context.state.broker
    timers = broker.capability(Timers)
    if timers is None or timers.count is None or timers.pending is None:
        text = "this broker has no plugin that holds timed messages; add the plugin timer to plugins.enabled"
        raise Refused(Reason.NOT_SUPPORTED, text)
    now_ms = broker.clock.now_ms()
    *within, total = await timers.count([now_ms + 1000 * seconds for seconds in WITHIN_S])
    body: dict[str, object] = {
        # RocketMQ counts by topic here.
        "timingCount": {},
        "timerDist": dict(zip(map(str, WITHIN_S), within, strict=True)),
        "pending": total,
    }
    if count:
        body["messages"] = [
            {
                "due": each.due_ms,
                "topic": each.topic,
                "queueId": each.queue_id,
                "msgId": each.unique,
                "stored": each.store_ms,
                "bodyBytes": each.body_bytes,
                "repeats": each.repeats,
                "recallHandle": encode_handle(RecallHandle(each.topic, broker.config.name, each.out_ms, each.unique)),
            }
            for each in await timers.pending(command.integer("from", 0), count)
        ]
    return reply(command, body=dumps(body))


TABLE: Final[dict[int, Handle]] = {RequestCode.GET_TIMER_METRICS: timer_metrics}
