"""What a daemon imports without: documentation that nobody reads there, and plugins of other people's programs."""

import subprocess
import sys
from pathlib import Path

import pytest

from config.installed import installed_version
from config.lean import without_docstrings

DOCUMENTED = '''
"""module"""
from dataclasses import dataclass
@dataclass(frozen=True)
class Point:
    """class"""
    x: int
    def twice(self):
        """method"""
        def inner():
            """inner"""
            return "kept"
        return 2 * self.x, inner(), inner.__doc__
def both():
    "same"
    return "same"
def plain():
    return ["first" for _ in range(1)]
def checked(value):
    """documented"""
    assert value, "asserts stay"
    return value
'''


def lean(program: str, directory: Path) -> list[str]:
    """What ``program`` prints when it may import from ``directory``, without documentation."""
    preamble = (
        f"import sys; sys.path.insert(0, {str(directory)!r})\nfrom config.lean import import_lean; import_lean()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", preamble + program], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    return done.stdout.splitlines()


def test_modules_work_as_before_and_document_nothing(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text(DOCUMENTED)
    assert lean(
        "import this as d\n"
        "print(d.__doc__, d.Point.__doc__, d.Point.twice.__doc__, d.checked.__doc__, d.Point(2).twice())\n"
        "print(d.both(), d.plain(), d.Point(3))\n"
        "try: d.checked(0)\n"
        "except AssertionError as error: print(error)\n",
        tmp_path,
    ) == ["None None None None (4, 'kept', None)", "same ['first'] Point(x=3)", "asserts stay"]


def test_code_without_documentation_is_left_as_it_is() -> None:
    code = compile("def f(x):\n return [x, 'a']\n", "f", "exec")
    assert without_docstrings(code) is code


def test_a_line_of_a_traceback_is_still_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text(DOCUMENTED)
    assert lean(
        "import this, traceback\n"
        "try: this.checked(0)\n"
        "except AssertionError as error: print(traceback.extract_tb(error.__traceback__)[-1].line)\n",
        tmp_path,
    ) == ["""assert value, "asserts stay\""""]


def test_a_plugin_of_pydantic_is_not_loaded_into_the_daemon(tmp_path: Path) -> None:
    folder = tmp_path / "intruder-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: intruder\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[pydantic]\nintruder = intruder:plugin\n")
    (tmp_path / "intruder.py").write_text("print('loaded')\nplugin = None\n")
    assert lean(
        "import config.settings, pydantic\n"
        "class Late(pydantic.BaseModel):\n"
        "    x: int\n"
        "print(Late(x=1))\n"
        "from importlib.metadata import version\n"
        "print(version('intruder'))\n",
        tmp_path,
    ) == ["x=1", "1.0"]


def test_a_plan_with_numpy_and_scipy_is_made_without_documentation(tmp_path: Path) -> None:
    assert lean(
        "from stage_agent.planner import compute_plan\n"
        "from tests.unit.planner.builders import both, node, problem\n"
        "print(type(compute_plan(problem([node('a'), node('b')], both('a', 'b')))).__name__)\n"
        "import numpy, scipy.optimize, scipy.sparse\n"
        "print(numpy.ones(2).sum())\n",
        tmp_path,
    ) == ["Plan", "2.0"]


@pytest.mark.parametrize("name", ["stagemesh", "numpy", "pydantic"])
def test_the_version_of_a_distribution_is_what_the_standard_library_says(name: str) -> None:
    from importlib.metadata import version

    assert installed_version(name) == version(name)


def test_the_version_of_what_is_not_installed_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError):
        installed_version("no_such_distribution")
