"""Rules of a group: its policy, messages that stay with one member, and when a message comes again."""
