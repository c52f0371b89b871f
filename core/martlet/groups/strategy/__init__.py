"""Rules of a group: its policy, how members are chosen, and when a message comes again."""
