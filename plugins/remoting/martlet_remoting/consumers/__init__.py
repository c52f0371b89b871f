"""What the broker knows of consumers: members, subscriptions, long polls, pops, rates."""
