"""How many drafts each dtype's heads get accepted, and their agreement with the fp16 heads.

python benchmarks/accuracy.py BASE HEADS --out DIR [options of `medusa-quant compare`]
"""

from __future__ import annotations

import sys

from medusa_quant.cli import main

DEFAULTS = ["--trees", "default", "--repeats", "1"]

if __name__ == "__main__":
    # What is given later wins.
    sys.argv = ["medusa-quant", "compare", *DEFAULTS, *sys.argv[1:]]
    main()
