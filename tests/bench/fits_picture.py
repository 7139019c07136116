"""What tests/gpu/fits.py recorded, as figures and as a picture: the smallest card, predicted and measured.

    python tests/bench/fits_picture.py FILE.jsonl... [--output PICTURE.svg] [--json]

``ran out``: plans that would run out of memory on the smallest card on which autofit says that they fit, which is the
prediction and a margin. ``refused``: plans that run on a card 15 % smaller than the smallest one that autofit says they
fit on. The SVG is written by hand, has no script, and reads on a light and on a dark page.
"""

import argparse
import html
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
from autofit.system.units import GIB  # noqa: E402 - the checkout is found first

REFUSED = 0.15
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999933", "#888888")  # Paul Tol's bright
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 480, 62, 170, 24, 52


def read(paths):
    """The records of some files, the last one of each case; torn lines are left out."""
    found = {}
    for path in paths:
        for line in Path(path).read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found[record["key"]] = record
    return list(found.values())


def points(records):
    """Cases with both numbers: record, predicted bytes, measured bytes."""
    found = []
    for record in records:
        predicted = (record["predicted"]["capacity_bytes"] or {}).get(record["case"]["allocator"])
        measured = (record["measured"] or {}).get("smallest_capacity_bytes")
        if predicted and measured:
            found.append((record, predicted, measured))
    return found


