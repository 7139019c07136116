"""Record what a device does, for the README: one command, on the machine that has the device.

    python tests/gpu/record.py --output DIR [--minutes 12]

Runs the GPU tests, then a tune of a 1B-parameter Llama at sequence length 2048 under a ceiling of 40 GiB (or 60 % of a
smaller card), then `autofit verify`, and leaves DIR/record.json: the commands, the device, the versions, the winner,
the promise, the launch, and the plain plan for comparison.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.gpu.models import LLAMA_1B


def run(command, record):
    """Run a command and keep its end."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record["commands"].append(
        {
            "command": command,
            "status": done.returncode,
            "seconds": round(time.monotonic() - began, 1),
            "stdout": done.stdout[-20000:],
            "stderr": done.stderr[-20000:],
        }
    )
    print(" ".join(command), "->", done.returncode, flush=True)
    return done


def main():
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--limit", default="40GiB")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    config = options.output / "llama-1b.json"
    config.write_text(json.dumps(LLAMA_1B))
    record = {"commands": []}
    autofit = [sys.executable, "-m", "autofit.cli"]
    run([*autofit, "doctor", "--json"], record)
    if not options.skip_tests:
        here = Path(__file__).parent
        run([sys.executable, "-m", "pytest", str(here), "-q", "-p", "no:cacheprovider"], record)
    out = options.output / "tune"
    tune = [*autofit, "tune", str(config), "--seq-len", "2048", "--global-batch", "32", "--memory-limit", options.limit]
    run([*tune, "--timeout", f"{options.minutes:g}m", "--output", str(out), "--json", "--resume"], record)
    run([*autofit, "verify", str(out), "--json"], record)
    (options.output / "record.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
