"""A real Chromium that notes what a page must not do: errors, requests of other hosts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 60_000
"""A busy machine draws slowly; nothing waits longer than it must."""


@dataclass
class Watched:
    page: Page
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def text(self) -> str:
        return self.page.inner_text("body")

    def wait_for(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for(timeout=PATIENCE_MS)


@contextmanager
def browser(*, width: int = 1280, height: int = 900, is_dark: bool = False) -> Iterator[Watched]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if is_dark else "light"
        )
        context.set_default_timeout(PATIENCE_MS)
        watched = Watched(context.new_page())
        page = watched.page
        page.on("console", lambda message: watched.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: watched.errors.append(str(error)))
        page.on("dialog", lambda dialog: watched.errors.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: watched.hosts.add(urlsplit(request.url).netloc))
        try:
            yield watched
        finally:
            chromium.close()
