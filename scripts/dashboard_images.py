"""The pictures of docs/dashboard.md, taken of the dashboard in a headless Chromium.

    python -m scripts.dashboard_images [--out docs/images]

It needs chromium and chromedriver, and takes about a minute.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dashboard.links import encode
from dashboard.state import DEFAULT
from tests.browser import Browser, browser
from tests.dashboard_server import dashboard_server

WIDTH = 1280


def what_if(window: Browser, url: str) -> None:
    """The default scenario, run."""
    window.open(url)
    window.reads("Configuration")
    window.driver.execute_script("document.querySelector('summary').click()")  # folds the inputs
    window.click("Run")
    window.reads("Computed in")
    window.wait(lambda: window.charts() >= 3, "three charts")


def compare(window: Browser, url: str) -> None:
    """Twice as many slots where they are short."""
    traffic = {**DEFAULT["traffic"][0], "requests": 600}
    engine = {**DEFAULT["engine"], "max_num_seqs": 32}
    window.open(f"{url}/?s={encode(DEFAULT | {'traffic': [traffic], 'engine': engine})}")
    window.reads("Configuration")
    window.click("Compare", "a span, a")
    window.reads("B against A under the same seeds")
    window.click("Compare", "button")
    window.reads("all intervals hold together")
    window.wait(lambda: window.charts() >= 1, "the chart")


def pareto(window: Browser, url: str) -> None:
    """A search from the default scenario."""
    window.open(url)
    window.reads("Configuration")
    window.click("Pareto", "a span, a")
    window.reads("Goals, the most important first")
    window.click("Search")
    window.reads("Each under 2 seeds", 300)
    window.wait(lambda: window.charts() >= 1, "the chart")


PICTURES: dict[str, tuple[Callable[[Browser, str], None], int, bool]] = {
    "what-if": (what_if, 1680, False),
    "pareto": (pareto, 1700, False),
    "compare": (compare, 1560, True),
}
"""How each page comes to what is shown, pixels from top to bottom, and whether it is dark."""


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, dashboard_server(Path(name) / "log") as url:
        for picture, (show, height, dark) in PICTURES.items():
            folder = Path(name) / picture
            folder.mkdir()
            with browser(folder, WIDTH, height, dark) as window:
                show(window, url)
                window.driver.execute_script("document.activeElement.blur()")
                window.driver.execute_script(
                    "for (const one of document.querySelectorAll('section, [data-testid=stMain]')) one.scrollTo(0, 0)"
                )
                time.sleep(1.0)  # charts grow into their place
                window.driver.save_screenshot(str(out / f"{picture}.png"))
            print(out / f"{picture}.png")


if __name__ == "__main__":
    main()
