"""SCRAM-SHA-256 as RFC 5802 and RFC 7677 have it."""

import secrets
from base64 import b64decode
from pathlib import Path

import pytest

from martlet.contracts import Challenge, Exchange, Identity, Proved
from martlet.errors import ConfigError, Reason, Refused
from martlet_users import UsersConfig, UsersPlugin, read_users
from martlet_users.scram import ScramSecret, begin_scram, make_secret, prepare, read_secret

# The example of RFC 7677 section 3.
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
CHALLENGE = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
PROOF = b"dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=" + PROOF
VERIFIER = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
SECRET = make_secret("pencil", b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)


@pytest.fixture(autouse=True)
def nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: NONCE)


def begin(**users: ScramSecret) -> Exchange:
    return begin_scram((users or {"user": SECRET}).get, b"pepper")


def refused(exchange: Exchange, data: bytes) -> str:
    with pytest.raises(Refused) as caught:
        exchange(data)
    assert caught.value.reason is Reason.CREDENTIALS
    return str(caught.value)


def test_the_example_of_the_specification() -> None:
    exchange = begin()
    assert exchange(FIRST) == Challenge(CHALLENGE)
    assert exchange(FINAL) == Proved(Identity("user"), VERIFIER)


def test_a_client_that_lets_the_broker_begin_is_asked_for_its_first_message() -> None:
    exchange = begin()
    assert exchange(b"") == Challenge(b"")
    assert exchange(FIRST) == Challenge(CHALLENGE)
    assert isinstance(exchange(FINAL), Proved)


@pytest.mark.parametrize(
    "final",
    [
        FINAL.replace(b"dHzb", b"dHzc"),
        FINAL.replace(b"r=rO", b"r=rP"),
        FINAL.replace(b"biws", b"eSws"),  # the header was changed on the way
        FINAL.replace(b"c=biws,", b"c=biws,,"),
        FINAL[:-4],
        FINAL + b"A",
        FINAL.replace(PROOF, b""),
        FINAL.replace(PROOF, PROOF + PROOF),
        b"p=" + PROOF,
        b"",
        b"\xff",
        FIRST,
    ],
)
def test_a_wrong_proof_is_refused(final: bytes) -> None:
    exchange = begin()
    exchange(FIRST)
    refused(exchange, final)


@pytest.mark.parametrize(
    "first",
    [
        b"p=tls-unique,,n=user,r=x",
        b"n,,n=user",
        b"n,,n=user,r=",
        b"n,,m=extension,n=user,r=x",
        b"n,,n=us=er,r=x",
        b"n,,n=us\x01er,r=x",
        b"n,a=admin,n=user,r=x",
        b"n,admin,n=user,r=x",
        b"user",
        b"\xff",
        b"n,,n=user,r=" + b"x" * 5000,
    ],
)
def test_a_wrong_first_message_is_refused(first: bytes) -> None:
    refused(begin(), first)


def test_somebody_who_does_not_exist_is_not_told_apart_before_the_proof() -> None:
    answers = []
    for _ in range(2):
        exchange = begin()
        answer = exchange(FIRST.replace(b"n=user", b"n=nobody"))
        assert isinstance(answer, Challenge)
        answers.append(answer.data)
        assert refused(exchange, FINAL) == "user 'nobody' or the password is wrong"
    assert answers[0] == answers[1], "the salt of a user is always the same"
    other = begin()(FIRST.replace(b"n=user", b"n=noone"))
    assert isinstance(other, Challenge)
    salts = [dict(field.split(b"=", 1) for field in data.split(b","))[b"s"] for data in (answers[0], other.data)]
    assert salts[0] != salts[1]
    assert all(len(b64decode(salt)) == len(SECRET.salt) for salt in salts)


def test_a_client_may_say_for_whom_it_acts_if_that_is_itself() -> None:
    exchange = begin(**{"a,b=c": SECRET})
    assert isinstance(exchange(b"n,a=a=2Cb=3Dc,n=a=2Cb=3Dc,r=x"), Challenge)


def test_names_and_passwords_are_prepared() -> None:
    # The examples of RFC 4013 section 3.
    assert prepare("I\u00adX") == "IX"
    assert prepare("user") == "user"
    assert prepare("USER") == "USER"
    assert prepare("\u00aa") == "a"
    assert prepare("\u2168") == "IX"
    assert prepare("a\u00a0b") == "a b"
    for wrong in ("\u0007", "\u0627\u0031", "\u0627a\u0627"):
        with pytest.raises(ValueError, match=r"contains|mixes"):
            prepare(wrong)
    assert make_secret("\u2168", b"salt") == make_secret("IX", b"salt")


def test_the_secret_in_the_file_is_read_as_it_was_printed(tmp_path: Path) -> None:
    assert read_secret(str(SECRET)) == SECRET
    path = tmp_path / "users.toml"
    path.write_text(f'[users.user]\nscram = "{SECRET}"')
    assert read_users(str(path))["user"].scram == SECRET
    broker: object = None
    begin_one = UsersPlugin(UsersConfig(str(path))).martlet_mechanisms(broker)["SCRAM-SHA-256"]  # type: ignore[arg-type]
    exchange = begin_one()
    assert exchange(FIRST) == Challenge(CHALLENGE)
    assert exchange(FINAL) == Proved(Identity("user"), VERIFIER)


@pytest.mark.parametrize(
    "secret",
    [
        "open sesame",
        str(SECRET).replace("4096", "1000"),
        str(SECRET).replace("SHA-256", "SHA-1"),
        str(SECRET).replace("=", ""),
        str(SECRET)[:-8],
        "SCRAM-SHA-256$4096:$AAAA:AAAA",
    ],
)
def test_a_secret_that_is_none_is_told(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "users.toml"
    path.write_text(f'[users.user]\nscram = "{secret}"')
    with pytest.raises(ConfigError, match=r"user 'user' .* scram secret that is none; make one with martlet hash-pass"):
        read_users(str(path))
