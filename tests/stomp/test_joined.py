"""Frames are joined once for subscribers that get the same bytes."""

from martlet_stomp.mapping.joined import DELIVERIES_KEPT, JoinedFrames


def test_the_next_subscriber_with_the_same_head_gets_the_same_bytes() -> None:
    joined, rests = JoinedFrames(), [b"1-1\n\na\0", b"1-2\n\nb\0"]
    assert joined.find(b"MESSAGE\n", rests) is None
    data = joined.join(b"MESSAGE\n", rests)
    assert data == b"1-1\n\na\0MESSAGE\n1-2\n\nb\0"
    assert joined.find(b"MESSAGE\n", rests[:]) is data


def test_a_subscriber_with_another_head_or_other_messages_does_not() -> None:
    joined, rests = JoinedFrames(), [b"1-1\n\na\0", b"1-2\n\nb\0", b"1-3\n\nc\0"]
    joined.join(b"MESSAGE\n", rests)
    assert joined.find(b"MESSAGE\nsubscription:1\n", rests) is None
    assert joined.find(b"MESSAGE\n", rests[:2]) is None
    assert joined.find(b"MESSAGE\n", [rests[0], b"1-4\n\nd\0", rests[2]]) is None


def test_few_deliveries_are_kept() -> None:
    joined, deliveries = JoinedFrames(), [[b"1-%d\n\n\0" % number] * 2 for number in range(DELIVERIES_KEPT + 1)]
    for rests in deliveries:
        joined.join(b"MESSAGE\n", rests)
    found = [joined.find(b"MESSAGE\n", rests) for rests in deliveries]
    assert found == [None, *[b"MESSAGE\n".join(rests) for rests in deliveries[1:]]]
