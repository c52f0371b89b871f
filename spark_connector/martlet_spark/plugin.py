"""The plugin: adds the commands of the data pipelines, ``martlet pipeline``; does nothing in a broker."""

from collections.abc import Sequence

from martlet.contracts import Subcommand
from martlet.plugins.hooks import Hooks
from martlet_spark.commands import COMMANDS

__all__ = ["SparkPlugin"]


class SparkPlugin(Hooks):
    """Offers the commands that need Spark; PySpark is imported when one of them runs."""

    def martlet_commands(self) -> Sequence[Subcommand]:
        return COMMANDS
