"""The commands of the core that need no broker."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from martlet.app.config import Config, read_config
from martlet.cli import main as cli
from martlet.cli.config import as_markdown, sections
from martlet.cli.main import CORE, commands, find, main
from martlet.cli.outcome import Exit, Unreachable, guarded
from martlet.config import read_toml
from martlet.errors import ConfigError, MartletError, PluginError, StoreFailed, StoreLocked
from martlet.plugins import loader
from martlet.runtime.installed import EntryPoint
from martlet_tx.plugin import TxPlugin


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run ``martlet WORDS`` and return exit code, stdout and stderr."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "martlet.toml"
        path.write_text(text)
        return str(path)

    return write


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "--help")
    assert code == Exit.OK
    for command in commands():
        assert f"  {command.name} " in out


def test_a_command_reads_the_metadata_of_all_packages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = Mock(side_effect=loader.available)
    monkeypatch.setattr(loader, "available", scans)
    assert find("topic") is not None
    scans.assert_called_once_with()


def test_what_a_command_imports_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(words: list[str]) -> int:
        collected = gc.get_stats()[0]["collections"]
        kept: list[list[int]] = [[] for _ in range(100_000)]
        assert kept
        return int(gc.get_stats()[0]["collections"] - collected)

    before = gc.get_threshold()
    monkeypatch.setattr(cli, "_run", start)
    assert main(["run"]) == 0
    assert gc.get_threshold() == before


def test_nothing_asked_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys)[0] == Exit.USAGE


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "plugin")
    assert code == Exit.USAGE
    assert err == "martlet: command 'plugin' is unknown; did you mean 'plugins'?\n"


def test_a_command_like_no_other_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "nosuch")
    assert code == Exit.USAGE
    assert err.startswith("martlet: command 'nosuch' is unknown; commands: run, check, config, plugins, store, ")


@pytest.mark.parametrize("name", sorted(CORE))
def test_each_help_teaches_by_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, name, "--help")
    assert code == Exit.OK
    assert "examples:" in out
    assert f"  martlet {name}" in out


def test_the_summaries_in_the_overview_are_the_commands_own() -> None:
    own = {command.name: command.help for command in commands() if command.name in CORE}
    assert own == CORE


def test_check_accepts_what_run_accepts(file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    path = file('[broker]\nname = "one"\n[store]\nflush = "async"\n[remoting]\nlisten = "127.0.0.1:0"\n')
    code, out, err = outcome(capsys, "check", path)
    assert (code, err) == (Exit.OK, "")
    assert "sections broker, store, remoting" in out


def test_check_for_programs_is_json(file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "check", "--json", file("[broker]\n"))
    assert json.loads(out)["sections"] == ["broker"]


BAD = [
    ("[store]\nflush = 1\n", "config key 'store.flush' is 1; it must be 'sync' or 'async'"),
    ("[store]\nfluhs = 'sync'\n", "config key 'store.fluhs' is unknown; did you mean 'store.flush'?"),
    ("[sotre]\nflush = 'sync'\n", "config key 'sotre' is unknown; did you mean 'store'?"),
    ("store = 3\n", "config key 'store' is a value; it must be a section"),
    ("[remoting]\nlistne = 'x'\n", "config key 'remoting.listne' is unknown; did you mean 'remoting.listen'?"),
    ("[remoting]\nlisten = 'here'\n", "address 'here' is not HOST:PORT; for example 127.0.0.1:10911"),
    ("[remoting]\nlisten = '127.0.0.1:99999'\n", "address '127.0.0.1:99999' is not HOST:PORT"),
    ("[remoting]\nlisten = 'localhost'\n", "address 'localhost' is not HOST:PORT"),
    ("[remoting]\nnameservers = ['ns1', 'ns2:9876']\n", "address 'ns1' is not HOST:PORT"),
    ("[nameserver]\nlisten = ':x'\n", "address ':x' is not HOST:PORT"),
    ("[remoting]\npull_messages_max = 0\n", "config key 'remoting.pull_messages_max' is 0; it must be at least 1"),
    ("remoting = 3\n", "config key 'remoting' is a value; it must be a section"),
    ("[broker]\nmessage_bytes_max = 8_000_000\n", "'broker.message_bytes_max' is 8000000, more than 'store.message"),
    ("[plugins]\nenabled = ['remotin']\n", "plugin 'remotin' is not installed; installed: "),
    ("[remoting]\nlisten = 'here'\n", "config key 'remoting.listen': address 'here'"),
    ("[remoting]\nnameservers = ['ns1']\n", "config key 'remoting.nameservers': address 'ns1'"),
    ("[nameserver]\nlisten = 'here'\n", "config key 'nameserver.listen': address 'here'"),
    (
        "[nameserver]\nlisten = '0.0.0.0:10911'\n",
        "'nameserver.listen' is '0.0.0.0:10911', where plugin 'remoting' listens",
    ),
    ("[broker]\ndata = ''\n", "config key 'broker.data' is ''; name a directory, or '.' for the current one"),
    ("[broker]\nname = ''\n", "config key 'broker.name' is ''; it must be 1 to 115 letters, digits and characters of"),
    ("[broker]\nname = 'a b'\n", "config key 'broker.name' is 'a b'"),
    ("[broker]\ncluster = 'a/b'\n", "config key 'broker.cluster' is 'a/b'"),
    ("[broker]\nadvertise = 'http://x'\n", "'broker.advertise' is 'http://x'; it must be a host name or an address"),
    ("[broker]\nadvertise = 'mq.example.org:10911'\n", "without scheme and port"),
    ("[client]\ntls = 'yes'\n", "config key 'client.tls' is 'yes'; it must be true or false"),
    ("[broker\n", "is not TOML; "),
]


@pytest.mark.parametrize(("text", "sentence"), BAD)
def test_check_says_what_is_wrong_in_a_sentence(
    text: str, sentence: str, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outcome(capsys, "check", file(text))
    assert code == Exit.USAGE
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("listen", "other", "fits"),
    [
        ("127.0.0.1:1999", "127.0.0.1:1999", False),
        ("127.0.0.1:1999", "127.0.0.1:2000", True),
        ("127.0.0.1:0", "127.0.0.1:0", True),
        ("127.0.0.1:1999", "127.0.0.2:1999", True),
        ("127.0.0.1:1999", "0.0.0.0:1999", False),
        (":1999", "127.0.0.1:1999", False),
        ("0.0.0.0:1999", "[::]:1999", False),
        ("0.0.0.0:1999, [::]:1999", "0.0.0.0:2000", True),
        ("127.0.0.1:1998, 127.0.0.2:1999", "127.0.0.2:1999", False),
        ("[::]:1999", "[::1]:1999", False),
        ("mq:1999", "mq:1999", False),
    ],
)
def test_check_compares_the_addresses_of_enabled_plugins(
    listen: str, other: str, fits: bool, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"[remoting]\nlisten = '{listen}'\n[nameserver]\nlisten = '{other}'\n"
    assert outcome(capsys, "check", file(text))[0] == (Exit.OK if fits else Exit.USAGE)
    assert outcome(capsys, "check", file(text + "[plugins]\nenabled = []\n"))[0] == Exit.OK


def test_check_finds_two_dispatchers_of_a_topic(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TxPlugin, "martlet_dispatchers", lambda self: {"SCHEDULE_TOPIC_XXXX": lambda *record: 0}, raising=False
    )
    code, _, err = outcome(capsys, "check", file(""))
    assert (code, "cannot dispatch topic 'SCHEDULE_TOPIC_XXXX'" in err) == (Exit.USAGE, True)


def test_check_of_no_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "check", str(tmp_path / "absent.toml"))
    assert code == Exit.USAGE
    assert "absent.toml' cannot be read; No such file or directory" in err


def test_a_setting_of_the_command_line_is_over_the_file(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = outcome(capsys, "check", file("[store]\nflush = 'sync'\n"), "--set", "store.flush=never")
    assert code == Exit.USAGE
    assert "config key 'store.flush' is 'never'" in err


@pytest.mark.parametrize(
    "setting",
    [
        "store.flush=never",
        "remoting.listen=127.0.0.1:99999",
        "remoting.listen=localhost",
        "remoting.nameservers=['ns1']",
        "plugins.required=['absent']",
        "plugins.enabled=['remoting', 'remoting']",
        "plugins.enabled=['timer', 'tx']",
        "nameserver.listen=127.0.0.1:10911",
    ],
)
def test_run_refuses_what_check_refuses(
    setting: str, file: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, checked = outcome(capsys, "check", file(""), "--set", setting)
    assert (code, out) == (Exit.USAGE, "")
    code, out, ran = outcome(capsys, "run", "--data", str(tmp_path / "data"), "--set", setting)
    assert (code, out) == (Exit.USAGE, "")
    assert ran.endswith(checked)
    assert not (tmp_path / "data").exists()


def test_config_prints_a_file_that_changes_nothing(
    file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = outcome(capsys, "config")
    assert code == Exit.OK
    path = Path(file(out))
    config = read_config(read_toml(path))
    assert (config.broker, config.server, config.store, config.log) == (
        Config().broker,
        Config().server,
        Config().store,
        Config().log,
    )
    assert outcome(capsys, "check", str(path))[0] == Exit.OK


def test_config_prints_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outcome(capsys, "config", "log")
    assert "[log]" in out
    assert "[store]" not in out


def test_config_knows_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "config", "nope")
    assert code == Exit.USAGE
    assert "section 'nope' is unknown; sections: log, broker" in err


def test_config_says_where_a_plugin_fails_to_import_and_shows_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence is the one of `martlet run` and `martlet plugins`."""
    load_entry = EntryPoint.load

    def load_wrong(entry: EntryPoint) -> object:
        if entry.name == "mqtt":
            return compile("import os\nclass Wrong(:", "/plugins/wrong/__init__.py", "exec")
        return load_entry(entry)

    monkeypatch.setattr(EntryPoint, "load", load_wrong)
    with pytest.raises(PluginError) as refused:
        loader.load(["mqtt"], {})
    code, _, err = outcome(capsys, "config", "stomp", "mqtt")
    assert err.splitlines()[0] == f"martlet: {refused.value}"
    assert "/plugins/wrong/__init__.py:2" in err
    assert (code, "section 'mqtt' is unknown" in err) == (Exit.USAGE, True)
    assert "[stomp]" in outcome(capsys, "config", "stomp")[1]


