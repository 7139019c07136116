"""``python -m autofit``: the command line.

``python -m`` searches the current folder first: a data folder called ``scipy`` would be imported as that package. So
the current folder is taken from the path, unless it is the one that holds this package.
"""

import sys
from pathlib import Path

if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
    del sys.path[0]

from autofit.cli import main

if __name__ == "__main__":
    main(prog_name="autofit")
