"""Shapes are remembered for subscribers, within bounds."""

from martlet_mqtt.mapping.frames import GRANTS_KEPT, SHAPES_KEPT, Grant, Shapes
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.packets import FilterSubscription


def grants_of(first: int, count: int) -> tuple[Grant, ...]:
    return tuple(Grant(FilterSubscription("#", 1), number) for number in range(first, first + count))


def test_equal_subscriptions_share_a_shape() -> None:
    shapes = Shapes()
    assert shapes.of(V5, grants_of(1, 2)) is shapes.of(V5, grants_of(1, 2))
    assert len(shapes) == len(shapes.encodings) == 1


def test_what_is_remembered_is_bounded_by_number_and_by_subscriptions() -> None:
    shapes = Shapes()
    for number in range(2 * SHAPES_KEPT):
        shapes.of(V5, grants_of(number, 1))
        assert len(shapes) <= SHAPES_KEPT
    many = Shapes()
    for number in range(250):
        many.of(V5, grants_of(number, 1000))
        assert len(many) <= GRANTS_KEPT // 1000
        assert len(many.encodings) <= len(many)
    assert many.of(V5, grants_of(249, 1000)).identifiers
