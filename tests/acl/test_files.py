"""The two files: what is wrong in them is said with its place, and an older one gives no permission back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.acl.brokers import SALT, policy
from tests.acl.policy.worlds import filled, worlds

from martlet.contracts import Identity, Question
from martlet.runtime.steps import finish_now
from martlet_acl.credentials import KEYS_MAX, SecretKey, UserSecrets
from martlet_acl.files import (
    PROBLEMS_MAX,
    AclFilesError,
    FileVersions,
    LoadedFiles,
    load,
    load_newest,
    policies_in_steps,
    secrets_in_steps,
)
from martlet_acl.passwords import hash_password
from martlet_acl.policy.document import PolicyDocument, document_of
from martlet_acl.policy.members import UserRecord
from martlet_acl.state import AclState

VERIFIER = hash_password(b"x", SALT, 12)
NO_VERSIONS = FileVersions()
HIDDEN = "a secret that nobody may see"


def files_of(state: AclState) -> tuple[bytes, bytes]:
    """Return both files as they are written."""
    secrets = b"".join(finish_now(secrets_in_steps(state.version, state.secrets)))
    return b"".join(finish_now(policies_in_steps(state, state.version, state.users, state.secrets))), secrets


def loaded(policies: Any = None, secrets: Any = None, before: FileVersions = NO_VERSIONS) -> LoadedFiles:
    return finish_now(load(json.dumps(policies or {}).encode(), json.dumps(secrets or {}).encode(), before))


def problems(policies: Any = None, secrets: Any = None, before: FileVersions = NO_VERSIONS) -> list[str]:
    with pytest.raises(AclFilesError) as caught:
        loaded(policies, secrets, before)
    assert HIDDEN not in str(caught.value)
    assert not any(HIDDEN in text for text in caught.value.problems)
    return caught.value.problems


@settings(max_examples=100)
@given(worlds(), st.booleans())
def test_what_was_written_is_read_again(world: tuple[PolicyDocument, list[Question]], observe: bool) -> None:
    state = AclState(filled(world[0]), 7, observe=observe)
    for number, name in enumerate(state.users):
        state.put_password(name, VERIFIER)
        state.put_key(name, f"key {number}", SecretKey(HIDDEN, disabled=bool(number % 2)))
    state.version += 1
    found = finish_now(load(*files_of(state), FileVersions(8, 8)))
    assert found.warnings == ()
    assert document_of(found.state.policies) == document_of(state.policies)
    assert (found.state.secrets, found.state.keys) == (state.secrets, state.keys)
    assert (found.state.version, found.state.observe, found.versions) == (8, observe, FileVersions(8, 8))
    for question in world[1]:
        assert found.state.policies.decide(question) == state.policies.decide(question)


def test_a_person_may_leave_out_what_martlet_notes() -> None:
    found = loaded({"users": {"alice": {}}}, {"users": {"alice": {"password": VERIFIER}}})
    assert found.state.secrets["alice"].password == VERIFIER
    assert found.versions == FileVersions()


def test_the_file_is_readable_by_people() -> None:
    rules = {"user:alice": {"custom": policy("allow get on topic:a", "deny get on topic:b"), "default": []}}
    quotas = {"user:alice": {"messages_in": 10, "refuses": True}, "user:bob": {}}
    policies, _ = files_of(loaded({"users": {"alice": {"groups": ["a", "b"]}}, "rules": rules, "quotas": quotas}).state)
    assert policies.decode() == (
        '{\n"version": 0,\n"observe": false,\n"users": {\n"alice": {"groups": ["a", "b"]}\n},\n"groups": {\n},\n'
        '"quotas": {\n"user:alice": {"messages_in": 10, "refuses": true},\n"user:bob": {}\n},\n'
        '"rules": {\n"user:alice": {\n  "custom": [\n'
        '    {"resource": "topic:a", "actions": ["get"], "decision": "allow"},\n'
        '    {"resource": "topic:b", "actions": ["get"], "decision": "deny"}\n  ]}\n}\n}\n'
    )


# what is wrong


@pytest.mark.parametrize(
    ("policies", "problem"),
    [
        ({"users": {"a\nb": {}}}, "user a\\nb: user 'a\\nb' has a control character in its name"),
        ({"users": {"": {}}}, "user : a user has an empty name"),
        ({"users": {"alice": {"group": "a"}}}, "user alice: Object contains unknown field `group`"),
        ({"users": {"alice": {"disabled": 1}}}, "user alice, disabled: Expected `bool`, got `int`"),
        ({"people": {}}, "Object contains unknown field `people`"),
        ({"groups": {"a": ["b"], "b": ["a"]}}, "group a: group 'a' is in itself: a in b in a"),
        (
            {"rules": {"user:alice": {"custom": policy("allow get on topic:a", "allow get on queue:b")}}},
            "rules of user alice, custom rule 2, resource: resource 'queue:b' has no kind; "
            "write one of topic, name, group, shared, cluster and a colon before the name",
        ),
        ({"rules": {"alice": {}}}, None),
    ],
)
def test_a_problem_is_said_with_its_place(policies: Any, problem: str | None) -> None:
    if problem is None:  # a subject without rules says nothing
        assert len(loaded(policies).state.policies) == 0
    else:
        assert problems(policies) == [f"config/acl.json: {problem}"]


def test_all_problems_are_said_up_to_a_limit() -> None:
    wrong = {"users": {f"user{number}": {"groups": 1} for number in range(PROBLEMS_MAX + 5)}, "groups": {"a": [""]}}
    said = problems(wrong, {"users": {"alice": {"password": HIDDEN}, "bob": {"keys": {"k": {"secret": "short"}}}}})
    assert len(said) == PROBLEMS_MAX + 1 + 2
    assert said[PROBLEMS_MAX] == "config/acl.json: there are 6 more problems"
    assert said[-2].startswith("config/acl.secrets: user alice, password: it is no verifier of a password")
    assert said[-1].startswith("config/acl.secrets: user bob, access key k: the secret has 5 characters")


@pytest.mark.parametrize(
    ("secrets", "problem"),
    [
        ({"alice": {"keys": {"": {"secret": HIDDEN}}}}, "user alice, access key : an access key has an empty name"),
        ({"alice": {"keys": {"k": {"secret": HIDDEN + "\n"}}}}, "access key k: the secret has a control character"),
        ({"alice": {"keys": {"k": {"secret": 5}}}}, "user alice, keys, secret: Expected `str`, got `int`"),
        ({"alice": {"keys": {"k": HIDDEN}}}, "user alice, keys: Expected `object`, got `str`"),
        (
            {"alice": {"keys": {str(number): {"secret": HIDDEN} for number in range(KEYS_MAX + 1)}}},
            f"there are {KEYS_MAX + 1} access keys; a user has {KEYS_MAX} at most",
        ),
        (
            {"alice": {"keys": {"k": {"secret": HIDDEN}}}, "bob": {"keys": {"k": {"secret": HIDDEN}}}},
            "user bob: user 'alice' has the access key 'k' already",
        ),
        (
            {"alice": {"keys": {"bob": {"secret": HIDDEN}}}},
            "user alice: access key 'bob' would have the name of another user",
        ),
    ],
)
def test_a_wrong_secret_is_said_without_it(secrets: Any, problem: str) -> None:
    (said,) = problems({"users": {"alice": {}, "bob": {}}}, {"users": secrets})
    assert said.startswith("config/acl.secrets: ")
    assert problem in said


def test_a_key_that_is_there_twice_is_refused() -> None:
    """JSON's parsers take the last one, and the rules of the first would be lost."""
    rule = '{"custom": [{"resource": "*", "actions": ["all"], "decision": "%s"}]}'
    policies = f'{{"rules": {{"everybody": {rule % "deny"}, "everybody": {rule % "allow"}}}}}'
    with pytest.raises(AclFilesError, match="the key 'everybody' is there twice"):
        finish_now(load(policies.encode(), b"{}", FileVersions()))
    with pytest.raises(AclFilesError, match="the key 'alice' is there twice"):
        finish_now(load(b"{}", b'{"users": {"alice": {}, "alice": {}}}', FileVersions()))


