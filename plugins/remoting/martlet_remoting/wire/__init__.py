"""Commands of RocketMQ's remoting protocol and their bytes; needs no event loop, and clients and Spark use it too."""
