"""RocketMQ's tools manage users and rules of Martlet, and see what a RocketMQ 5.5.0 would show them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from martlet_remoting.wire.codes import RequestCode

from . import fetch
from .acl_brokers import ROOT, Brokers, signed
from .java import Java, Jvm

ALICE, BOSS, MANAGER = ({"access_key": name, "secret_key": f"{name}'s secret"} for name in ("alice", "boss", "manager"))


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    found = Brokers(tmp_path_factory.mktemp("acls"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def tools(brokers: Brokers, jvms: Callable[[str], Jvm]) -> dict[str, Java]:
    """The newest admin tool beside each of the brokers."""
    return {kind: Java(jvms(fetch.SERVER_VERSION), broker.name_server) for kind, broker in brokers.both()}


# Who runs it, and the command; $B is the option with the broker's address, $C that with the cluster's name.
SCRIPT = """
root createUser $B -u alice -p alice's_secret -t Normal
root createUser $B -u alice -p another_one
root createUser $C -u boss -p boss's_secret -t Super
root createUser $B -u manager -p manager's_secret
root listUser $B
root listUser $B -f li
root listUser $C -f nobody
root getUser $B -u boss
root getUser $B -u nobody
root updateUser $B -u alice -s disable
root getUser $C -u alice
alice listUser $B
root updateUser $C -u alice -s enable
alice listUser $B
root updateUser $B -u alice -p alice's_secret
root updateUser $B -u nobody -p another_one
root updateUser $B -u alice -t Super
alice listUser $B -f alice
root updateUser $B -u alice -t Normal
root createAcl $B -s User:alice -r Topic:orders*,Group:g -a Pub,Sub -i 10.0.0.0/8,127.0.0.1 -d Allow
root createAcl $B -s User:manager -r Cluster:* -a All -d Allow
root getAcl $B -s User:alice
root getAcl $C -s User:manager
root listAcl $B
root listAcl $C -s lic
root listAcl $B -r Group
root updateAcl $B -s User:alice -r Topic:orders*,Topic:* -a All -d Deny
root createAcl $C -s User:alice -r * -a get,LIST -d allow
root getAcl $B -s User:alice
root createAcl $B -s User:nobody -r Topic:a -a Pub -d Allow
root createAcl $B -s User:alice -r Topic:a -a Any -d Allow
root createAcl $B -s User:alice -r Topc:a -a Pub -d Allow
root createAcl $B -s User:alice -r Topic:a -a Pub -i 10.0.0.256 -d Allow
root createAcl $B -s User:alice -r Topic:a -a Pub -d Maybe
root getAcl $B -s User:alice
root getAcl $B -s User:boss
root getAcl $B -s User:nobody
root deleteAcl $B -s User:alice -r Topic:orders*
root deleteAcl $B -s User:alice -r Topic:orders*
root getAcl $B -s User:alice
root deleteAcl $C -s User:alice
root getAcl $B -s User:alice
root deleteAcl $B -s User:alice
root deleteAcl $B -s User:nobody
manager createUser $B -u carol -p carol's_secret
manager createUser $B -u other -p other's_secret -t Super
manager updateUser $B -u carol -t Super
manager updateUser $B -u boss -p another_one
manager deleteUser $B -u boss
manager deleteUser $B -u carol
alice createUser $B -u carol -p carol's_secret
alice createAcl $B -s User:alice -r * -a All -d Allow
root deleteUser $C -u boss
root deleteUser $B -u nobody
root deleteUser $B -u alice
root deleteUser $B -u manager
root listUser $B
root listAcl $B
"""
STEPS = [line for line in SCRIPT.splitlines() if line]
USERS = {"root": ROOT, "alice": ALICE, "boss": BOSS, "manager": MANAGER}
# Martlet does not say why a login fails, and tells in other words what a user lacks.
DENIED = r"CODE: 16 +DESC: (User:\w+ has no permission|User:\w+ is disabled|'\w+' may not|access key).*"
NOISE = re.compile(
    r"\tat |\t\.\.\. |For more information|See https?:|org\.apache\.rocketmq\.tools\.command\.SubCommand"
)


def run(tool: Java, address: str, step: str) -> list[str]:
    """Return the lines that a step prints, without what differs on purpose."""
    who, *words = step.replace("$B", f"-b {address}").replace("$C", "-c DefaultCluster").split()
    said = tool.mqadmin(*(word.replace("_", " ") if "'s_" in word else word for word in words), **USERS[who])
    lines = [line.replace(address, "<broker>") for line in said.splitlines() if line.strip() and not NOISE.match(line)]
    return [comparable(line) for line in lines]


def comparable(line: str) -> str:
    """Return a line without passwords, which Martlet does not show, and without what Martlet adds to a remark."""
    line = re.sub(r"\w+'s secret", "", line).replace("another_one", "")
    remark = re.match(r"(.*CODE: \d+ +DESC: [^;]*)", line)
    line = remark[1].rstrip(".") if remark else line
    line = re.sub(DENIED, "CODE: 16 denied", line)
    return " ".join(line.split())


def test_the_tools_show_and_change_users_and_rules_as_on_rocketmq(brokers: Brokers, tools: dict[str, Java]) -> None:
    for step in STEPS:
        ours, real = (run(tools[kind], broker.address, step) for kind, broker in brokers.both())
        assert ours == real, step


def test_users_and_rules_are_copied_between_brokers(brokers: Brokers, tools: dict[str, Java]) -> None:
    tool, martlet, real = tools["martlet"], brokers.martlet.address, brokers.rocketmq.address
    there, back = ("-f", real, "-t", martlet), ("-f", martlet, "-t", real)
    create = ("createUser", "-b", real, "-u", "dave", "-p", "dave's secret")
    assert "success" in tool.mqadmin(*create, **ROOT)
    rules = ("-s", "User:dave", "-r", "Topic:a,Group:*", "-a", "Pub,Get", "-i", "10.0.0.0/8", "-d", "Allow")
    assert "success" in tool.mqadmin("createAcl", "-b", real, *rules, **ROOT)
    assert "copy user of dave" in tool.mqadmin("copyUser", *there, "-u", "dave", **ROOT)
    assert "copy acl of User:dave" in tool.mqadmin("copyAcl", *there, **ROOT)
    shown = [tool.mqadmin("getAcl", "-b", address, "-s", "User:dave", **ROOT) for address in (martlet, real)]
    assert "10.0.0.0/8" in shown[0]
    assert shown[0] == shown[1]
    dave = {"access_key": "dave", "secret_key": "dave's secret"}
    assert "may not get the cluster" in tool.mqadmin("listUser", "-b", martlet, **dave)  # his signature is right

    tool.mqadmin("deleteAcl", "-b", real, "-s", "User:dave", **ROOT)
    assert "copy acl of User:dave" in tool.mqadmin("copyAcl", *back, "-s", "User:dave", **ROOT)
    assert tool.mqadmin("getAcl", "-b", real, "-s", "User:dave", **ROOT) == shown[0]
    tool.mqadmin("updateUser", "-b", martlet, "-u", "dave", "-s", "disable", **ROOT)
    assert "copy user of dave" in tool.mqadmin("copyUser", *back, "-u", "dave", **ROOT)
    assert "disable" in tool.mqadmin("getUser", "-b", real, "-u", "dave", **ROOT)
    tool.mqadmin("createUser", "-b", martlet, "-u", "erin", "-p", "erin's secret", **ROOT)
    assert "password can not be blank" in tool.mqadmin("copyUser", *back, "-u", "erin", **ROOT)


@pytest.fixture
def old_tool(brokers: Brokers, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The admin tool of 4.9.8, which finds the key of its user in a file: call it with the user and the command."""
    (tmp_path / "conf").mkdir()
    jvm = Jvm("4.9.8", tmp_path)
    tool = Java(jvm, brokers.martlet.name_server)

    def run(user: Mapping[str, str], *words: str) -> str:
        key, secret = user["access_key"], user["secret_key"]
        (tmp_path / "conf" / "tools.yml").write_text(TOOLS_YML.replace("alice", key).replace("the secret", secret))
        return tool.mqadmin(*words, "-b", brokers.martlet.address)

    yield run
    jvm.stop()