@settings(max_examples=200)
@given(st.data())
def test_damaged_files_are_refused_or_say_what_they_said(data: st.DataObject) -> None:
    state = AclState(version=3)
    for name in ("alice", "b/c"):
        state.policies.put_user(name, UserRecord())
        state.put_key(name, name, SecretKey(HIDDEN))
    files = list(files_of(state))
    which = data.draw(st.integers(0, 1))
    content = bytearray(files[which])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=3))
    files[which] = bytes(content)
    said: list[str] = []
    try:
        finish_now(load(files[0], files[1], FileVersions()))
    except AclFilesError as error:
        said = error.problems
    assert not any(HIDDEN in text for text in said)


def test_ten_thousand_rules_of_a_user_are_loaded_and_one_more_is_refused() -> None:
    rules = policy(*(f"allow get on topic:t{number}" for number in range(10_000)))
    assert len(loaded({"rules": {"user:alice": {"custom": rules}}}).state.policies) == 10_000
    rules += policy("allow get on topic:t")
    (said,) = problems({"rules": {"user:alice": {"custom": rules}}})
    assert said == "config/acl.json: rules of user alice, custom rule 10001: there would be more than 10000 rules"


# one file is older, or missing


def test_after_a_crash_between_the_files_both_are_used() -> None:
    state = AclState(version=4)
    state.policies.put_user("alice", UserRecord())
    state.put_key("alice", "old", SecretKey(HIDDEN))
    policies, _ = files_of(state)
    state.version = 5
    state.put_key("alice", "new", SecretKey(HIDDEN))
    _, secrets = files_of(state)
    found = newest(policies, secrets)
    assert (found.versions, found.state.version) == (FileVersions(4, 5), 5)
    assert set(found.state.keys) == {"old", "new"}


