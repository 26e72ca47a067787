"""Takes the pictures of the page in docs/images from the folder of a run: page.png, and page-phone.png with a what-if.

Take them of a run whose predictions mean something: of a real network, such as the ResNet-18 that `make hetero` trains
on five unequal devices, on a machine that does nothing else:

    python scripts/page_pictures.py runs/hetero/runs/mixed-auto

Needs Chromium, and the packages of `make setup`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from horizonml.report.page.server import PageServer

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
_WAIT_MS = 75_000


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    arguments = parser.parse_args()
    with PageServer(arguments.run, ("127.0.0.1", 0)) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, size, scheme in (("page", (1280, 900), "light"), ("page-phone", (390, 844), "dark")):
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)  # type: ignore[arg-type]
            page.set_default_timeout(_WAIT_MS)
            page.goto(f"http://127.0.0.1:{server.port}/")
            page.wait_for_selector("#loss svg.chart, #loss .note")
            if name == "page-phone":
                page.click("#what-if button[type=submit]")
                page.wait_for_selector("#what-if .compare, #what-if .error")
            page.screenshot(path=arguments.out / f"{name}.png", full_page=True)
            print(arguments.out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
