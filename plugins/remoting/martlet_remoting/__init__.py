"""RocketMQ remoting for Martlet: broker protocol, name server, client."""
