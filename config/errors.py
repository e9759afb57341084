"""The root of the error tree and its one leaf that this room raises; the whole tree is drawn in ``protocol.errors``."""


class StagemeshError(Exception):
    """Base of everything a person or peer can cause. ``str(error)`` is one line without a traceback."""

    exit_code = 1


class ConfigurationError(StagemeshError):
    """A setting is wrong; nothing was started. Names the file (with line), the key, what is wrong and what to do."""

    exit_code = 2


def fault(sentence: str) -> ConfigurationError:
    """The error for ``sentence``, kept to one line of printable text whatever a file managed to put into it."""
    line = " ".join(sentence.split())
    return ConfigurationError("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line))
