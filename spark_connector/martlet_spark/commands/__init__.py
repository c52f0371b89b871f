"""Subcommands of ``martlet`` that run data pipelines in Spark."""

from martlet.contracts import Command

from . import pipeline

__all__ = ["COMMANDS"]

COMMANDS: tuple[Command, ...] = (pipeline.COMMAND,)
