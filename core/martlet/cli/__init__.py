"""The ``martlet`` command: its parser and its subcommands."""
