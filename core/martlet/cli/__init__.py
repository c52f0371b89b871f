"""The ``martlet`` command: its parser, its subcommands, and the pages that are generated from them."""
