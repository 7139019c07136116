"""The report in a real browser: nothing overflows at phone or desk width, light or dark. Needs Chromium."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.output.reports.report import html
from autofit.training.guard.equivalence import Guard
from tests.output.test_report import DOCUMENTS, document, plan
from tests.support.browser import BROWSER, WIDTHS, browse, photograph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium"),
]
PICTURES = os.environ.get("AUTOFIT_PICTURES")
GUARD = Guard(
    verdict="same", words="losses agree", losses=(9.49, 9.46, 9.42, 9.38), reference_losses=(9.49, 9.46, 9.42, 9.37),
    reference=plan(8), seconds=12.0,
)  # fmt: skip
ADAPTER = plan(8, precision="bf16", adapter="lora:r=8:alpha=16:dropout=0.05:targets=q_proj+v_proj")
MEASURE = r"""
<script>
const found = words => [...document.querySelectorAll(words)].filter(one => !one.closest("details:not([open]), .wide"));
const lines = (part, word) => {
  const range = document.createRange();
  range.setStart(part, word.index);
  range.setEnd(part, word.index + word[0].length);
  return new Set([...range.getClientRects()].map(one => Math.round(one.top))).size > 1;
};
const edge = document.documentElement.clientWidth;
const wide = found("main *").filter(one => !one.closest("pre, svg") && one.getBoundingClientRect().right > edge + 1);
const cut = found("td, th").filter(one => one.scrollWidth > one.clientWidth + 1);
const broken = [...document.querySelectorAll("td, th, li, p, span, h2")]
  .filter(one => !one.closest("details:not([open]), pre, svg, .words"))
  .flatMap(one => [...one.childNodes].filter(part => part.nodeType == Node.TEXT_NODE))
  .flatMap(part => [...part.data.matchAll(/\b\w{2,24}\b/g)].filter(word => lines(part, word)).map(word => ({
    tagName: part.parentNode.tagName, textContent: word[0] })));
const said = all => all.map(one => one.tagName + " " + one.textContent.trim().slice(0, 40)).join("; ");
const text = `MEASURED ${innerWidth} wide=[${said(wide)}] cut=[${said(cut)}] broken=[${said(broken)}] page=`
  + (document.documentElement.scrollWidth - edge);
parent.postMessage(text, "*");
</script>
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["cuda", "cpu", "long words", "an adapter"])
def test_nothing_overflows_and_no_word_is_broken(tmp_path, name, width):
    from tests.output.test_report import measured

    changes = DOCUMENTS.get(name, {"winner": ADAPTER, "trials": [(ADAPTER, measured(51.9, 15.8))]})
    text = html(document(guard=GUARD, **changes), folder="autofit-out")
    page = tmp_path / "report.html"
    allowed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(allowed.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    found = re.search(r"<title>(MEASURED [^<]*)</title>", browse(page, WIDTHS[width], "--dump-dom"))
    assert found
    assert found[1] == f"MEASURED {WIDTHS[width]} wide=[] cut=[] broken=[] page=0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_is_taken(tmp_path, width, scheme):
    page = tmp_path / "report.html"
    page.write_text(html(document(guard=replace(GUARD)), folder="autofit-out"), encoding="utf-8")
    picture = (Path(PICTURES) if PICTURES else tmp_path) / f"report-{width}-{scheme}.png"
    photograph(page, picture, WIDTHS[width], dark=scheme == "dark")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
