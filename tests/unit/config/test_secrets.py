"""The API token: a file or a systemd credential, refused when it is not one good line."""

import pytest

from config.secrets import api_token
from config.settings import ApiSettings, Settings
from protocol.errors import ConfigurationError

TOKEN = "0123456789abcdef0123"


def with_file(path):
    return Settings(api=ApiSettings(token_file=str(path)))


def test_without_file_and_credential_there_is_no_token(tmp_path):
    assert api_token(Settings(), {}) is None
    assert api_token(Settings(), {"CREDENTIALS_DIRECTORY": str(tmp_path)}) is None


def test_the_file_wins_over_the_credential(tmp_path):
    (tmp_path / "api-token").write_text("credential-credential\n")
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert api_token(Settings(), environment) == "credential-credential"
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert api_token(with_file(file), environment) == TOKEN


@pytest.mark.parametrize(
    "content", [b"", b"short\n", b"x" * 600, b"two words two words\n", b"line1line1line1\nline2line2\n", b"\xff" * 32]
)
def test_a_token_that_is_not_one_good_line_is_refused_without_being_shown(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"api.token_file: .*openssl") as caught:
        api_token(with_file(file), {})
    assert "two words" not in str(caught.value)
    assert "line1" not in str(caught.value)


def test_an_absent_token_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot be read \(No such file or directory\); create it"):
        api_token(with_file(tmp_path / "absent"), {})
