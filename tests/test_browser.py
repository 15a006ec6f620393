"""The report in a real browser: every chart is drawn, at any width, light and dark, without a network."""

import html
import re
import struct
import subprocess

import pytest

from tests.runs import document, run, stream
from tests.tools import chromium
from twin.report.html import render_html
from twin.report.json_summary import summarize

MIXED = {"ONLINE": 0.5, "BATCH": 0.3, "OFFLINE": 0.2}
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--proxy-server=127.0.0.1:9", "--virtual-time-budget=20000",
]  # fmt: skip

# Shows the report in a frame of the width asked for and writes what came of it into its own page.
FRAME = """<!DOCTYPE html><body><iframe width="{width}" height="3000" srcdoc="{report}"></iframe><script>
const frame = document.querySelector("iframe");
setInterval(() => {{
  const page = frame.contentDocument;
  const root = page && page.documentElement;
  if (!root || root.dataset.ready !== "yes") return;
  document.body.dataset.scroll = root.scrollWidth;
  document.body.dataset.client = root.clientWidth;
  document.body.dataset.drawn = [...page.querySelectorAll(".chart")].filter((c) => c.querySelector(".main-svg")).length;
  document.body.dataset.wide = [...page.querySelectorAll(".main-svg")].filter(
    (svg) => svg.getBoundingClientRect().right > root.clientWidth + 1).length;
}}, 100);
</script></body>
"""


@pytest.fixture(scope="module")
def browser():
    return chromium()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Path of a report that has every part."""
    busy = stream(300, 60, arrivals={"process": "poisson", "rate": 25}, requests=120, tiers=MIXED)
    source = document(
        traffic=[busy],
        engine={"num_gpu_blocks_override": 129},
        policy="tiered",
        objectives={"ONLINE": {"ttft_p99": 0.3}},
    )
    result = run(source, observe=True)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(result, summarize(result)), encoding="utf-8")
    return path


def drive(browser, folder, *options):
    command = [browser, *QUIET, f"--user-data-dir={folder / 'profile'}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def shown(browser, folder, url, *options):
    """(attributes of the root, page after its scripts have run)."""
    done = drive(browser, folder, *options, "--dump-dom", url)
    assert "Uncaught" not in done.stderr, done.stderr
    return dict(re.findall(r'data-(\w+)="(\w+)"', done.stdout.split(">", 2)[1])), done.stdout


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_chart_is_drawn_in_the_colours_of_the_theme(browser, report, tmp_path, theme):
    root, page = shown(browser, tmp_path, f"file://{report}?theme={theme}")
    assert root == {"theme": theme, "ready": "yes"}
    charts = re.findall(r'<div class="chart[^"]*" id="chart-(\w+)"', page)
    assert len(charts) == len(set(charts)) == 11
    drawn = re.findall(r'id="chart-(\w+)"(?:(?!id="chart-).)*?class="main-svg"', page, re.DOTALL)
    assert sorted(set(drawn)) == sorted(charts)
    css = report.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    own = css.split('[data-theme="dark"]')[1] if theme == "dark" else css
    kv = re.search(r"--kv: #(\w{6})", own)[1]
    rgb = ", ".join(str(int(kv[i : i + 2], 16)) for i in (0, 2, 4))
    assert f"fill: rgb({rgb})" in page
    assert "var(--" not in "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))


def test_without_being_told_it_follows_the_reader_s_preference(browser, report, tmp_path):
    root, _ = shown(
        browser, tmp_path, f"file://{report}", "--blink-settings=preferredColorScheme=0"
    )
    assert root["theme"] == "dark"


@pytest.mark.parametrize("width", [390, 1400])
def test_it_fits_the_window(browser, report, tmp_path, width):
    frame = tmp_path / "frame.html"
    text = html.escape(report.read_text(encoding="utf-8"))
    frame.write_text(FRAME.format(width=width, report=text), encoding="utf-8")
    done = drive(browser, tmp_path, "--window-size=1500,3000", "--dump-dom", f"file://{frame}")
    body = re.search(r"<body[^>]*data-drawn[^>]*>", done.stdout)
    assert body, done.stderr
    found = {name: int(number) for name, number in re.findall(r'data-(\w+)="(\d+)"', body[0])}
    assert found["drawn"] == 11
    assert found["wide"] == 0
    assert found["scroll"] <= found["client"] <= width


def test_a_picture_can_be_taken(browser, report, tmp_path):
    picture = tmp_path / "report.png"
    drive(
        browser, tmp_path, "--window-size=1400,2000", f"--screenshot={picture}", f"file://{report}"
    )
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1400, 2000)
    assert len(data) > 50_000  # an empty page is a tenth of that