def nearest_rank(values, share):
    """The smallest value that this share does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def figures(records, margin):
    """What is said of a recording, as one JSON object."""
    seen = points(records)
    errors = [predicted / measured - 1 for _, predicted, measured in seen]
    tensors = [record["allocated_error"] for record, *_ in seen if record.get("allocated_error") is not None]
    outside = [record["measured"]["outside_bytes"] for record, *_ in seen]
    assumed = [record["predicted"].get("context_bytes") for record, *_ in seen]
    failing = [record["key"] for record, predicted, measured in seen if measured > predicted * (1 + margin)]
    return {
        "cases": len(records),
        "measured": len(seen),
        "models": len({record["case"]["model"] for record, *_ in seen}),
        **_spread("capacity", errors),
        **_spread("allocated", tensors),
        "margin": margin,
        "ran_out_with_margin": len(failing),
        "ran_out_without_margin": sum(error < 0 for error in errors),
        "ran_out": failing,
        "refused": sum(predicted * (1 + margin) * (1 - REFUSED) > measured for _, predicted, measured in seen),
        "outside_bytes_median": round(statistics.median(outside)) if outside else None,
        "outside_bytes_most": max(outside, default=None),
        "outside_bytes_assumed": next((one for one in assumed if one), None),
        "failed": {record["key"]: record["failed"] for record in records if record["failed"]},
        "ignored": {record["key"]: record["not_in_effect"] for record in records if record.get("not_in_effect")},
    }


def _spread(name, errors):
    sizes = [abs(error) for error in errors]
    return {
        f"{name}_median_error": round(statistics.median(sizes), 5) if sizes else None,
        f"{name}_p90_error": round(nearest_rank(sizes, 0.9), 5) if sizes else None,
        f"{name}_worst": [round(min(errors), 5), round(max(errors), 5)] if sizes else None,
    }


# -- the picture --------------------------------------------------------------------------------------------------


def picture(records, margin):
    """The scatter as SVG: both axes logarithmic, the same on both, the line where they agree, the margin as a band."""
    seen = points(records)
    numbers = [value / GIB for _, *pair in seen for value in pair] or [1.0, 2.0]
    low, high = math.log2(min(numbers)) - 0.2, math.log2(max(numbers)) + 0.2
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(gib):
        return LEFT + across * (math.log2(gib) - low) / (high - low)

    def y(gib):
        return TOP + down * (high - math.log2(gib)) / (high - low)

    models = list(dict.fromkeys(record["case"]["model"] for record, *_ in seen))
    colour = {model: COLOURS[place % len(COLOURS)] for place, model in enumerate(models)}
    parts = [_head(), *_axes(x, y, low, high), _band(x, y, low, high, margin)]
    for record, predicted, measured in seen:
        shape = _mark(x(predicted / GIB), y(measured / GIB), colour[record["case"]["model"]], record)
        words = f"{record['key']}: predicted {predicted / GIB:.2f}, measured {measured / GIB:.2f} GiB"
        parts.append(f"<g><title>{html.escape(words)}</title>{shape}</g>")
    parts += _legend(colour, margin)
    return "\n".join([*parts, "</svg>\n"])


def _head():
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        "<title>Smallest card on which a plan runs: predicted and measured</title>\n"
        "<style>text{fill:#333}.line{stroke:#8888;fill:none}.band{fill:#8883}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
    )


def _axes(x, y, low, high):
    """Grid lines and labels at the powers of two."""
    for power in range(math.ceil(low), math.floor(high) + 1):
        gib = 2.0**power
        label = f"{gib:g}"
        yield (
            f'<path class="line" stroke-width=".5" d="M{x(gib):.1f} {TOP}V{HEIGHT - BOTTOM}'
            f'M{LEFT} {y(gib):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{x(gib):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
            f'<text x="{LEFT - 6}" y="{y(gib) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">predicted, GiB</text>'
    yield f'<text transform="translate(16 {middle:.0f}) rotate(-90)" text-anchor="middle">measured, GiB</text>'


def _band(x, y, low, high, margin):
    """The line where both agree, and beside it what the margin covers."""
    first, last = 2.0**low, 2.0**high
    over = math.log2(1 + margin)
    begin, end = 2.0 ** (low + over), 2.0 ** (high - over)
    return (
        f'<path class="band" d="M{x(first):.1f} {y(first):.1f}L{x(last):.1f} {y(last):.1f}'
        f'L{x(end):.1f} {y(last):.1f}L{x(first):.1f} {y(begin):.1f}Z"/>'
        f'<path class="line" d="M{x(first):.1f} {y(first):.1f}L{x(last):.1f} {y(last):.1f}"/>'
    )


def _mark(left, top, colour, record):
    """A dot; a square for expandable segments."""
    if record["case"]["allocator"] == "expandable":
        return f'<rect x="{left - 4:.1f}" y="{top - 4:.1f}" width="8" height="8" fill="{colour}" fill-opacity=".8"/>'
    return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4.5" fill="{colour}" fill-opacity=".8"/>'


def _legend(colour, margin):
    left = WIDTH - RIGHT + 16
    for place, (model, one) in enumerate(colour.items()):
        top = TOP + 10 + 18 * place
        yield f'<circle cx="{left}" cy="{top}" r="4.5" fill="{one}"/>'
        yield f'<text x="{left + 12}" y="{top + 4}">{html.escape(model)}</text>'
    top = TOP + 24 + 18 * len(colour)
    for line in ("dot: default allocator", "square: expandable", f"band: {margin:.0%} margin"):
        yield f'<text x="{left - 4}" y="{top}" font-size="11">{line}</text>'
        top += 15


def main(arguments=None):
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="where the SVG goes")
    parser.add_argument("--margin", type=float, help="by default autofit's own")
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args(arguments)
    margin = options.margin
    if margin is None:
        from autofit.costmodel.forecast import MARGIN as margin  # noqa: N811 - a default
    records = read(options.files)
    if options.output:
        options.output.write_text(picture(records, margin), "utf-8")
    said = figures(records, margin)
    if not options.json:
        for record, predicted, measured in sorted(points(records), key=lambda one: one[1] / one[2]):
            print(
                f"{predicted / measured - 1:+7.2%}  predicted {predicted / GIB:7.2f} measured {measured / GIB:7.2f} GiB"
                f"  tensors {record['allocated_error']:+7.2%}  {record['key']}"
            )
        print(f"failed: {said['failed'] or 'none'}")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
