"""Requests about the broker as a whole: configuration, runtime state, cleaning."""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import asdict

from martlet.access import BrokerAdminGrant, BrokerGrant
from martlet.config import fill
from martlet.contracts import Timers
from martlet.errors import ConfigError, Reason, Refused
from martlet.net.addresses import split_address
from martlet.runtime.stats import Stats
from martlet.runtime.steps import Steps
from martlet.store import StoreConfig
from martlet_remoting.consumers.counters import RequestCounters
from martlet_remoting.consumers.rates import Rates
from martlet_remoting.handlers.context import Handle, RequestContext, reply, supports_transactions
from martlet_remoting.wire.codes import VERSION, RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import dumps
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.properties import format_properties, parse_properties

__all__ = ["TABLE", "runtime_info"]

# RocketMQ's name of codes.VERSION, which tools show.
VERSION_NAME: Final = "V5_5_0"
LATENCY_WINDOWS_S: Final = (10.0, 60.0, 600.0)
# RocketMQ answers this if it has no buffer pool.
NO_BUFFER_POOL: Final = str((1 << 31) - 1)
REFUSED_SENDS: Final = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.MESSAGE_ILLEGAL,
    ResponseCode.SERVICE_NOT_AVAILABLE,
)
# RocketMQ's names of settings -> names of settings that retention reads at each run.
KEPT: Final = {"deleteWhen": "delete_when", "fileReservedTime": "file_reserved_hours"}
# RocketMQ's queues of pending requests; Martlet handles each request when it is read.
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
THREAD_POOLS: Final = ("send", "pull", "litePull", "query", "ack")
PUT_TIMES: Final = (
    "[<=0ms]:{} [0~10ms]:0 [10~50ms]:0 [50~100ms]:0 [100~200ms]:0 [200~500ms]:0 [500ms~1s]:0 "
    "[1~2s]:0 [2~3s]:0 [3~4s]:0 [4~5s]:0 [5~10s]:0 [10s~]:0 "
)


def broker_config(context: RequestContext, grant: BrokerGrant) -> dict[str, object]:
    """Return the settings that RocketMQ also has, by RocketMQ's names."""
    state = context.state
    broker, store, remoting = state.broker.config, grant.config, state.config
    address = state.registrar.address if state.registrar else ""
    timers = state.broker.capability(Timers)
    host, port = split_address(address) if address else ("", 0)
    return {
        "brokerClusterName": broker.cluster,
        "brokerId": 0,
        "brokerIP1": host,
        "brokerName": broker.name,
        "brokerPermission": 6,
        "brokerRole": "ASYNC_MASTER",
        "channelExpiredTimeout": remoting.client_expiry_s * 1000,
        "deleteWhen": store.delete_when,
        "diskMaxUsedSpaceRatio": round(store.disk_used_ratio_max * 100),
        "enablePropertyFilter": state.broker.filter_compiler("SQL92") is not None,
        "fileReservedTime": store.file_reserved_hours,
        "filterServerNums": 0,  # RocketMQ 5 has none either; the admin tool of 4.x requires the field
        "flushConsumerOffsetInterval": broker.offsets_persist_ms,
        "flushDiskType": "SYNC_FLUSH" if store.flush == "sync" else "ASYNC_FLUSH",
        "flushIntervalCommitLog": store.flush_interval_ms,
        "listenPort": port,
        "longPollingEnable": True,
        "mappedFileSizeCommitLog": store.segment_bytes,
        "mappedFileSizeConsumeQueue": store.queue_file_entries * 20,
        "maxHashSlotNum": store.index_slots,
        "maxIndexNum": store.index_entries,
        "maxMessageSize": broker.message_bytes_max,
        "maxTransferBytesOnMessageInMemory": remoting.pull_bytes_max,
        "maxTransferCountOnMessageInMemory": remoting.pull_messages_max,
        "messageDelayLevel": timers.levels if timers is not None else "",
        "messageIndexEnable": store.keys_index,
        "msgTraceTopicName": TRACE_TOPIC,
        "namesrvAddr": ";".join(state.registrar.nameservers()) if state.registrar else "",
        "regionId": remoting.region,
        "registerNameServerPeriod": remoting.register_s * 1000,
        "rejectTransactionMessage": not supports_transactions(state.broker),
        "defaultTopicQueueNums": broker.auto_create_queues,
        "slaveReadEnable": False,
        "storePathRootDir": grant.directory,
        "traceOn": remoting.trace,
        "traceTopicEnable": remoting.trace,
        "useTLS": remoting.tls != "disabled" and remoting.tls_cert != "",
        **_switches(state.switches, grant),
    }


