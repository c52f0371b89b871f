"""The official admin tool sees what it sees on a real broker."""

from collections.abc import Callable
from pathlib import Path

import pytest

from . import admin, fetch
from .conftest import RocketMQ, Target
from .java import Java, Jvm
from .martlet_process import Martlet

Outputs = dict[str, str]


@pytest.fixture(scope="module")
def outputs(
    target_kind: str, jvms: Callable[[str], Jvm], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outputs]:
    """A function from a tool's version to the output of every step, played once against a broker of its own."""
    played: dict[str, Outputs] = {}

    def of(version: str) -> Outputs:
        if version not in played:
            played[version] = {}
            folder = tmp_path_factory.mktemp("admin")
            target = young_broker(target_kind, folder)
            clients = Java(jvms(version), target.name_server)
            try:
                for step, output in admin.play(clients, target.address):
                    played[version][step.name] = output
            finally:
                clients.close()
                target.kill()
                if isinstance(target, RocketMQ):
                    target.close()
        return played[version]

    return of


def young_broker(kind: str, folder: Path) -> Target:
    return RocketMQ(folder) if kind == "rocketmq" else Martlet(folder, {"broker.name": admin.BROKER})


CASES = [(version, step) for version in fetch.CLIENT_VERSIONS for step in admin.steps(version)]


@pytest.mark.parametrize(("version", "step"), CASES, ids=[f"{version}-{step.name}" for version, step in CASES])
def test_a_command_gives_the_real_brokers_output(
    outputs: Callable[[str], Outputs], version: str, step: admin.Step
) -> None:
    said = outputs(version)[step.name]
    expected = admin.recorded(version, step)
    if step.how == "keys":
        ours, theirs = set(said.split()), set(expected.split())
        assert ours <= theirs, "every name is one that the real broker has too"
        assert set(step.must) <= ours
    else:
        assert said.splitlines() == expected.splitlines()
