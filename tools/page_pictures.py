"""Pictures of every screen of the page: `python tools/page_pictures.py LINK FOLDER`

LINK is the owner's link of a run that is served, by its coordinator or by `shoal view`. Needs Chromium and playwright. The step,
the group, the worker and the banned key are the first ones that fit, so that the same run gives the same pictures.
"""

import argparse
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SETTLED_MS = 700
"""Charts are drawn in the next frames."""


def shoot(page: Page, address: str, text: str, path: Path, *, is_whole: bool = True) -> None:
    page.goto(address)
    page.get_by_text(text).first.wait_for()
    page.wait_for_timeout(SETTLED_MS)
    page.screenshot(path=path, full_page=is_whole)
    print(path)


def opened(chromium: Browser, link: str, size: Any, *, is_dark: bool = False) -> Page:
    """A page of the run; with the owner's link it has exchanged the secret for its cookie."""
    scheme: Literal["dark", "light"] = "dark" if is_dark else "light"
    page = chromium.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1).new_page()
    page.goto(link)
    page.get_by_text("Running for").first.wait_for()
    return page


def answer(page: Page, path: str) -> Any:
    return page.evaluate("path => fetch(path).then((answer) => answer.json())", path)


def telling_group(page: Page) -> tuple[int, str]:
    """A group whose samples were rewarded differently and whose tokens have entropies, from the middle of the run on."""
    steps = answer(page, "/v1/curves")["steps"]
    for step in [*steps[len(steps) // 2 :], *steps]:
        for group in answer(page, f"/v1/owner/steps/{step}")["groups"]:
            if len(set(group["task_rewards"])) > 1 and group["state"] == "consumed":
                view = answer(page, f"/v1/owner/groups/{group['group_id']}")
                tokens = [token for one in view.get("completions", []) for token in one["turns"][1]["tokens"]]
                if any(token["entropy"] is not None for token in tokens):
                    return step, group["group_id"]
    raise SystemExit("The run has no consumed group with signal and an audit.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", help="the owner's link")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    base, folder = options.link.split("/#")[0], options.folder
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = opened(chromium, options.link, WIDE)
        workers = answer(page, "/v1/workers")["workers"]
        banned = next(worker["key"] for worker in workers if worker["state"] == "banned")
        best = workers[0]["key"]
        step, group = telling_group(page)
        shoot(page, f"{base}/#/overview", "Running for", folder / "page-overview.png")
        shoot(page, f"{base}/#/workers", "Doing", folder / "page-workers.png")
        shoot(page, f"{base}/#/worker/{banned}", "Banned after", folder / "page-banned.png")
        shoot(page, f"{base}/#/step/{step}", "Submissions", folder / "page-step.png", is_whole=False)
        shoot(page, f"{base}/#/timeline", "Versions, from publication", folder / "page-timeline.png", is_whole=False)
        shoot(page, f"{base}/#/relays", "Origin", folder / "page-relays.png", is_whole=False)
        shoot(page, f"{base}/#/ledger", "verified", folder / "page-ledger.png", is_whole=False)
        page.goto(f"{base}/#/group/{group}")
        page.get_by_role("button", name="Entropy").click()
        page.locator(".turn.policy .token").nth(3).hover()
        page.screenshot(path=folder / "page-group.png")
        stranger = opened(chromium, base, WIDE)
        shoot(stranger, f"{base}/worker/{best}", "What raises it", folder / "page-contributor.png", is_whole=False)
        dark = opened(chromium, options.link, WIDE, is_dark=True)
        shoot(dark, f"{base}/#/overview", "Running for", folder / "page-overview-dark.png")
        phone = opened(chromium, options.link, PHONE)
        shoot(phone, f"{base}/#/overview", "Running for", folder / "page-overview-phone.png", is_whole=False)
        phone = opened(chromium, base, PHONE, is_dark=True)
        shoot(
            phone, f"{base}/worker/{best}", "What raises it", folder / "page-contributor-phone-dark.png", is_whole=False
        )
        chromium.close()


if __name__ == "__main__":
    main()
