"""A pure-Python RocketMQ client over the remoting protocol, for Martlet and for RocketMQ 4.x and 5.x.

This package is for trio; `martlet_remoting.client.aio` has the same for asyncio and
`martlet_remoting.client.blocking` for plain synchronous code.
"""
