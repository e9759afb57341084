"""The page and the headers that confine it: only its own style and script run, and it talks to its own node only."""

import base64
import hashlib
import re
from pathlib import Path

HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _allowed(tag: str) -> str:
    """The Content-Security-Policy source of the page's only ``<tag>``."""
    match = re.search(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    assert match is not None, tag
    return f"'sha256-{base64.b64encode(hashlib.sha256(match.group(1).encode()).digest()).decode()}'"


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src {_allowed('style')}; script-src {_allowed('script')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
