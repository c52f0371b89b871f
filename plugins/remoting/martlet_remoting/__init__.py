"""RocketMQ remoting for Martlet: broker protocol and name server."""
