"""Plugins: what they may override (`hooks`) and how they are loaded (`loader`)."""
