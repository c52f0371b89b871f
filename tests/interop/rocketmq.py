"""A real RocketMQ name server and broker as child processes, on free loopback ports, with small heaps."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from martlet_remoting.wire.signatures import SigningKey

from . import class_archives, fetch, wire
from .process import Process, free_port, free_ports

# What Java 17 asks for: RocketMQ frees mapped files through classes that are not exported.
OPENS = (
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
)


NAME_SERVER = "org.apache.rocketmq.namesrv.NamesrvStartup"
BROKER = "org.apache.rocketmq.broker.BrokerStartup"

# Of both brokers: short enough for tests.
DELAY_LEVELS = "1s 2s 1s 2s 3s 4s 5s 6s 7s 8s 9s 10s 11s 12s 13s 14s 15s 16s"


def java(home: Path, main: str, *words: str, tls: bool) -> list[str]:
    """Return the command line of one of the server's programs; its logs and its user files go below *home*.

    With *tls* it makes a key and a certificate for itself at its start, which takes half of the start's time.
    """
    memory = ("-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    places = (f"-Duser.home={home}", f"-Drocketmq.home.dir={home}", "-XX:-UsePerfData")
    mode = f"-Dtls.server.mode={'permissive' if tls else 'disabled'}"
    shared = class_archives.words(archive(main))
    classes = f"{fetch.driver_classes(fetch.SERVER_VERSION)}:{fetch.server_jars()}/*"
    command = [fetch.tool("java"), *OPENS, *memory, *places, *shared, mode, "-cp", classes]
    return [*command, "interop.QuickStop", main, *words]


def archive(main: str) -> Path:
    """Return where the class archive of the program *main* is."""
    jars = (fetch.driver_classes(fetch.SERVER_VERSION), fetch.server_jars())
    return class_archives.archive(main.rpartition(".")[2], jars)


class NameServer:
    """RocketMQ's name server; ready when it answers."""

    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        config = {"listenPort": self.address.rpartition(":")[2], "bindAddress": "127.0.0.1"}
        _write(folder / "namesrv.conf", config)
        words = java(folder, NAME_SERVER, "-c", str(folder / "namesrv.conf"), tls=tls)
        self.process = Process(words, folder / "namesrv.log")
        self.process.wait_until(self._answer, "the name server")

    def _answer(self) -> bool | None:
        return True if wire.ask(self.address, wire.GET_BROKER_CLUSTER_INFO) else None

    def stop(self) -> None:
        self.process.stop()


class Broker:
    """RocketMQ's broker; ready when it answers and its name server knows it.

    The same object can be started again on its data: `stop()` or `kill()`, then `start()`.
    """

    def __init__(
        self,
        folder: Path,
        name_server: str,
        settings: Mapping[str, str] | None = None,
        *,
        tls: bool = False,
        key: SigningKey | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.tls = tls
        self.key = key  # signs the question to the name server
        self.name_server = name_server
        # It also listens on port - 2 (the "VIP" port) and port + 1 (replication).
        port = free_ports((0, -2, 1))
        self.address = f"127.0.0.1:{port}"
        self.data = folder / "store"
        self.settings = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": "broker-a",
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": str(port),
            "haListenPort": str(port + 1),
            "namesrvAddr": name_server,
            "storePathRootDir": str(self.data),
            "storePathCommitLog": str(self.data / "commitlog"),
            "mappedFileSizeCommitLog": str(64 << 20),
            "brokerRole": "ASYNC_MASTER",
            "flushDiskType": "ASYNC_FLUSH",
            "autoCreateTopicEnable": "true",
            "diskMaxUsedSpaceRatio": "95",
            "messageDelayLevel": DELAY_LEVELS,
            "recallMessageEnable": "true",
            # On a busy machine it would refuse what waited for 200 ms, or while one message takes 1 s to store.
            "brokerFastFailureEnable": "false",
            "osPageCacheBusyTimeOutMills": "1000000",
            # Its first interval is a busy loop (TransactionMetricsFlushService.run), by default of 10 s.
            "transactionMetricFlushInterval": "200",
            # A flush compares the 37 MB of the timer wheel byte by byte with the file, by default each second.
            "timerFlushIntervalMs": "10000",
            **(settings or {}),
        }
        self.start()

    @property
    def name(self) -> str:
        return self.settings["brokerName"]

    def start(self) -> None:
        _write(self.folder / "broker.conf", self.settings)
        words = java(self.folder, BROKER, "-c", str(self.folder / "broker.conf"), tls=self.tls)
        self.process = Process(words, self.folder / "broker.log")
        self.process.wait_until(self._answer, "the broker")

    def _answer(self) -> bool | None:
        known = cluster_info(self.name_server, self.key)
        if known is None or self.address not in known.body.decode():
            return None
        return True if wire.ask(self.address, wire.GET_BROKER_RUNTIME_INFO) else None

    def stop(self) -> None:
        self.process.stop()

    def kill(self) -> None:
        self.process.kill()


def cluster_info(name_server: str, key: SigningKey | None) -> wire.Answer | None:
    """Return what a name server answers about its cluster to a request that *key* signs."""
    fields = key.sign(wire.GET_BROKER_CLUSTER_INFO, {}, b"") if key is not None else {}
    return wire.ask(name_server, wire.GET_BROKER_CLUSTER_INFO, {field: str(value) for field, value in fields.items()})


def brokers_known(name_server: str, key: SigningKey | None = None) -> dict[str, dict[str, str]]:
    """Return what a name server answers about its brokers: name -> (id -> address)."""
    answer = cluster_info(name_server, key)
    if answer is None:
        return {}
    # RocketMQ writes number keys without quotes.
    table = json.loads(re.sub(rb"([{,])(\d+):", rb'\1"\2":', answer.body))["brokerAddrTable"]
    return {name: {str(i): str(a) for i, a in entry["brokerAddrs"].items()} for name, entry in table.items()}


def _write(path: Path, config: Mapping[str, str]) -> None:
    path.write_text("".join(f"{key}={value}\n" for key, value in config.items()))