def test_every_key_is_in_the_tables_for_documentation() -> None:
    text = as_markdown(list(sections()))
    for section in sections():
        for setting in section.settings:
            assert f"| `{setting.key}` |" in text


def test_plugins_lists_remoting_and_its_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "plugins", "--json")
    found = {row["name"]: row for row in json.loads(out)}
    assert code == Exit.OK
    assert found["remoting"]["enabled"]
    assert "protocols" in found["remoting"]["hooks"]


def test_plugins_names_one_that_is_not_there(file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "plugins", "--config", file("[plugins]\nenabled = ['nope']\n"))
    assert code == Exit.FAILED
    assert "not installed" in out


def raising(error: BaseException) -> Callable[[Any], int]:
    def work(_: Any) -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MartletError("no"), Exit.FAILED),
        (ConfigError("no"), Exit.USAGE),
        (StoreLocked("no"), Exit.UNUSABLE),
        (ExceptionGroup("nursery", [ExceptionGroup("inner", [StoreFailed("no")])]), Exit.UNUSABLE),
        (Unreachable("no"), Exit.UNUSABLE),
    ],
)
def test_an_error_is_a_sentence_and_a_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error), None) == code
    assert capsys.readouterr().err == "martlet: no\n"


def test_an_interrupt_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyboardInterrupt()), None) == Exit.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_ctrl_c_wins_over_what_it_broke(capsys: pytest.CaptureFixture[str]) -> None:
    group = BaseExceptionGroup("both", [Unreachable("the connection was closed"), KeyboardInterrupt()])
    assert guarded(raising(group), None) == Exit.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()), None)


