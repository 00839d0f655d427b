"""Pages for people: each is one file that asks its own server for figures, and nothing else for anything."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

__all__ = ("Dashboard",)


class Dashboard:
    """Gives a page, which holds no figures: whoever may not read the statistics sees none.

    Args:
        package: package with its ``dashboard.html``, which names the styles and the scripts that all pages share.

    Attributes:
        text: page as it is sent.
    """

    def __init__(self, package: str = "frostline.node") -> None:
        shared = files("frostline.node")
        self.text = files(package).joinpath("dashboard.html").read_text(encoding="utf-8")
        for name in ("page.css", "jobs.css", "page.js", "jobs.js"):
            part = shared.joinpath(name).read_text(encoding="utf-8")
            self.text = self.text.replace(f"/* {name} */\n", part)
        self._headers = {
            "Content-Security-Policy": _policy(self.text),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    async def page(self, _: Request) -> Response:
        """Answer with the page."""
        return Response(self.text, media_type="text/html; charset=utf-8", headers=self._headers)


def _policy(page: str) -> str:
    """Allow this script, this style and requests to the server itself."""
    script, style = (_digest_of(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest_of(page: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found, f"the page has a {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
