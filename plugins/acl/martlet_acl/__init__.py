"""Access control: users, groups of users, and rules for what they may do."""
