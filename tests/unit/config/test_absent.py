"""What is left out of a library's imports: absent meanwhile, real afterwards, loud when it is used all the same."""

import subprocess
import sys

import pytest

from config.absent import absent


def test_a_module_is_left_out_only_while_it_lasts() -> None:
    with absent("tabnanny"):
        import tabnanny

        assert not hasattr(tabnanny, "__file__")
    assert sys.modules.get("tabnanny") is not tabnanny


def test_a_module_that_is_loaded_already_stays_the_real_one() -> None:
    import json

    with absent("json"):
        import json as again

        assert again is json
    assert sys.modules["json"] is json


def test_what_was_left_out_can_be_inherited_from_but_not_made() -> None:
    with absent("tabnanny"):
        from tabnanny import Rope, Sail

    class Ship(Rope, Sail):
        pass

    for kind in (Rope, Ship):
        with pytest.raises(RuntimeError, match="was left out"):
            kind()


def test_modules_left_out_come_back_when_the_import_fails() -> None:
    with pytest.raises(ZeroDivisionError), absent("tabnanny"):
        1 / 0  # noqa: B018
    assert "tabnanny" not in sys.modules


def test_a_program_that_wants_the_real_ones_after_the_daemons_modules_gets_them() -> None:
    program = (
        "import stage_agent.daemon\n"
        "import http.server, urllib.request, logging.config, html, OpenSSL.crypto\n"
        "print(http.server.HTTPServer.__mro__[1].__name__, html.escape('<'), urllib.request.Request('http://a/').host,\n"
        "      hasattr(logging.config, 'dictConfig'), OpenSSL.crypto.X509().get_version())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["TCPServer", "&lt;", "a", "True", "0"]
