"""Chromium without a window: what a page says once it has run, and pictures of it."""

import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"phone": 390, "desk": 1200}
FRAME = """<!doctype html><style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<script>onmessage = event => {{ document.title = event.data; }};</script>
<iframe src="{page}" width="{width}" height="{height}"></iframe>"""


def browse(page, width, *words, height=4000):
    """What Chromium prints; the page is in a frame, since a window of it is never as narrow as a phone's."""
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(page=page.name, width=width, height=height), encoding="utf-8")
    words = (*words, "--virtual-time-budget=3000")
    how = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    return subprocess.run(
        [BROWSER, *how, *words, frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip


def photograph(page, picture, width, *, dark=False, height=4000):
    """Write a picture of the upper ``height`` pixels of a report as it looks by day, or by night."""
    text = page.read_text("utf-8")
    if dark:  # headless Chromium has no switch for it that holds in every version
        text = text.replace("@media (prefers-color-scheme: dark)", "@media all")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "report.html"
        copy.write_text(text, "utf-8")
        browse(copy, width, f"--screenshot={picture.absolute()}", height=height)
