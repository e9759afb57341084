"""Leaves out what a library imports only for features that are not used here.

Such imports are most of what some libraries weigh: uvicorn brings its own command line and process supervisor, the
Prometheus client four kinds of web server and client, aioquic a second OpenSSL binding for a check that we replace.
``absent`` puts empty modules in their place for the time of the import. Whatever is used all the same says so at once.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NoReturn


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """While this lasts, importing a module of ``names`` gives an empty stand-in, unless the real one is loaded already.

    A stand-in has every attribute: a class that can be inherited from, but neither made nor called (``RuntimeError``).
    Afterwards the names import the real modules again. Not for two threads at once.
    """
    stand_ins = {name: StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]


class StandIn(ModuleType):
    """See ``absent``."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__module__": self.__name__, "__init__": _refuse})
        setattr(self, name, found)
        return found


def _refuse(self: object, *_arguments: object, **_named: object) -> NoReturn:
    kind = type(self)
    raise RuntimeError(f"{kind.__module__}.{kind.__qualname__} was left out when this library was imported")
