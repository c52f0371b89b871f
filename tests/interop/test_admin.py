"""The official admin tool sees what it sees on a real broker."""

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

from . import admin, fetch
from .conftest import RocketMQ
from .java import Java, Jvm
from .martlet_process import Martlet

Outputs = dict[str, str]


@pytest.fixture(scope="module")
def outputs(
    target_kind: str, jvms: Callable[[str], Jvm], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outputs]:
    """A function from a tool's version to the output of every step, played once against a broker of its own."""
    played: dict[str, Outputs] = {}
    failed: dict[str, Exception] = {}

    def of(version: str) -> Outputs:
        if version not in played:
            played[version] = {}
            try:
                play(version, played[version])
            except Exception as failure:
                failed[version] = failure
        if version in failed:
            raise RuntimeError(f"the tool stopped after {list(played[version])}") from failed[version]
        return played[version]

    def play(version: str, outputs: Outputs) -> None:
        target = young_broker(target_kind, tmp_path_factory.mktemp("admin"))
        clients = Java(jvms(version), target.name_server)
        try:
            for step, output in admin.play(clients, target.address):
                outputs[step.name] = output
        finally:
            clients.close()
            target.close()

    return of


def young_broker(kind: str, folder: Path) -> RocketMQ | Martlet:
    return RocketMQ(folder) if kind == "rocketmq" else Martlet(folder, {"broker.name": admin.BROKER})


def difference(real: str, ours: str) -> str:
    lines = difflib.unified_diff(real.splitlines(), ours.splitlines(), "real broker", "target", lineterm="", n=0)
    return "\n".join(lines)


CASES = [(version, step) for version in fetch.CLIENT_VERSIONS for step in admin.steps(version)]


@pytest.mark.parametrize(("version", "step"), CASES, ids=[f"{version}-{step.name}" for version, step in CASES])
def test_a_command_gives_the_real_brokers_output(
    outputs: Callable[[str], Outputs], version: str, step: admin.Step
) -> None:
    said = outputs(version)[step.name]
    expected = admin.recorded(version, step)
    if step.how == "keys":
        ours, theirs = set(said.split()), set(expected.split())
        assert sorted(ours - theirs) == [], "every name is one that the real broker has too"
        assert sorted(set(step.must) - ours) == [], "these are what tools look for"
    else:
        assert said == expected, difference(expected, said)