PAGE = (Path(__file__).parents[2] / "docs" / "acl.md").read_text()
[TOOLS_YML] = re.findall(r"(?s)```yaml\n(.*?)```", PAGE)


def test_the_tool_of_acl_1_makes_users(brokers: Brokers, old_tool: Callable[..., str]) -> None:
    """RocketMQ 5.5.0 does not have these requests any more."""
    frank = {"access_key": "frank", "secret_key": "frank's secret"}
    account = ("-a", "frank", "-s", frank["secret_key"], "-t", "a=PUB|SUB,b=DENY", "-g", "g=SUB", "-i", "SUB")
    assert "success" in old_tool(ROOT, "updateAclConfig", *account)
    refused = old_tool(ROOT, "updateAclConfig", *account, "-w", "10.0.0.*")
    assert "would let addresses in without a signature" in refused
    answer = signed(brokers.martlet.address, ROOT, RequestCode.AUTH_GET_ACL, {"subject": "User:frank"})
    entries = {
        (policy["policyType"], entry["resource"]): (entry["decision"], entry["actions"])
        for policy in json.loads(answer.body)["policies"]
        for entry in policy["entries"]
    }
    assert entries == {
        ("Custom", "Topic:a"): ("Allow", ["Pub", "Sub"]),
        ("Custom", "Topic:b"): ("Deny", ["All"]),
        ("Custom", "Group:g"): ("Allow", ["Sub"]),
        ("Default", "Group:g"): ("Deny", ["Pub"]),
        ("Default", "Topic:*"): ("Allow", ["Sub"]),
    }
    denied = old_tool(frank, "deleteAclConfig", "-a", "frank")
    assert "'frank' may not update the cluster" in denied  # the signature is right
    assert "each request must be signed" in old_tool(ROOT, "updateGlobalWhiteAddr", "-g", "10.0.0.*")
    assert "listUser and listAcl" in old_tool(ROOT, "clusterAclConfigVersion")
    assert "success" in old_tool(ROOT, "deleteAclConfig", "-a", "frank")
    assert "has been deleted failed" in old_tool(ROOT, "deleteAclConfig", "-a", "frank")
