"""Commands of RocketMQ's remoting protocol and their bytes; without an event loop, so clients and Spark use it too."""
