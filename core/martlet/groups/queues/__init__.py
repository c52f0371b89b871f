"""The queues of a shared group: where each is, what is free in it, and who waits for it."""
