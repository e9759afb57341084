"""A daemon's imports: modules without their documentation, which it never shows, and pydantic without plugins.

``python -OO`` would leave out the asserts as well, which are this project's invariants, and needs compiled files of its
own. Here every module is loaded as usual, from the same compiled files, and what only documents is let go of before the
module runs (functions) or right after (modules and classes).
"""

import contextlib
import operator
import sys
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from opcode import opmap
from types import CodeType, ModuleType

from config.absent import StandIn, absent

_FIRST_CONSTANT = [bytes((opmap[name], 0)) for name in ("LOAD_CONST", "RETURN_CONST") if name in opmap]
KNOWN = sys.stdlib_module_names | {
    "config", "protocol", "coordinator", "stage_agent",
    "aioquic", "annotated_types", "anyio", "cryptography", "h11", "msgpack", "prometheus_client", "psutil", "pydantic",
    "pydantic_core", "starlette", "structlog", "typing_extensions", "typing_inspection", "uvicorn", "uvloop",
}  # fmt: skip
"""What may be without. Everything else stays as it is: numpy makes documentation from documentation when imported."""

_FUNCTION = 0x3
"""``CO_OPTIMIZED | CO_NEWLOCALS``: what has a docstring of its own, as its first constant."""


def import_lean() -> None:
    """From now on modules are imported without documentation. Before the first import of what is large."""
    hook = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (LeanLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
    _pydantic_without_plugins()


def _pydantic_without_plugins() -> None:
    """The first model asks all installed distributions for plugins, and never again: it is told that there is none."""
    with absent("importlib.metadata"):
        metadata = sys.modules["importlib.metadata"]
        if isinstance(metadata, StandIn):
            vars(metadata)["entry_points"] = _none
            import pydantic

            pydantic.create_model("First")


def _none(**_named: object) -> tuple[()]:
    return ()


class LeanLoader(SourceFileLoader):
    """See the module."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code without what documents its functions."""
        code = super().get_code(fullname)
        return code if code is None or not _is_known(fullname) else without_docstrings(code)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module; it and its classes forget their documentation."""
        super().exec_module(module)
        if not _is_known(module.__name__):
            return
        module.__doc__ = None
        for found in list(vars(module).values()):
            if isinstance(found, type) and found.__module__ == module.__name__ and found.__dict__.get("__doc__"):
                with contextlib.suppress(AttributeError, TypeError):  # classes that let nobody change them
                    found.__doc__ = None


def _is_known(fullname: str) -> bool:
    return fullname.partition(".")[0] in KNOWN


def without_docstrings(code: CodeType) -> CodeType:
    """``code`` with ``None`` as the docstring of every function in it; the very same when there is none.

    A docstring is a function's first constant. A constant that the function uses as well stays.
    """
    constants = tuple([without_docstrings(each) if type(each) is CodeType else each for each in code.co_consts])
    if constants and type(constants[0]) is str and code.co_flags & _FUNCTION == _FUNCTION and not _uses_first(code):
        constants = (None, *constants[1:])
    elif all(map(operator.is_, constants, code.co_consts)):
        return code
    return code.replace(co_consts=constants)


def _uses_first(code: CodeType) -> bool:
    """Whether an instruction loads the first constant; one that extends its argument only errs to the safe side."""
    return any(code.co_code.find(each) >= 0 for each in _FIRST_CONSTANT)
