"""The official admin tool sees what it sees on a real broker."""

import difflib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from . import admin, fetch
from .conftest import RocketMQ
from .java import Java, Jvm
from .martlet_process import Martlet

Outputs = dict[str, str]

# The tool gives up an answer after 3, 5 or 6 s, which cannot be set. A scene in which a command took that long, and did
# not say what it should, is played again: maybe the machine stood still. What is wrong is wrong each time.
SLOW_S = 2.5
PLAYS = 4


@pytest.fixture(scope="module")
def outputs(
    target_kind: str, jvms: Callable[[str], Jvm], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outputs]:
    """A function from a tool's version to the output of every step, played once against a broker of its own."""
    played: dict[str, Outputs] = {}
    failed: dict[str, Exception] = {}

    def of(version: str) -> Outputs:
        if version not in played:
            try:
                played[version] = play_in_peace(version)
            except Exception as failure:
                failed[version] = failure
        if version in failed:
            raise RuntimeError(f"the tool {version} stopped") from failed[version]
        return played[version]

    def play_in_peace(version: str) -> Outputs:
        for _ in range(PLAYS - 1):
            outputs, disturbed = play(version)
            if not disturbed:
                return outputs
        return play(version)[0]

    def play(version: str) -> tuple[Outputs, bool]:
        """Return what each step said, and whether a slow one said something else than it should."""
        outputs: Outputs = {}
        disturbed = False
        target = young_broker(target_kind, tmp_path_factory.mktemp("admin"))
        clients = Java(jvms(version), target.name_server)
        try:
            begun = time.monotonic()
            for step, output in admin.play(clients, target.address):
                outputs[step.name] = output
                disturbed |= time.monotonic() - begun > SLOW_S and complaint(version, step, output) != ""
                begun = time.monotonic()
        finally:
            clients.close()
            target.close()
        return outputs, disturbed

    return of


def young_broker(kind: str, folder: Path) -> RocketMQ | Martlet:
    return RocketMQ(folder) if kind == "rocketmq" else Martlet(folder, {"broker.name": admin.BROKER})


def difference(real: str, ours: str) -> str:
    lines = difflib.unified_diff(real.splitlines(), ours.splitlines(), "real broker", "target", lineterm="", n=0)
    return "\n".join(lines)


def complaint(version: str, step: admin.Step, said: str) -> str:
    """Return what is wrong with a step's output; empty if nothing is."""
    expected = admin.recorded(version, step)
    if step.how != "keys":
        return "" if said == expected else difference(expected, said)
    ours, theirs = set(said.split()), set(expected.split())
    strange, missing = sorted(ours - theirs), sorted(set(step.must) - ours)
    return f"{strange} are unknown to the real broker, {missing} are what tools look for" if strange or missing else ""


CASES = [(version, step) for version in fetch.CLIENT_VERSIONS for step in admin.steps(version)]


@pytest.mark.parametrize(("version", "step"), CASES, ids=[f"{version}-{step.name}" for version, step in CASES])
def test_a_command_gives_the_real_brokers_output(
    outputs: Callable[[str], Outputs], version: str, step: admin.Step
) -> None:
    complained = complaint(version, step, outputs(version)[step.name])
    assert not complained, complained
