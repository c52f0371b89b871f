"""The kernel finds the usual sends that Python finds, makes the same messages of them, and answers alike."""

import json
import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.access import Signer
from martlet.contracts import Identity, SigningSecret
from martlet.records.codec import tags_code
from martlet.store.format.tags import TagCodes
from martlet.store.queues.queues import Queue
from martlet_remoting.shared.templates import Templates, usual_items
from martlet_remoting.wire.codec import encode_binary_command
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.sends import Send, scan_sends, scan_signed_sends, sent_answers
from martlet_remoting.wire.signatures import SigningKey

FIELDS = {"a": "g", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1732000000000", "h": "0"}
FIELDS |= {"i": "UNIQ_KEY\x017F00\x02TAGS\x01a\x02", "j": "0", "k": "false", "l": "16", "m": "false", "n": "broker"}
NUMBERS = st.sampled_from(
    ["0", "1", "-1", "007", "-0", "", " 1", "1.0", "9" * 18, "9" * 19, "9" * 30, "x", 0, 3, -5, True]
)
WORDS = st.sampled_from(["", "T", "%RETRY%g", "Ä☃😀", 'a"b', "a\\b", "a\tb", "\ud800", 5, None, "x" * 300])
PROPERTIES = st.sampled_from(
    [
        "",
        "UNIQ_KEY\x01",
        "UNIQ_KEY\x01a b",
        "UNIQ_KEY\x01Ä",
        "xUNIQ_KEY\x01A1\x02",
        "K\x01UNIQ_KEY\x01A1",
        "A\x01b\x02UNIQ_KEY\x01A1",
    ]
)
STRANGE: st.SearchStrategy[object] = st.sampled_from(["true", "TRUE", True, False, "1", 0, "no", None, [], {"a": 1}])
CHANGES = st.one_of(
    st.tuples(st.sampled_from("defghjl"), NUMBERS),
    st.tuples(st.sampled_from("abcin"), WORDS),
    st.tuples(st.just("i"), PROPERTIES),
    st.tuples(st.sampled_from("kmbe"), STRANGE),
    st.tuples(st.sampled_from(["AccessKey", "z", "o", "", "é"]), st.sampled_from(["", "key", 1, None])),
)
OUTER = st.one_of(
    st.tuples(st.sampled_from(["flag", "opaque", "version", "code"]), NUMBERS),
    st.tuples(st.sampled_from(["language", "remark", "serializeTypeCurrentRPC", "else"]), WORDS),
)


def header_of(
    changes: Sequence[tuple[str, object]], outer: Sequence[tuple[str, object]], missing: str, style: int
) -> bytes:
    fields: dict[str, object] = {name: value for name, value in FIELDS.items() if name != missing}
    fields.update(changes)
    whole = {
        "code": 310,
        "extFields": fields,
        "flag": 0,
        "language": "JAVA",
        "opaque": 7,
        "version": 401,
        **dict(outer),
    }
    separators = (", ", ": ") if style == 1 else (",", ":")
    return json.dumps(whole, ensure_ascii=style != 2, separators=separators).encode("utf-8", "surrogatepass")


def frame_of(header: bytes, body: bytes, encoding: int = 0) -> bytes:
    return (4 + len(header) + len(body)).to_bytes(4) + bytes((encoding,)) + len(header).to_bytes(3) + header + body


def binary_header_of(
    changes: Sequence[tuple[str, object]], outer: Sequence[tuple[str, object]], missing: str, code: int
) -> bytes:
    """As `header_of`, in binary; *changes* may repeat fields."""
    fields: list[tuple[str, object]] = [each for each in FIELDS.items() if each[0] != missing]
    parts = b""
    for name, value in [*fields, *changes]:
        key, text = (str(each).encode("utf-8", "surrogatepass") for each in (name, "" if value is None else value))
        parts += len(key).to_bytes(2) + key + len(text).to_bytes(4) + text
    remark = "".join(str(value) for name, value in outer if name == "remark").encode("utf-8", "surrogatepass")
    head = struct.pack(">hbhiii", code, 12, 401, 7, 0, len(remark)) + remark
    return head + len(parts).to_bytes(4) + parts


BINARY_HEADERS = st.one_of(
    st.builds(
        binary_header_of,
        st.lists(CHANGES, max_size=2),
        st.lists(OUTER, max_size=1),
        st.sampled_from(["", "", "a", "b", "e", "i", "m"]),
        st.sampled_from([310, 310, 310, 10]),
    ),
    st.builds(binary_header_of, st.just(()), st.just(()), st.just(""), st.just(310)),
)
HEADERS = st.one_of(
    st.builds(
        header_of,
        st.lists(CHANGES, max_size=2),
        st.lists(OUTER, max_size=1),
        st.sampled_from(["", "", "a", "b", "e", "i", "m"]),
        st.sampled_from([0, 0, 0, 1, 2]),
    ),
    st.builds(header_of, st.just(()), st.just(()), st.just(""), st.just(0)),
)
# A byte of a header that is changed, left out or doubled.
DAMAGE = st.tuples(
    st.integers(0, 400), st.sampled_from([b"", b"\\", b'"', b",", b"0", b"}", b"\x00", b"\xff", b" ", b"\\u0041"])
)
DAMAGED = st.tuples(st.one_of(HEADERS, BINARY_HEADERS), DAMAGE).map(
    lambda pair: pair[0][: pair[1][0]] + pair[1][1] + pair[0][pair[1][0] + 1 :]
)
BODIES = st.sampled_from([b"body", b"body", b"x" * 300, b"", b"x" * 3000])
FRAMES = st.one_of(
    st.builds(frame_of, st.one_of(HEADERS, HEADERS, DAMAGED), BODIES, st.sampled_from([0, 0, 0, 0, 1])),
    st.builds(frame_of, st.one_of(BINARY_HEADERS, BINARY_HEADERS, DAMAGED), BODIES, st.sampled_from([1, 1, 1, 0, 2])),
)


@given(st.lists(FRAMES, max_size=5), st.integers(0, 30), st.integers(1, 6))
def test_the_kernel_finds_no_send_that_python_does_not_find(frames: list[bytes], cut: int, count_max: int) -> None:
    data = b"".join(frames)
    data = data[: len(data) - cut]
    python, _ = scan_sends(data, 0, count_max, 2000, 1000)
    sends, end = kernel_of(scan_sends)(data, 0, count_max, 2000, 1000)
    assert sends == python[: len(sends)]
    assert end == (sends[-1][-1] if sends else 0)
    assert [[type(each) for each in send] for send in sends] == [
        [type(each) for each in send] for send in python[: len(sends)]
    ]


LANGUAGES = ["JAVA", "GO", "CPP", "PYTHON", 12]
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters='\\"', min_codepoint=32), max_size=20)


