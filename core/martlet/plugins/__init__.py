"""Plugins: the hooks that they may override (`hooks`) and their loading (`loader`)."""
