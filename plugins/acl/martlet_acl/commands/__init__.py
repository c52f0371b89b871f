"""The commands ``martlet acl ...``, through the socket of a broker or on the files of one that does not run."""
