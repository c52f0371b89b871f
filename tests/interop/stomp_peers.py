"""ActiveMQ and RabbitMQ from Debian as child processes, with STOMP on a free loopback port.

Neither is started as the service of its package: each has its directory, its ports and its memory limit, and ends by
its id.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from .fetch import NotFetched, tool
from .process import Process, free_port

ACTIVEMQ: Final = Path("/usr/share/activemq")
# The script under /usr/sbin becomes the user rabbitmq, who may not read the directory of a test.
RABBITMQ: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

ACTIVEMQ_CONFIG: Final = """\
<beans xmlns="http://www.springframework.org/schema/beans" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
 xsi:schemaLocation="http://www.springframework.org/schema/beans http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
 http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="peer" useJmx="false" schedulerSupport="true"
          dataDirectory="{folder}/data">
    <persistenceAdapter><kahaDB directory="{folder}/data/kahadb"/></persistenceAdapter>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}?socketBufferSize=1048576"/>
    </transportConnectors>
  </broker>
</beans>
"""
# Without it, ActiveMQ composes all messages for debugging, and writes nothing.
LOG_CONFIG: Final = """\
log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c: %m%n
"""
RABBITMQ_CONFIG: Final = """\
listeners.tcp = none
stomp.listeners.tcp.1 = 127.0.0.1:{port}
stomp.default_user = guest
stomp.default_pass = guest
vm_memory_high_watermark.absolute = 512MB
disk_free_limit.absolute = 1MB
"""


class ActiveMQ:
    """ActiveMQ in a JVM; *before* is what comes before its command, such as taskset."""

    def __init__(self, folder: Path, before: Sequence[str] = (), heap: str = "128m") -> None:
        _check_installed(ACTIVEMQ / "bin" / "activemq.jar", "activemq")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        config = folder / "activemq.xml"
        config.write_text(ACTIVEMQ_CONFIG.format(folder=folder, port=self.port))
        log_config = folder / "log4j.properties"
        log_config.write_text(LOG_CONFIG)
        classes = f"{ACTIVEMQ}/lib/*:{ACTIVEMQ}/lib/optional/*:{ACTIVEMQ}/bin/activemq.jar"
        words = [*before, tool("java"), f"-Xmx{heap}", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
        words += [f"-Dlog4j.configuration=file:{log_config}", f"-Dactivemq.base={folder}"]
        words += [f"-Dactivemq.home={ACTIVEMQ}", "-cp", classes]
        words += ["org.apache.activemq.console.Main", "start", f"xbean:file:{config}"]
        self._process = Process(words, folder / "activemq.log")
        _wait_port(self._process, self.port, "activemq")

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()


class RabbitMQ:
    """RabbitMQ in an Erlang machine of its own, beside which a name service of its own runs."""

    def __init__(self, folder: Path, before: Sequence[str] = ()) -> None:
        _check_installed(RABBITMQ, "rabbitmq-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, names = free_port(), free_port()
        (folder / "rabbitmq.conf").write_text(RABBITMQ_CONFIG.format(port=self.port))
        (folder / "plugins").write_text("[rabbitmq_stomp].\n")
        environment = self._environment(folder, names)
        # Otherwise the broker starts one for all of the machine, and leaves it there.
        words = [tool("epmd"), "-port", str(names), "-address", "127.0.0.1"]
        self._names = Process(words, folder / "names.log", environment)
        with ExitStack() as undo:
            undo.callback(self._names.kill)
            _wait_port(self._names, names, "epmd")
            self._process = Process([*before, str(RABBITMQ)], folder / "rabbitmq.log", environment)
            undo.callback(self._process.kill)
            _wait_port(self._process, self.port, "rabbitmq")
            undo.pop_all()

    @staticmethod
    def _environment(folder: Path, names: int) -> Mapping[str, str]:
        return {
            "HOME": str(folder),  # has the secret that nodes share
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(names),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_NODENAME": "peer@localhost",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "1",  # so that the process is the broker, not the script that started it
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._names.kill()


def _check_installed(path: Path, package: str) -> None:
    if not path.exists():
        raise NotFetched(f"{path} is not there, the interop tests need it; apt-get install {package}")


def _wait_port(process: Process, port: int, what: str) -> None:
    process.wait_until(lambda: _accepts(port), what)


def _accepts(port: int) -> bool | None:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return None
    return True
