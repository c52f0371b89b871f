"""Rules of a group: its policy, messages that stay with one member, and the time of a redelivery."""
