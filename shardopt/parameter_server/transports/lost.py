"""Processes that were killed, and nobody to go on."""


class ServerLostError(RuntimeError):
    """The process of the server was killed, and there is nothing to go on from."""


class WorkersLostError(RuntimeError):
    """Every worker was killed."""
