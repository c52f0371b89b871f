"""Start what is measured: a RocketMQ broker from Maven Central, and Martlet, each on free loopback ports.

Everything they need is fetched and built into one work folder (``$MARTLET_BENCH``, by
default ``~/.cache/martlet-bench``), once.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = Path(os.environ.get("MARTLET_BENCH") or Path.home() / ".cache" / "martlet-bench")
HEAP = "2g"
TICKS = os.sysconf("SC_CLK_TCK")

# What Java 17 asks for: RocketMQ frees mapped files through classes that are not exported.
OPENS = (
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
)


def need(tool: str) -> str:
    """Return the path of *tool*, or end with what to install."""
    path = shutil.which(tool)
    if path is None:
        sys.exit(f"{tool} is not installed; on Debian: apt-get install default-jdk-headless maven golang cargo-web")
    return path


def jars() -> Path:
    """Return the folder of RocketMQ's jars, fetched on first use."""
    folder = WORK / "jars"
    if not (folder / "complete").exists():
        subprocess.run(
            [
                *(need("mvn"), "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"),
                *(f"-DoutputDirectory={folder}", "-DincludeScope=runtime"),
            ],
            check=True,
        )
        (folder / "complete").touch()
    return folder


@cache
def python_with_wheel() -> str:
    """Return a Python in which this checkout is installed as a wheel, with the native kernel."""
    folder = WORK / "venv-wheel"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    need("cargo")
    sources = str(HERE.parent), str(HERE.parent / "native")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--force-reinstall", *sources], check=True)
    return python


def driver() -> str:
    """Return the load driver, built where its source is newer."""
    target = WORK / "driver"
    sources = [*(HERE / "driver").glob("*.go")]
    if not target.exists() or any(s.stat().st_mtime > target.stat().st_mtime for s in sources):
        WORK.mkdir(parents=True, exist_ok=True)
        subprocess.run([need("go"), "build", "-o", str(target), "."], cwd=HERE / "driver", check=True)
    return str(target)


def java(main: str, *words: str, heap: str = HEAP) -> list[str]:
    """Return the command line of one of RocketMQ's programs."""
    memory = (f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=1g", "-XX:-UsePerfData")
    home = (f"-Duser.home={WORK}/home", f"-Drocketmq.home.dir={WORK}/home")
    return [need("java"), *OPENS, *memory, *home, "-cp", f"{jars()}/*", main, *words]


def free_port() -> int:
    """Return a loopback port whose neighbours below and above are free as well."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for near in (port - 2, port + 1):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", near))
        except OSError:
            continue
        return port


class Process:
    """A child whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self, number: int = signal.SIGTERM, wait_s: float = 60) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)
            try:
                self._child.wait(wait_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def send_signal(self, number: int) -> None:
        if self._child.poll() is None:
            self._child.send_signal(number)

    def cpu_s(self) -> float:
        """User and system seconds so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mib(self) -> float:
        match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(match[1]) / 1024 if match else 0.0

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class RocketMQ:
    """RocketMQ's broker with a name server of its own."""

    name = "RocketMQ"

    def __init__(self, data: Path, flush: str) -> None:
        self.data = data
        self.flush = flush
        self.port = free_port()
        self.name_port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.name_server = f"127.0.0.1:{self.name_port}"
        data.mkdir(parents=True, exist_ok=True)
        (data / "namesrv.conf").write_text(f"listenPort={self.name_port}\nbindAddress=127.0.0.1\n")
        (data / "broker.conf").write_text(self._config())
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        self._names = Process(java(main, "-c", str(data / "namesrv.conf"), heap="192m"), data / "namesrv.log")
        wait_port(self.name_port)
        self.start()

    def _config(self) -> str:
        store = self.data / "store"
        flush = "SYNC_FLUSH" if self.flush == "sync" else "ASYNC_FLUSH"
        return (
            f"brokerName=bench\nbrokerId=0\nbrokerRole=ASYNC_MASTER\nflushDiskType={flush}\nbrokerIP1=127.0.0.1\n"
            f"bindAddress=127.0.0.1\nlistenPort={self.port}\nhaListenPort={self.port + 1}\n"
            f"namesrvAddr={self.name_server}\n"
            f"storePathRootDir={store}\nstorePathCommitLog={store}/commitlog\nautoCreateTopicEnable=true\n"
            "diskMaxUsedSpaceRatio=95\nenablePropertyFilter=true\n"
        )

    def start(self) -> None:
        main = "org.apache.rocketmq.broker.BrokerStartup"
        self.process = Process(java(main, "-c", str(self.data / "broker.conf")), self.data / "broker.log")
        wait_port(self.port)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)
        self._names.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.stop(number)

    def close(self) -> None:
        self.stop()
        self._names.stop()


class Martlet:
    """Martlet with its name server inside; with *checkout* its source, else what *python* has installed."""

    def __init__(
        self,
        data: Path,
        flush: str,
        python: str,
        checkout: Path | None = None,
        settings: Sequence[str] = (),
        name: str = "Martlet",
    ) -> None:
        self.name = name
        paths = [str(checkout / part) for part in ("core", "plugins/remoting")] if checkout is not None else []
        self._environment = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        self.data = data
        self.flush = flush
        self.python = python
        self.settings = settings
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.name_server = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        settings = (
            f"remoting.listen={self.address}",
            f"nameserver.listen={self.name_server}",
            "mqtt.listen=127.0.0.1:0",
            "stomp.listen=127.0.0.1:0",
            f"store.flush={self.flush}",
            *self.settings,
        )
        words = [word for setting in settings for word in ("--set", setting)]
        command = [self.python, "-m", "martlet", "run", "--data", str(self.data / "store"), *words]
        self.process = Process(command, self.data / "broker.log", self._environment)
        wait_port(self.port)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.stop(number)

    def close(self) -> None:
        self.stop()


Broker = RocketMQ | Martlet


def wait_port(port: int, timeout_s: float = 90) -> None:
    """Return when somebody accepts on *port*."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.01)
    sys.exit(f"nothing listens on 127.0.0.1:{port} after {timeout_s:g} s; see the log in {WORK}")