@given(
    st.lists(st.tuples(PLAIN, st.integers(0, 1 << 40), st.sampled_from([0, 2]), st.booleans(), PLAIN), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_the_kernel_finds_the_sends_of_usual_clients(
    sends: list[tuple[str, int, int, bool, str]], are_quoted: bool, is_binary: bool
) -> None:
    frames = []
    for topic, number, flag, has_flag, tag in sends:
        changes: dict[str, object] = {
            "b": topic or "T",
            "e": number if are_quoted is False else str(number),
            "h": str(number % 99),
        }
        changes["i"] = f"TAGS\x01{tag}\x02UNIQ_KEY\x01AB{number}" + "\x02" * has_flag
        outer = [("flag", flag), ("opaque", number % 1000)]
        header = header_of([*changes.items()], outer, "", 2)
        if is_binary:
            ext = {**FIELDS, **{name: str(value) for name, value in changes.items()}}
            header = encode_binary_command(Command(310, ext, opaque=number % 1000, flag=flag))[8:]
        frames.append(frame_of(header, b"x" * (number % 50 + 1), is_binary))
    data = b"".join(frames)
    python, kernel = scan_sends(data, 0, 64, 1 << 16, 1 << 16), kernel_of(scan_sends)(data, 0, 64, 1 << 16, 1 << 16)
    assert kernel == python
    assert len(python[0]) == len(sends)


class SomeTopic:
    """A topic with three open queues, of which one was used."""

    def __init__(self) -> None:
        self.name, self.open_queues = "T", 3
        self.queues = {1: Queue("T", 1)}
        self.made: list[int] = []

    def queue(self, queue_id: int) -> Queue:
        self.made.append(queue_id)
        return self.queues.setdefault(queue_id, Queue("T", queue_id))


WORDS_OF_PROPERTIES = [b"UNIQ_KEY\x01A\x02", b"TAGS\x01", b"b", "Ä☃".encode(), b"\x02", b"DELAY\x013\x02"]
SENDS = st.tuples(
    st.sampled_from(["T", "T", "T", "T", "U"]),
    st.sampled_from([0, 1, 1, 2, 2, 3, -1, 1 << 40]),
    st.binary(min_size=1, max_size=21),
    st.one_of(st.lists(st.sampled_from(WORDS_OF_PROPERTIES), min_size=1).map(b"".join), st.just(b"TAGS\x01\xff\x02")),
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.sampled_from([0, 0, 0, 1, 4, 8, 1 << 40, -1]),
    st.integers(0, 1 << 60),
    st.sampled_from([b"A", b"7F" * 16]),
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.sampled_from([0, 0, 2, 1]),
    st.integers(0, 1 << 20),
)


def made(function: Any, sends: Sequence[Send], done: int, room: int, words: tuple[bytes, ...]) -> list[object]:
    """Return everything that *function* has done with *sends*."""
    topic: Any = SomeTopic()
    run: list[Any] = [None] * min(done, len(sends))
    stamp = b"CLUSTER\x01c\x02"
    left = function(sends, run, room, ~0x701, words, topic, b"\x7f\0\0\1\0\0\0\1", stamp, 20, TagCodes().of)
    return [left, [each and (each[0].queue_id, *each[1:]) for each in run], topic.made]


@given(st.lists(SENDS, max_size=6), st.integers(0, 2), st.integers(-1, 400), st.sampled_from([(), (b"DELAY", b"XYZ")]))
def test_the_kernel_makes_the_items_that_python_makes(
    sends: list[Send], done: int, room: int, words: tuple[bytes, ...]
) -> None:
    assert made(kernel_of(usual_items), sends, done, room, words) == made(usual_items, sends, done, room, words)


def test_the_kernel_takes_properties_up_to_the_limit() -> None:
    for size in range(32_767 - 25, 32_767 - 5):
        send = ("T", 1, b"x", b"UNIQ_KEY\x01".ljust(size, b"A"), 0, 0, 0, b"A", 0, 0, 0)
        python = made(usual_items, [send], 0, 1 << 20, ())
        assert made(kernel_of(usual_items), [send], 0, 1 << 20, ()) == python


@given(
    st.lists(SENDS, max_size=4),
    st.lists(st.integers(-1, 1 << 62), min_size=4, max_size=4),
    st.sampled_from(["DefaultRegion", "100%", "%s%d", 'a"b']),
)
def test_the_kernel_answers_as_python_answers(sends: list[Send], numbers: list[int], region: str) -> None:
    template = Templates(b"\x7f\0\0\1\0\0\x2a\x9f", "c", region, {}, trace=True).sent_usual
    python = sent_answers(template, sends, numbers, numbers[::-1])
    assert kernel_of(sent_answers)(template, sends, numbers, numbers[::-1]) == python


def test_tag_codes_are_javas() -> None:
    for tag in ("", "a", "TagA", "Ä☃😀", "x" * 300):
        run: list[Any] = []
        topic: Any = SomeTopic()
        send = ("T", 1, b"x", b"TAGS\x01" + tag.encode(), 0, 0, 0, b"A", 0, 0, 0)
        kernel_of(usual_items)([send], run, 400, 0, (), topic, b"\0" * 8, b"", 20, TagCodes().of)
        assert run[0][3] == tags_code(tag)


SIGNED_FIELDS = st.builds(
    lambda topic, number, tag: {**FIELDS, "b": topic, "e": str(number), "i": f"UNIQ_KEY\x01A\x02TAGS\x01{tag}\x02"},
    st.sampled_from(["T", "a topic"]),
    st.integers(0, 9),
    st.text(st.sampled_from("ab\n"), max_size=4),
)
SECRETS = ["a secret", "another", "x" * 90]


@given(
    st.lists(st.tuples(SIGNED_FIELDS, st.sampled_from([b"body", b"x" * 300]), st.integers(0, 5)), max_size=5),
    st.sampled_from(SECRETS),
)
def test_the_kernel_verifies_the_signatures_that_python_verifies(
    sends: list[tuple[dict[str, object], bytes, int]], secret: str
) -> None:
    key, frames = SigningKey("ann", secret), list[bytes]()
    for fields, body, fault in sends:
        ext = (SigningKey("bob", secret) if fault == 1 else key).sign(310, fields, body)
        if fault == 2:
            ext["Signature"] = str(ext["Signature"])[::-1]
        if fault == 3:
            ext["SecurityToken"] = ""
        header = json.dumps({"code": 310, "extFields": ext, "opaque": 7}, separators=(",", ":")).encode()
        frames.append(frame_of(header, body if fault != 4 else body + b"!"))
    signer = Signer(SigningSecret(Identity("ann"), secret.encode()))
    data = b"".join(frames)
    python = scan_signed_sends(data, 0, 64, 1 << 16, 1 << 16, "ann", signer)
    kernel = kernel_of(scan_signed_sends)(data, 0, 64, 1 << 16, 1 << 16, "ann", signer)
    usual = [fault in (0, 5) for _, _, fault in sends]
    assert len(kernel[0]) == (usual.index(False) if False in usual else len(usual))
    assert kernel[0] == python[0][: len(kernel[0])]
