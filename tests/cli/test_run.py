"""What `martlet run` promises to whoever starts it, and to systemd."""

import json
import random
import signal
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from .conftest import READY, Process

Start = Callable[..., Process]


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def test_the_ready_line_names_the_ports_that_accept(start: Start) -> None:
    process = start("run")
    found = READY.fullmatch(process.wait_ready())
    assert found is not None, process.log.read_text()
    assert found[2] == str(process.data)
    pairs = [pair.split("=", 1) for pair in found[1].split()]
    assert [name for name, _ in pairs] == ["remoting", "nameserver", "mqtt", "stomp"]
    for _, address in pairs:
        connect(address).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(number: int, start: Start) -> None:
    process = start("run")
    process.wait_ready()
    assert process.stop(number) == 0
    assert "abort" not in {path.name for path in process.data.iterdir()}
    assert "Traceback" not in process.log.read_text()


def test_open_connections_do_not_delay_the_end(start: Start) -> None:
    process = start("run")
    addresses = process.addresses()
    with connect(addresses["remoting"]), connect(addresses["nameserver"]):
        assert process.stop() == 0


def test_sighup_does_not_end_it(start: Start) -> None:
    process = start("run")
    addresses = process.addresses()
    process.child.send_signal(signal.SIGHUP)
    connect(addresses["remoting"]).close()
    assert process.stop() == 0
    assert "SIGHUP; reloading certificates and plugins" in process.log.read_text()


def test_a_second_broker_on_the_same_data_is_refused_by_the_first_ones_pid(start: Start) -> None:
    first = start("run")
    first.wait_ready()
    second = start("run")
    assert second.wait_ready() == ""
    assert second.wait() == 3
    assert f"in use by process {first.child.pid}" in second.log.read_text()
    assert first.stop() == 0


def test_it_starts_again_on_what_a_kill_left(start: Start) -> None:
    process = start("run")
    process.wait_ready()
    process.child.kill()
    process.wait()
    again = start("run")
    assert READY.fullmatch(again.wait_ready())
    assert again.stop() == 0


