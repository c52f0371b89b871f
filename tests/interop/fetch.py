"""The programs the interop tests talk to, fetched and built once into a cache folder outside the checkout.

Java archives come through Maven, the Go client through the Go tool, the C++ client through pip, the Node client through
npm: each by its ordinary client, with whatever mirrors the machine is set up for. A lock file lets parallel test
workers fetch once. A finished product is a folder named after the hash of what it was made from, so changed sources
make a new one.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
CLIENT_VERSIONS = ("4.9.8", "5.5.0")
SERVER_VERSION = "5.5.0"
# The C++ client has no other maintained packaging than this wheel, which carries librocketmq 2.0.0.
CPP_REQUIREMENT = "rocketmq==0.4.4"

INSTALL = {
    "mvn": "maven",
    "javac": "default-jdk-headless",
    "jar": "default-jdk-headless",
    "java": "default-jre-headless",
    "go": "golang-go",
    "node": "nodejs",
    "npm": "npm",
    "haproxy": "haproxy",
    "mosquitto": "mosquitto",
    "mosquitto_pub": "mosquitto-clients",
    "mosquitto_rr": "mosquitto-clients",
    "mosquitto_sub": "mosquitto-clients",
}


# Seconds before a download is tried once more.
PAUSES_S = (5.0, 30.0)


class NotFetched(RuntimeError):
    """A program that the interop tests need could not be had; the text says what to install or what failed."""


def cache() -> Path:
    """Return the cache folder: MARTLET_INTEROP_CACHE, or martlet-interop in the user's cache folder."""
    chosen = os.environ.get("MARTLET_INTEROP_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "martlet-interop"


def tool(name: str) -> str:
    """Return the path of an installed program.

    Raises:
      NotFetched: it is not installed; the interop tests fail then, they never skip.
    """
    # Debian has brokers where users without rights do not look.
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        raise NotFetched(f"{name!r} is not installed, the interop tests need it; apt-get install {INSTALL[name]}")
    return found


def client_jars(version: str) -> Path:
    """Return the folder of RocketMQ's Java client and admin tool."""
    return _jars("client", version)


def server_jars() -> Path:
    """Return the folder of RocketMQ's broker and name server."""
    return _jars("server", SERVER_VERSION)


def driver(version: str) -> str:
    """Return the class path of the Java driver and of the client that it drives."""
    return f"{driver_classes(version)}:{client_jars(version)}/*"


def driver_classes(version: str) -> Path:
    """Return the Java driver, compiled against one version of the client: a jar, as class-data sharing needs it."""
    jars = client_jars(version)
    folders = [HERE / "driver", *([HERE / "driver" / "since5"] if version >= "5" else [])]
    sources = sorted(source for folder in folders for source in (folder / "interop").glob("*.java"))

    def build(folder: Path) -> None:
        classes = folder / "classes"
        run([tool("javac"), "-nowarn", "-cp", f"{jars}/*", "-d", str(classes), *map(str, sources)])
        run([tool("jar"), "--create", "--file", str(folder / "driver.jar"), "-C", str(classes), "."])

    return product(f"driver-{version}", sources, build, salt="jar") / "driver.jar"


def mqtt_driver() -> str:
    """Return the class path of the program over Paho's Java client of MQTT 5."""
    return _program("mqtt")


def stomp_driver() -> str:
    """Return the class path of the program over Vert.x's STOMP client."""
    return _program("stomp")


def spring_application() -> str:
    """Return the class path of the web application with Spring's relay."""
    return _program("spring")


def decisions() -> str:
    """Return the class path of the program over RocketMQ's classes that decide about access."""
    jars = server_jars()
    sources = sorted((HERE / "acl" / "interop").glob("*.java"))

    def build(folder: Path) -> None:
        run([tool("javac"), "-nowarn", "-cp", f"{jars}/*", "-d", str(folder), *map(str, sources)])

    return f"{product('acl', sources, build, salt=SERVER_VERSION)}:{jars}/*"


def _program(name: str) -> str:
    """Return the class path of the Java program in the folder *name*."""
    pom = HERE / name / "pom.xml"
    jars = product(name, [pom], lambda folder: _copy_jars(pom, folder))
    sources = sorted((HERE / name / "java" / "interop").glob("*.java"))

    def build(folder: Path) -> None:
        run([tool("javac"), "-nowarn", "-cp", f"{jars}/*", "-d", str(folder), *map(str, sources)])

    return f"{product(f'{name}-driver', sources, build)}:{jars}/*"


def go_program() -> Path:
    """Return the compiled program over RocketMQ's Go client."""
    sources = sorted((HERE / "go").iterdir())

    def build(folder: Path) -> None:
        download([tool("go"), "build", "-o", str(folder / "client"), "."], folder=HERE / "go")

    return product("go", sources, build) / "client"


def node_program(name: str, script: Path) -> list[str]:
    """Return the command that runs *script* with what the package.json beside it asks for."""
    sources = [script.with_name("package.json"), script]

    def build(folder: Path) -> None:
        for source in sources:
            shutil.copy(source, folder)
        download([tool("npm"), "install", "--silent", "--no-audit", "--no-fund"], folder=folder)

    return [tool("node"), str(product(name, sources, build) / script.name)]


def cpp_python() -> Path:
    """Return a Python interpreter that can import the C++ client."""

    def build(folder: Path) -> None:
        run([sys.executable, "-m", "venv", str(folder)])
        download([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", CPP_REQUIREMENT])

    # A virtual environment does not survive being moved, so it is made in its place.
    return product("cpp", [], build, salt=CPP_REQUIREMENT + sys.version, movable=False) / "bin" / "python"


def product(
    name: str, sources: Sequence[Path], build: Callable[[Path], None], salt: str = "", movable: bool = True
) -> Path:
    """Return the folder *build* filled from *sources*; builds it the first time, whichever process comes first."""
    digest = hashlib.sha256(salt.encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache() / f"{name}-{digest.hexdigest()[:12]}"
    done = folder / ".done"
    with _locked(name):
        if not done.exists():
            work = folder.with_suffix(".part") if movable else folder
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            build(work)
            if movable:
                shutil.rmtree(folder, ignore_errors=True)
                work.rename(folder)
            done.touch()
    return folder


def run(words: Sequence[str], folder: Path | None = None) -> None:
    """Run a build step to its end.

    Raises:
      NotFetched: it failed; its last lines are in the text.
    """
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode:
        last = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
        raise NotFetched(f"{' '.join(words)} ended with {ended.returncode}:\n{last}")


def download(words: Sequence[str], folder: Path | None = None) -> None:
    """Run a step that needs the network, which may fail for a moment: it is tried a few times.

    Raises:
      NotFetched: it failed each time.
    """
    for pause_s in PAUSES_S:
        try:
            return run(words, folder)
        except NotFetched as error:
            print(f"again in {pause_s:g} s; {error}", file=sys.stderr)
            time.sleep(pause_s)
    run(words, folder)


def _jars(kind: str, version: str) -> Path:
    pom = HERE / "driver" / f"{kind}.xml"

    def build(folder: Path) -> None:
        _copy_jars(pom, folder, f"-Drocketmq.version={version}")

    return product(f"{kind}-{version}", [pom], build, salt=version)


def _copy_jars(pom: Path, folder: Path, *words: str) -> None:
    place = ["-f", str(pom), f"-DoutputDirectory={folder}", "-DincludeScope=runtime"]
    download([tool("mvn"), "-q", "-B", *place, *words, "dependency:copy-dependencies"])


@contextmanager
def _locked(name: str) -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fetch_all() -> None:
    """Fetch and build everything, saying what comes."""
    for version in CLIENT_VERSIONS:
        print(f"Java client {version}: {driver(version).split(':')[0]}")
    print(f"RocketMQ {SERVER_VERSION}: {server_jars()}")
    print(f"C++ client: {cpp_python()}")
    print(f"Go client: {go_program()}")
    print(f"Node client: {node_program('node', HERE / 'node' / 'client.js')[1]}")
    print(f"MQTT clients: {node_program('node-mqtt', HERE / 'mqtt' / 'client.js')[1]} {mqtt_driver().split(':')[0]}")
    print(
        f"STOMP clients: {node_program('node-stomp', HERE / 'stomp' / 'client.js')[1]} {stomp_driver().split(':')[0]}"
    )
    print(f"Spring: {spring_application().split(':')[0]}")
    print(f"Decisions about access: {decisions().split(':')[0]}")
    print(f"Mosquitto: {tool('mosquitto')} {tool('mosquitto_pub')}")


if __name__ == "__main__":
    fetch_all()
