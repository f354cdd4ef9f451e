"""What jax compiles while something runs, as it announces it."""

import contextlib
import logging


@contextlib.contextmanager
def compilations():
    """Give the list of programs that are compiled meanwhile."""
    logger = logging.getLogger("jax._src.interpreters.pxla")
    handler = logging.Handler()
    messages = []
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