def imported_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after *statement*."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_command_line_itself_imports_next_to_nothing() -> None:
    assert not {"trio", "pluggy", "martlet.app.startup", "martlet.store"} & imported_by("import martlet.cli.main")


# Prints all modules that are there when the broker is ready, and exits.
AT_READY = """
import builtins, os, sys

def exit_when_ready(*words, **options):
    if words[0].startswith("martlet ready"):
        os.write(1, "\\n".join(sys.modules).encode())
        os._exit(0)

builtins.print = exit_when_ready
from martlet.cli.main import main
main(sys.argv[1:])
"""


def test_a_broker_that_is_ready_has_imported_no_large_module_that_clients_may_never_need(tmp_path: Path) -> None:
    words = [f"--set={name}.listen=127.0.0.1:0" for name in ("remoting", "nameserver", "mqtt", "stomp")]
    command = [sys.executable, "-c", AT_READY, "run", f"--data={tmp_path / 'data'}", *words]
    imported = set(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    assert {"martlet_remoting.plugin", "martlet_mqtt.plugin", "martlet_stomp.plugin", "trio"} <= imported
    unneeded = {
        "wsproto",
        "h11",
        "asyncio",
        "unittest",
        "http",
        "xml",
        "pydoc",
        "concurrent.futures",
        "multiprocessing",
    }
    unneeded |= {"martlet_client", "martlet_mqtt.commands", "martlet_stomp.commands", "martlet.offline.verify"}
    assert not unneeded & imported


def test_a_broker_needs_no_parser_of_toml_if_there_is_no_configuration() -> None:
    assert "tomllib" not in imported_by(
        "import martlet.app.startup; from martlet.app.config import read_config; read_config({})"
    )


def test_a_broker_does_not_import_what_its_plugins_do_not_need() -> None:
    loaded = "from martlet.plugins.loader import load; load(['remoting', 'nameserver'], {}); import martlet.app.startup"
    unneeded = {"martlet_client", "martlet_remoting.commands", "martlet.cli", "wsproto", "martlet_timer"}
    assert not unneeded & imported_by(loaded)
