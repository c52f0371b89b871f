"""The plugin: offers the filter language SQL92."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from martlet.config import Settings, setting
from martlet.contracts import Compile, Condition
from martlet.plugins.hooks import Hooks
from martlet_filter_sql92.compiler import compile_tree, cost_of
from martlet_filter_sql92.needles import compile_needle
from martlet_filter_sql92.parser import ExpressionLimits, parse

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["Sql92Config", "Sql92Plugin"]


class Sql92Config(Settings):
    """Limits on the size of an expression."""

    text_bytes_max: int = setting(4096, "length of one expression, in UTF-8", unit="bytes", low=1, high=16_384)
    depth_max: int = setting(64, "nesting of one expression: parentheses, NOT and signs", unit="levels", low=1, high=64)
    nodes_max: int = setting(
        256, "operators and operands of one expression; each costs time for each message", low=1, high=1024
    )


class Sql92Plugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = Sql92Config
    config: Sql92Config

    def martlet_filters(self, broker: "Broker") -> Mapping[str, Compile]:
        return {"SQL92": self.compile}

    def compile(self, text: str) -> Condition:
        """Return the predicate of records that fulfil the condition *text*.

        Raises:
          Refused: *text* is no condition, or too large; the message points at the character (Reason.ILLEGAL).
        """
        limits = ExpressionLimits(self.config.text_bytes_max, self.config.depth_max, self.config.nodes_max)
        tree, steps = parse(text, limits), [0]
        truth = compile_tree(tree, steps)
        return Condition(lambda record: truth(record) is True, cost_of(tree), compile_needle(tree, steps), steps)
