"""State of consumers: members, subscriptions, long polls, pops, rates."""