def newest(policies: bytes | None, secrets: bytes | None) -> LoadedFiles:
    files = {"config/acl.json": policies, "config/acl.secrets": secrets}
    return load_newest(lambda name: [each for each in (files[name],) if each is not None])


def version(content: bytes, number: int) -> bytes:
    """Return *content* with another version."""
    return json.dumps({**json.loads(content), "version": number}).encode()


def test_rules_older_than_the_secrets_are_refused() -> None:
    policies, secrets = files_of(AclState(version=9))
    newest(version(policies, 8), secrets)
    with pytest.raises(AclFilesError, match=r"acl.json is of version 7, but version 8 has been in use: it may allow"):
        newest(version(policies, 7), secrets)
    newest(b"{}", secrets)  # of a person, who knows


def test_secrets_older_than_the_rules_do_not_count() -> None:
    state = AclState(version=4)
    for name in ("alice", "bob"):
        state.policies.put_user(name, UserRecord())
        state.put_key(name, name, SecretKey(HIDDEN))
    state.version = 5
    _, old = files_of(state)
    state.version = 6
    state.remove_key("alice")
    state.version = 7
    found = newest(files_of(state)[0], old)
    assert set(found.state.keys) == {"bob"}
    assert found.warnings == (
        "config/acl.secrets is older than config/acl.json: passwords and keys of 'alice' do not count; set them again",
    )


def test_old_secrets_of_a_user_who_was_made_again_do_not_count() -> None:
    state = AclState(version=4)
    state.policies.put_user("alice", UserRecord())
    state.put_key("alice", "alice", SecretKey(HIDDEN))
    state.version = 5
    _, old = files_of(state)
    state.remove_user("alice")
    state.version = 6
    state.policies.put_user("alice", UserRecord())
    state.put_password("alice", VERIFIER)
    state.version = 7
    found = newest(files_of(state)[0], old)
    assert "alice" in found.state.users
    assert not found.state.secrets


def test_secrets_of_users_who_are_gone_are_ignored() -> None:
    assert loaded({}, {"users": {"alice": {"keys": {"a": {"secret": HIDDEN}}}}}).state.secrets == {}


def test_a_missing_file_is_said() -> None:
    policies, secrets = files_of(AclState(version=1))
    with pytest.raises(AclFilesError, match=r"acl.json is missing; run `martlet acl init`"):
        newest(None, secrets)
    with pytest.raises(AclFilesError, match=r"acl.secrets is missing, so no user could log in"):
        newest(policies, None)
    newest(b'{"users": {"alice": {}}}', None)  # of a person; alice has a certificate


def test_an_edited_file_must_not_be_older_than_what_is_in_use() -> None:
    policies, secrets = files_of(AclState(version=9))
    finish_now(load(policies, secrets, FileVersions(9, 9)))
    with pytest.raises(AclFilesError, match=r"acl.json is of version 8, but version 9 has been in use"):
        finish_now(load(version(policies, 8), secrets, FileVersions(9, 9)))
    with pytest.raises(AclFilesError, match=r"acl.secrets is of version 8, .* keys that were removed"):
        finish_now(load(policies, version(secrets, 8), FileVersions(9, 9)))


def test_the_previous_generation_is_used_if_the_newest_has_errors() -> None:
    policies, secrets = files_of(AclState(version=9))
    generations = {"config/acl.json": [b"{", policies], "config/acl.secrets": [secrets[:-9], secrets[:-8], secrets]}
    found = load_newest(generations.__getitem__)
    assert found.rejected == ("config/acl.json", "config/acl.secrets")
    assert found.warnings[0].startswith("config/acl.json: ")
    assert found.warnings[1] == ("config/acl.json has errors; using its previous generation until they are corrected")
    with pytest.raises(AclFilesError, match=r"config/acl.json: Input data was truncated"):
        load_newest({**generations, "config/acl.json": [b"{", b"["]}.__getitem__)


def test_records_of_secrets_do_not_show_them() -> None:
    secrets = UserSecrets(3, VERIFIER, {"k": SecretKey(HIDDEN, disabled=True)})
    state = AclState()
    state.policies.put_user("alice", UserRecord())
    state.put_secrets("alice", secrets)
    for shown in (repr(secrets), repr(secrets.keys), repr(state.secrets), repr(loaded({}, {"users": {}}))):
        assert HIDDEN not in shown
        assert VERIFIER not in shown


def test_an_identity_of_a_loaded_user_is_decided_by_his_rules() -> None:
    rules = {"user:alice": {"default": policy("allow get on topic:a")}}
    policies = loaded({"users": {"alice": {}}, "rules": rules}).state.policies
    verdict = policies.decide(Question(Identity("alice"), "get", "topic", "a"))
    assert verdict is not None
    assert verdict.allowed
