"""What each request means to the broker, by subject; every module has its table of request codes."""
