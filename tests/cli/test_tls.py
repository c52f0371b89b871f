"""Every command, and the Python client, against a broker and a name server that refuse plain text and strangers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from tests.cli.conftest import Process
from tests.client.patient import PATIENCE_S, patient

from martlet.net.tls import client_context
from martlet_client import ClientSettings, Message, NameServerUnreachable, blocking
from martlet_remoting.commands import COMMANDS

Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Secure:
    """A name server that enforces TLS and asks for certificates, as its broker does; and what its clients need."""

    name_server: str
    ca: str
    cert: str
    key: str
    chain: str

    def options(self) -> tuple[str, ...]:
        return ("--tls-ca", self.ca, "--tls-cert", self.cert, "--tls-key", self.key)

    def settings(self) -> ClientSettings:
        return patient(self.name_server, tls=client_context(self.ca, self.cert, self.key))


def write(folder: Path, name: str, *pems: trustme.Blob) -> str:
    (folder / name).write_bytes(b"".join(pem.bytes() for pem in pems))
    return str(folder / name)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("somebody")
    ca = write(folder, "ca.pem", authority.cert_pem)
    own = {
        "tls": "enforcing",
        "tls_cert": write(folder, "server.pem", *server.cert_chain_pems),
        "tls_key": write(folder, "server.key", server.private_key_pem),
        "tls_client_ca": ca,
    }
    sets = [f"{part}.{name}={value}" for part in ("remoting", "nameserver") for name, value in own.items()]
    process = Process(folder, "run", *(word for each in sets for word in ("--set", each)))
    try:
        yield Secure(
            process.addresses()["nameserver"],
            ca,
            write(folder, "client.pem", *client.cert_chain_pems),
            write(folder, "client.key", client.private_key_pem),
            write(folder, "both.pem", client.private_key_pem, *client.cert_chain_pems),
        )
    finally:
        process.end()


# Every command that talks to a broker, in an order in which each has something to work on.
WORDS = [
    ("ping",),
    ("topic", "create", "Secret", "--queues", "1"),
    ("topic", "list"),
    ("topic", "stats", "Secret"),
    ("send", "Secret", "hush", "--key", "k"),
    ("tail", "Secret", "--from", "begin", "--no-follow"),
    ("message", "--key", "k", "--topic", "Secret"),
    ("group", "create", "spies"),
    ("group", "reset", "spies", "--topic", "Secret", "--to", "0"),
    ("group", "lag", "spies"),
    ("group", "list"),
    ("dlq", "list"),
    ("dlq", "show", "spies"),
    ("dlq", "resend", "spies"),
    ("timer", "count"),
    ("tx", "list"),
    ("stats", "server."),
    ("bench", "--messages", "10"),
    ("group", "delete", "spies", "--yes"),
    ("topic", "delete", "Secret", "--yes"),
]


def test_the_words_below_try_every_command() -> None:
    assert {words[0] for words in WORDS} == {command.name for command in COMMANDS} - {"nameserver"}


def by_options(secure: Secure, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[str, ...]:
    return ("-n", secure.name_server, "--tls", *secure.options())


def by_environment(secure: Secure, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[str, ...]:
    monkeypatch.setenv("NAMESRV_ADDR", secure.name_server)
    monkeypatch.setenv("MARTLET_TLS", "1")
    monkeypatch.setenv("MARTLET_TLS_CA", secure.ca)
    monkeypatch.setenv("MARTLET_TLS_CERT", secure.chain)
    return ()


def by_file(secure: Secure, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[str, ...]:
    path = folder / "martlet.toml"
    path.write_text(
        f'[client]\nname_server = "{secure.name_server}"\ntls_ca = "{secure.ca}"\n'
        f'tls_cert = "{secure.cert}"\ntls_key = "{secure.key}"\n'
    )
    monkeypatch.setenv("MARTLET_CONFIG", str(path))
    return ()


@pytest.mark.parametrize("how", [by_options, by_environment, by_file])
def test_every_command_speaks_tls(
    how: Callable[..., tuple[str, ...]],
    secure: Secure,
    martlet: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options = how(secure, monkeypatch, tmp_path)
    for words in WORDS:
        code, _, err = martlet(*words, *options)
        assert (code, err) == (0, ""), words


def test_an_option_is_over_the_environment_and_that_over_the_file(
    secure: Secure, martlet: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_file(secure, monkeypatch, tmp_path)
    assert martlet("ping")[0] == 0
    monkeypatch.setenv("NAMESRV_ADDR", "127.0.0.1:1")
    assert "127.0.0.1:1 " in martlet("ping")[2]
    assert martlet("ping", "-n", secure.name_server)[0] == 0
    monkeypatch.setenv("MARTLET_TLS", "0")
    assert martlet("ping", "-n", secure.name_server)[0] == 3
    assert martlet("ping", "-n", secure.name_server, "--tls")[0] == 0


UNTRUSTED = [
    ((), "without an answer; it may require TLS"),
    (("--tls",), "its certificate was rejected: "),
    (("--tls-insecure",), "without an answer"),
    (("--tls-ca", "CA"), "without an answer"),
]


@pytest.mark.parametrize(("options", "sentence"), UNTRUSTED)
def test_who_is_not_trusted_is_told_why(options: tuple[str, ...], sentence: str, secure: Secure, martlet: Run) -> None:
    given = [secure.ca if option == "CA" else option for option in options]
    code, out, err = martlet("topic", "list", "-n", secure.name_server, *given)
    assert (code, out) == (3, "")
    assert sentence in err


def test_any_certificate_will_do_where_that_is_asked_for(secure: Secure, martlet: Run) -> None:
    options = ("--tls-insecure", "--tls-cert", secure.chain)
    assert martlet("ping", "-n", secure.name_server, *options)[0] == 0


def test_tls_to_a_port_without_it_is_told(start: Callable[..., Process], martlet: Run) -> None:
    port = start("run", "--set", "nameserver.tls=disabled").addresses()["nameserver"]
    code, _, err = martlet("ping", "-n", port, "--tls")
    assert code == 3
    assert "the peer ended the TLS handshake; it may not speak TLS" in err


WRONG = [
    ({"MARTLET_TLS": "maybe"}, "environment variable MARTLET_TLS is 'maybe'; it must be 1 or 0"),
    ({"MARTLET_TLS_CA": "/nowhere"}, "TLS authority '/nowhere' cannot be used; No such file or directory"),
    ({"MARTLET_CONFIG": "/nowhere"}, "config file '/nowhere' cannot be read; No such file or directory"),
]


@pytest.mark.parametrize(("environment", "sentence"), WRONG)
def test_a_wrong_environment_is_a_wrong_configuration(
    environment: dict[str, str], sentence: str, martlet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = martlet("ping")
    assert (code, err) == (2, f"martlet: {sentence}\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("client = 3\n", "config key 'client' is a value; it must be a section"),
        ("[client]\ntsl = true\n", "config key 'client.tsl' is unknown; did you mean 'client.tls'?"),
        ("[client]\nname_server = 9876\n", "config key 'client.name_server' is 9876; it must be text"),
    ],
)
def test_a_wrong_file_is_a_wrong_configuration(text: str, sentence: str, martlet: Run, tmp_path: Path) -> None:
    path = tmp_path / "martlet.toml"
    path.write_text(text)
    code, _, err = martlet("ping", "--config", str(path))
    assert (code, err) == (2, f"martlet: {sentence}\n")


def test_a_key_that_is_not_the_certificates_is_a_wrong_configuration(secure: Secure, martlet: Run) -> None:
    code, _, err = martlet("ping", "--tls-cert", secure.cert, "--tls-key", secure.ca)
    assert code == 2
    assert f"TLS certificate {secure.cert!r} with key {secure.ca!r} cannot be used" in err


def test_the_python_client_speaks_tls_to_name_servers_and_brokers(secure: Secure) -> None:
    with blocking.Producer(secure.settings(), "P", send_timeout_s=PATIENCE_S) as producer:
        sent = producer.send(Message("Python", b"hush"))
    with blocking.PullConsumer(secure.settings(), "C") as consumer:
        pulled = consumer.pull(sent.queue, sent.queue_offset)
    assert [message.body for message in pulled.messages] == [b"hush"]


def test_the_python_client_says_why_a_name_server_is_not_trusted(secure: Secure) -> None:
    settings = patient(secure.name_server, tls=client_context())
    with (
        pytest.raises(NameServerUnreachable, match="its certificate was rejected: "),
        blocking.Producer(settings, "P") as producer,
    ):
        producer.send(Message("Python", b"hush"))


def with_tls_to(secure: Secure, *more: str) -> list[str]:
    sets = [
        "broker.name=other",
        f'remoting.nameservers=["{secure.name_server}"]',
        f"remoting.nameservers_tls_ca={secure.ca}",
        f"remoting.nameservers_tls_cert={secure.cert}",
        f"remoting.nameservers_tls_key={secure.key}",
        *more,
    ]
    return [word for each in sets for word in ("--set", each)]


def wait_for(process: Process, line: str) -> None:
    process.until(lambda: line in process.log.read_text())


def test_a_broker_registers_at_a_name_server_that_enforces_tls(
    secure: Secure, martlet: Run, start: Callable[..., Process]
) -> None:
    def registered() -> set[str]:
        found = json.loads(martlet("ping", "--json", "-n", secure.name_server, *secure.options())[1])
        return {each["name"] for each in found if each["role"] == "broker"}

    other = start("run", *with_tls_to(secure))
    other.wait_ready()
    wait_for(other, f"registered with name server {secure.name_server}")
    assert registered() == {"martlet", "other"}
    other.stop()
    assert registered() == {"martlet"}, "it said goodbye"


def test_a_broker_says_why_a_name_server_refuses_it(secure: Secure, start: Callable[..., Process]) -> None:
    other = start("run", *with_tls_to(secure, "remoting.nameservers_tls_ca="))
    other.wait_ready()
    wait_for(other, f"name server {secure.name_server}: registration failed")
    assert "its certificate was rejected: " in other.log.read_text()


def test_files_for_name_servers_that_cannot_be_used_are_named(
    secure: Secure, martlet: Run, start: Callable[..., Process], tmp_path: Path
) -> None:
    wrong = "remoting.nameservers_tls_cert=/nowhere"
    other = start("run", *with_tls_to(secure, wrong))
    assert other.wait() == 2
    (tmp_path / "martlet.toml").touch()
    code, _, err = martlet("check", str(tmp_path / "martlet.toml"), "--set", wrong)
    assert code == 2
    for text in (other.log.read_text(), err):
        assert "remoting.nameservers_tls: TLS certificate '/nowhere'" in text
