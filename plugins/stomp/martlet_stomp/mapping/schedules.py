"""ActiveMQ's scheduler: repeated messages, and their removal; pure functions.

| header of SEND | property of the record, for the plugin timer |
|---|---|
| ``AMQ_SCHEDULED_PERIOD`` | ``TIMER_PERIOD_MS`` |
| ``AMQ_SCHEDULED_REPEAT`` | ``TIMER_REPEAT`` |
| ``AMQ_SCHEDULED_CRON`` | ``TIMER_CRON`` |

Each copy has the header ``scheduledJobId``, TOPIC:KEY. A message to ``ActiveMQ.Scheduler.Management`` with this header
and ``AMQ_SCHEDULER_ACTION:REMOVE`` ends the repetition. That destination cannot be read.
"""

import re
from typing import Final, NamedTuple, final

from martlet_stomp.mapping.destinations import Destination
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import MessageHeaders

__all__ = ["SCHEDULE_HEADERS", "Removal", "removal_of", "schedule_of"]

CRON: Final = "AMQ_SCHEDULED_CRON"
PERIOD: Final = "AMQ_SCHEDULED_PERIOD"
REPEAT: Final = "AMQ_SCHEDULED_REPEAT"
SCHEDULE_HEADERS: Final = (CRON, PERIOD, REPEAT)
MANAGEMENT: Final = "activemq.scheduler.management"
ACTION: Final = "AMQ_SCHEDULER_ACTION"
REMOVE: Final = "REMOVE"
JOB: Final = "scheduledJobId"
_PERIOD: Final = re.compile(r"[0-9]{1,15}")
_REPEAT: Final = re.compile(r"-1|[0-9]{1,10}")
_UNFIT: Final = re.compile("[\x00-\x02]")
_JOB: Final = re.compile(r"([^:]+):(.+)", re.DOTALL)


@final
class Removal(NamedTuple):
    """A repeated message to end: its topic, and its unique key."""

    topic: str
    key: str


def schedule_of(headers: MessageHeaders) -> dict[str, str]:
    """Return the properties that repeat a message with *headers*. Raises `StompError`."""
    found: dict[str, str] = {}
    cron, period, repeat = (headers.get(name) for name in SCHEDULE_HEADERS)
    if cron:
        if _UNFIT.search(cron):
            raise StompError(f"header {CRON} contains a control character")
        found["TIMER_CRON"] = cron
    if period is not None:
        if _PERIOD.fullmatch(period) is None:
            raise StompError(f"header {PERIOD} is {shown(period)}; it is a number of milliseconds")
        found |= {"TIMER_PERIOD_MS": period} if int(period) else {}
    if repeat is not None:
        if _REPEAT.fullmatch(repeat) is None:
            raise StompError(f"header {REPEAT} is {shown(repeat)}; it is a number of repetitions, or -1 for no end")
        found |= {"TIMER_REPEAT": repeat} if int(repeat) else {}
    return found


def removal_of(headers: MessageHeaders, destination: Destination) -> Removal | None:
    """Return the repeated message that *headers* end; None if they are not for the scheduler. Raises `StompError`."""
    text = destination.text.removeprefix(destination.prefix)
    if not destination.kind.is_stored or text.lower() != MANAGEMENT:
        return None
    action, job = headers.get(ACTION), headers.get(JOB)
    if action != REMOVE:
        hint = f"send {REMOVE} with {JOB}; `martlet timer list` lists all"
        raise StompError(f"header {ACTION} is {shown(action or '')}, which is not supported; {hint}")
    match = _JOB.fullmatch(job or "")
    if match is None:
        raise StompError(f"header {JOB} is {shown(job or '')}; use that of a message that came")
    return Removal(match[1], match[2])