def test_nobody_else_may_read_the_data(start: Start) -> None:
    process = start("run")
    process.wait_ready()
    assert process.stop() == 0
    for path in [process.data, *process.data.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_json_logs_are_objects(start: Start) -> None:
    process = start("run", "--log", "json", "--log-level", "debug")
    addresses = process.addresses()
    with connect(addresses["remoting"]) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n")
        while peer.recv(4096):
            pass
    assert process.stop() == 0
    events = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert {"time", "level", "part", "message"} <= set.intersection(*map(set, events))
    assert any("remoting" in event["message"] and event["level"] != "error" for event in events)
    assert not any("traceback" in event for event in events)


def test_a_peers_error_is_one_line_without_a_traceback(start: Start) -> None:
    process = start("run")
    addresses = process.addresses()
    for garbage in (
        b"\xff" * 64,
        b"\x00\x00\x00\x02\x00\x00",
        b"GET / HTTP/1.0\r\n\r\n",
        random.Random(256).randbytes(256),
    ):
        for address in addresses.values():
            with connect(address) as peer:
                peer.sendall(garbage)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass
    assert process.stop() == 0
    log = process.log.read_text()
    assert "Traceback" not in log
    assert "because of a bug" not in log


def test_systemd_is_told_that_it_accepts(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(path)
        notify.settimeout(120.0)
        process = start("run", environment={"NOTIFY_SOCKET": path})
        said = iter(lambda: notify.recv(4096).decode(), "")
        # A start that has something to recover asks for more time first.
        assert next(text for text in said if not text.startswith("EXTEND_TIMEOUT_USEC=")).startswith("READY=1\n")
        assert process.stop() == 0


def test_the_log_says_the_line_a_client_needs(start: Start) -> None:
    process = start("run", "--set", "broker.advertise=mq.example.org")
    addresses = process.addresses()
    assert process.stop() == 0
    port = addresses["remoting"].rsplit(":", 1)[1]
    log = process.log.read_text()
    assert f"namesrvAddr={addresses['nameserver']} " in log
    assert f"they then connect to mq.example.org:{port}" in log


def test_the_core_runs_with_no_plugin_at_all(start: Start) -> None:
    process = start("run", "--set", "plugins.enabled=[]")
    assert process.wait_ready().startswith("martlet ready: kernel=")
    assert process.stop() == 0


def test_a_port_that_is_taken_is_a_sentence_and_no_wrong_configuration(start: Start) -> None:
    """A service manager tries the first again, and leaves the second to people."""
    first = start("run")
    taken = first.addresses()["remoting"]
    second = start("run", remoting=taken, folder=first.data.parent / "second")
    assert second.wait_ready() == ""
    assert second.wait() == 4
    log = second.log.read_text()
    assert taken in log
    assert "Traceback" not in log
    wrong = start("run", remoting="nowhere", folder=first.data.parent / "third")
    assert wrong.wait_ready() == ""
    assert wrong.wait() == 2


def test_data_that_cannot_be_kept_is_a_sentence(start: Start, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file is in the way")
    process = start("run")
    assert process.wait_ready() == ""
    assert process.wait() == 3
    last = process.log.read_text().splitlines()[-1]
    assert last == f"martlet: data directory {str(tmp_path / 'data')!r} cannot be used; File exists"
    assert "Traceback" not in process.log.read_text()


def test_a_table_that_cannot_be_read_is_a_sentence(start: Start, tmp_path: Path) -> None:
    table = tmp_path / "data" / "config" / "topics.json"
    table.mkdir(parents=True)
    process = start("run")
    assert process.wait_ready() == ""
    assert process.wait() == 3
    last = process.log.read_text().splitlines()[-1]
    assert last == f"martlet: data directory {str(tmp_path / 'data')!r} cannot be used; Is a directory: {str(table)!r}"
    assert "Traceback" not in process.log.read_text()


def test_a_name_server_runs_alone(start: Start) -> None:
    process = start("nameserver")
    assert list(process.addresses()) == ["nameserver"]
    assert process.stop() == 0


def test_a_broker_registers_with_a_name_server_elsewhere(
    start: Start, tmp_path: Path, martlet: Callable[..., tuple[int, str, str]]
) -> None:
    names = start("nameserver", folder=tmp_path / "names").addresses()["nameserver"]
    broker = start(
        "run",
        "--set",
        "plugins.enabled=['remoting']",
        "--set",
        f"remoting.nameservers=['{names}']",
        folder=tmp_path / "broker",
    )
    assert list(broker.addresses()) == ["remoting"]
    while f"registered with name server {names}" not in broker.log.read_text():
        assert broker.child.poll() is None, broker.log.read_text()
    assert martlet("send", "Elsewhere", "hello", "-n", names)[0] == 0
    assert "hello" in martlet("tail", "Elsewhere", "--from", "begin", "--no-follow", "-n", names)[1]


def issue_certificate(folder: Path, authority: trustme.CA) -> None:
    """Put a new certificate for 127.0.0.1 where the broker looks for it."""
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "new.pem"))
    (folder / "new.pem").replace(folder / "chain.pem")


def served_certificate(address: str, context: ssl.SSLContext) -> bytes:
    with connect(address) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        return secure.getpeercert(binary_form=True) or b""


def test_sighup_reads_the_certificates_again(start: Start, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    issue_certificate(tmp_path, authority)
    words = [f"{section}.tls_cert={tmp_path}/chain.pem" for section in ("remoting", "nameserver", "mqtt", "stomp")]
    process = start("run", *(part for word in words for part in ("--set", word)))
    addresses = process.addresses()
    first = {address: served_certificate(address, context) for address in addresses.values()}

    issue_certificate(tmp_path, authority)
    process.child.send_signal(signal.SIGHUP)
    for address, certificate in first.items():
        assert certificate
        while served_certificate(address, context) == certificate:
            pass
    assert process.stop() == 0