def _switches(switches: Mapping[str, bool], grant: BrokerGrant) -> dict[str, bool]:
    """Return the settings that clients can change: they can neither lock anyone out nor lose data."""
    return {
        "autoCreateSubscriptionGroup": grant.auto_create_groups,
        "autoCreateTopicEnable": grant.auto_create_topics,
        **switches,
    }


def get_config(context: RequestContext, command: Command) -> bytes:
    """Answer the configuration as key=value lines."""
    grant = context.gate(command).queries.broker()
    return reply(
        command,
        {"version": dumps(grant.topics_version.as_json()).decode()},
        format_properties(broker_config(context, grant)),
    )


def update_config(context: RequestContext, command: Command) -> bytes:
    """Change settings until the broker stops.

    The request may contain any setting with its current value: some tools send all settings that they have read.
    """
    state, grant = context.state, context.gate(command).admin.broker()
    settings = parse_properties(command.body)
    switches, config = _switches(state.switches, grant), broker_config(context, grant)
    changes = {name: _truth(name, value) for name, value in settings.items() if name in switches}
    kept_changes = {KEPT[name]: _typed(name, value) for name, value in settings.items() if name in KEPT}
    for name, value in settings.items():
        is_same = format_properties({name: config.get(name, "")}) == format_properties({name: value})
        if name not in switches and name not in KEPT and not is_same:
            names = ", ".join(sorted([*switches, *KEPT]))
            text = f"Can not update config {name!r:.80} over the wire; these can be: {names}"
            raise Refused(Reason.NO_PERMISSION, f"{text}. Set it in the broker's configuration and start it again")
    _keep(grant, kept_changes)
    _switch(state.switches, grant, changes)
    return reply(command)


