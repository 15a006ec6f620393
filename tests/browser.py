"""A headless Chromium that is driven step by step, for tests of pages that answer."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tools import chromium, missing

PATIENCE_S = 90
"""Other tests run beside these on the same cores."""

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-color-profile=srgb",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    @property
    def text(self) -> str:
        """What can be read on the page."""
        return self.driver.execute_script("return document.body.innerText")

    def wait(self, what: Callable[[], Any], why: str, within: float = PATIENCE_S) -> Any:
        """What `what` gives once it is true; elements that vanish meanwhile are looked for again."""
        end = time.monotonic() + within
        while True:
            try:
                found = what()
                if found:
                    return found
            except Exception as error:
                if time.monotonic() > end:
                    raise AssertionError(f"{why}: {error}") from None
            assert time.monotonic() < end, f"{why} did not come; the page says: {self.text}"
            time.sleep(0.02)

    def reads(self, text: str, within: float = PATIENCE_S) -> None:
        self.wait(lambda: text in self.text, repr(text), within)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def click(self, label: str, css: str = "button, a, [role=radio], [role=tab]") -> None:
        """Click what shows exactly this text."""

        def press() -> bool:
            for element in self.all(css):
                if element.text.strip() == label and element.is_enabled():
                    self.driver.execute_script(
                        "arguments[0].scrollIntoView({block: 'center'})", element
                    )
                    element.click()
                    return True
            return False

        self.wait(press, f"{label!r} to click")

    def type(self, label: str, value: str) -> None:
        """Put a value into the input of this name."""
        from selenium.webdriver.common.keys import Keys

        def put() -> bool:
            for field in self.all(f'input[aria-label="{label}"], textarea[aria-label="{label}"]'):
                field.send_keys(Keys.CONTROL, "a")
                field.send_keys(value)
                field.send_keys(
                    Keys.CONTROL, Keys.ENTER
                ) if field.tag_name == "textarea" else field.send_keys(Keys.ENTER)
                return True
            return False

        self.wait(put, f"the input {label!r}")

    def value(self, label: str) -> str:
        def read() -> str | None:
            found = self.all(f'input[aria-label="{label}"]')
            return found[0].get_attribute("value") if found else None

        return str(self.wait(read, f"the input {label!r}"))

    def upload(self, path: Path, then: str) -> None:
        """Give a file to the place for files; `then` is what the page says once it has it."""
        for _ in range(4):
            self.wait(lambda: self.all('input[type="file"]'), "a place for files")[0].send_keys(
                str(path)
            )
            try:
                self.reads(then, 20)
                time.sleep(0.5)
                if path.name in self.text and then in self.text:
                    return
            except AssertionError:
                pass
            # The page was drawn anew in between, and the place with it: again, as a reader would.
        raise AssertionError(f"{path.name} was not taken; the page says: {self.text}")

    def charts(self) -> int:
        """Charts that are drawn."""
        return len(self.all(".js-plotly-plot .main-svg:first-child"))

    def complaints(self) -> list[str]:
        """Errors in the console since the last call."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]


@contextmanager
def browser(
    folder: Path, width: int = 1400, height: int = 1000, dark: bool = False
) -> Iterator[Browser]:
    """A window of this size with a profile of its own. Skips the test where there is no Chromium or no chromedriver."""
    binary, driver_path = chromium(), shutil.which("chromedriver")
    if driver_path is None:
        missing("no chromedriver: install the package chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which(binary) or binary
    downloads = folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for option in (
        *OPTIONS,
        f"--window-size={width},{height}",
        f"--user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(option)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
