"""Fakes and small set-ups for tests, of Martlet's own and of plugin authors; imports nothing by itself."""