def _truth(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise Refused(Reason.PARAMETER, f"{name} is {value!r:.80}; it must be true or false")
    return value == "true"


def _typed(name: str, value: str) -> object:
    return int(value) if name == "fileReservedTime" and value.isdecimal() and len(value) < 10 else value


def _keep(grant: BrokerAdminGrant, changes: Mapping[str, object]) -> None:
    """Change settings of retention; the store reads its configuration at each run."""
    if changes:
        try:
            grant.set_config(fill(StoreConfig, {**asdict(grant.config), **changes}, "store"))
        except ConfigError as error:
            raise Refused(Reason.PARAMETER, str(error)) from error


def _switch(switches: dict[str, bool], grant: BrokerAdminGrant, changes: Mapping[str, bool]) -> None:
    for name, value in changes.items():
        if name == "autoCreateSubscriptionGroup":
            grant.set_auto_create(groups=value)
        elif name == "autoCreateTopicEnable":
            grant.set_auto_create(topics=value)
        else:
            switches[name] = value


# state


def runtime_info(context: RequestContext, command: Command) -> Steps[bytes]:
    """Answer the state of the broker; every value is text (RocketMQ KVTable)."""
    state, grant = context.state, context.gate(command).queries.broker()
    now_ms = state.broker.clock.now_ms()
    stored = _store_info(state.counters, grant, (yield from grant.earliest_store_ms()))
    table = {**stored, **_rate_info(state.rates), **_broker_info(state.counters, now_ms)}
    timers = state.broker.capability(Timers)
    if timers is not None and timers.running is not None:
        table |= timers.running()
    if command.ext.get("counters") == "all":
        table |= _counters(state.broker.stats)
    return reply(command, body=dumps({"table": {name: table[name] for name in sorted(table)}}))


def _counters(stats: Stats) -> dict[str, str]:
    """Return the counters of all parts as martlet.PART.NAME; sent only on request, as RocketMQ does not have them."""
    found: dict[str, str] = {}
    for part, counters in stats.collect().items():
        for name, value in counters.items():
            found[f"martlet.{part}.{name}"] = value if isinstance(value, str) else dumps(value).decode()
    return found


def _store_info(counters: RequestCounters, grant: BrokerGrant, earliest_ms: int) -> dict[str, str]:
    statistics, usage = grant.statistics(), grant.disk_usage()
    count, size = statistics.appended_messages, statistics.readable - counters.started_position
    ratio = str(round(usage.ratio, 4))
    return {
        "commitLogDirCapacity": f"Total : {_human(usage.total_bytes)}, Free : {_human(usage.free_bytes)}.",
        "commitLogDiskRatio": ratio,
        f"commitLogDiskRatio_{grant.directory}/commitlog": ratio,
        "commitLogMaxOffset": str(statistics.readable),
        "commitLogMinOffset": str(statistics.log_start),
        "consumeQueueDiskRatio": ratio,
        "dispatchBehindBytes": "0",
        "dispatchMaxBuffer": "0",
        "earliestMessageTimeStamp": str(earliest_ms),
        "pageCacheLockTimeMills": "0",
        "putMessageAverageSize": str(size / count if count else 0.0),
        "putMessageDistributeTime": PUT_TIMES.format(count),
        "putMessageEntireTimeMax": str(round(statistics.fsync_seconds_max * 1000)),
        "putMessageFailedTimes": str(sum(counters.refusals.get(code, 0) for code in REFUSED_SENDS)),
        "putMessageSizeTotal": str(size),
        "putMessageTimesTotal": str(count),
        "remainHowManyDataToFlush": f"{statistics.written - statistics.durable} B",
        "remainTransientStoreBufferNumbs": NO_BUFFER_POOL,
    }


def _human(size: float) -> str:
    """Return a size with a unit, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def _rate_info(rates: Rates) -> dict[str, str]:
    def windows(*names: str) -> str:
        return " ".join(str(round(sum(rates.tps("BROKER", n, s) for n in names), 4)) for s in LATENCY_WINDOWS_S)

    return {
        "getFoundTps": windows("GET"),
        "getMessageEntireTimeMax": "0",
        "getMissTps": windows("MISS"),
        "getTotalTps": windows("GET", "MISS"),
        "getTransferedTps": windows("GET"),  # as RocketMQ 4 and its tools spell it
        "getTransferredTps": windows("GET"),
        "msgGetTotalTodayMorning": str(rates.get_at_midnight[1]),
        "msgGetTotalTodayNow": str(rates.found),
        "msgGetTotalYesterdayMorning": str(rates.get_at_midnight[0]),
        "msgPutTotalTodayMorning": str(rates.put_at_midnight[1]),
        "msgPutTotalTodayNow": str(rates.put_total),
        "msgPutTotalYesterdayMorning": str(rates.put_at_midnight[0]),
        "putTps": windows("PUT"),
    }


def _broker_info(counters: RequestCounters, now_ms: int) -> dict[str, str]:
    started_ms = counters.started_ms
    pools = {f"{pool}ThreadPoolQueue{what}": "0" for pool in THREAD_POOLS for what in ("Size", "Capacity")}
    waits = {f"{pool}ThreadPoolQueueHeadWaitTimeMills": "0" for pool in THREAD_POOLS}
    return {
        **pools,
        **waits,
        "EndTransactionQueueSize": "0",
        "EndTransactionThreadPoolQueueCapacity": "0",
        "bootTimestamp": str(started_ms),
        "brokerActive": "true",
        "brokerVersion": str(VERSION),
        "brokerVersionDesc": VERSION_NAME,
        "runtime": _duration(now_ms - started_ms),
        "startAcceptSendRequestTimeStamp": str(started_ms),
        "timerCongestNum": "0",
        "timerDequeueTps": "0.0",
        "timerEnqueueTps": "0.0",
        "timerOffsetBehind": "0",
        "timerReadBehind": "0",
    }


def _duration(ms: int) -> str:
    minutes, seconds = divmod(max(ms, 0) // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"


def ha_status(context: RequestContext, command: Command) -> bytes:
    """Answer the state of a master without slaves (HARuntimeInfo)."""
    grant = context.gate(command).queries.broker()
    body = {
        "haClientRuntimeInfo": {
            "activated": False,
            "lastReadTimestamp": 0,
            "lastWriteTimestamp": 0,
            "masterFlushOffset": 0,
            "maxOffset": 0,
            "transferredByteInSecond": 0,
        },
        "haConnectionInfo": [],
        "inSyncSlaveNums": 0,
        "master": True,
        "masterCommitLogMaxOffset": grant.readable,
    }
    return reply(command, body=dumps(body))


def clean_old(context: RequestContext, command: Command) -> bytes:
    """Run retention now instead of at the next interval."""
    context.gate(command).admin.broker().clean()
    return reply(command)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.GET_BROKER_CONFIG: get_config,
    RequestCode.UPDATE_BROKER_CONFIG: update_config,
    RequestCode.GET_BROKER_RUNTIME_INFO: runtime_info,
    RequestCode.GET_BROKER_HA_STATUS: ha_status,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: clean_old,
    RequestCode.DELETE_EXPIRED_COMMITLOG: clean_old,
}
