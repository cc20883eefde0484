"""The files of the page, read once from the package, and the headers that keep them harmless.

The policy allows scripts, styles, images and requests of this host alone and nothing inline, so that text of contributors cannot
become code and no request leaves the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.responses import Response

from shoal.errors import RefusedError
from shoal.files import digest_bytes

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media: str
    tag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    found = {}
    for item in (files("shoal.coordinator.page") / "assets").iterdir():
        media = TYPES.get(f".{item.name.rsplit('.', 1)[-1]}")
        if media is not None:
            content = item.read_bytes()
            found[item.name] = PageFile(content, media, f'"{digest_bytes(content)[:32]}"')
    return found


def page_response(name: str, known_tag: str) -> Response:
    """A file of the page; 304 for a browser that has it."""
    file = page_files().get(name)
    if file is None:
        raise RefusedError("not_found", "The page has no such file.", status=404)
    headers = HEADERS | {"etag": file.tag}
    if known_tag == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media, headers=headers)
