"""The queues of a shared group: the group's place in each, its messages, and the members that wait for them."""
