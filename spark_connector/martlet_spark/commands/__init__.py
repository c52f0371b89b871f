"""Subcommands of ``martlet`` that run data pipelines in Spark."""

from martlet.contracts import Subcommand
from martlet_spark.commands import pipeline

__all__ = ["COMMANDS"]

COMMANDS: tuple[Subcommand, ...] = (pipeline.COMMAND,)
