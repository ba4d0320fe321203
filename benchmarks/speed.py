"""Tokens a second of each dtype's heads beside plain decoding, at batch 1, 4 and 8.

python benchmarks/speed.py BASE HEADS --out DIR [options of `medusa-quant compare`]
"""

from __future__ import annotations

import sys

from medusa_quant.cli import main

DEFAULTS = ["--batch", "1,4,8"]

if __name__ == "__main__":
    # What is given later wins.
    sys.argv = ["medusa-quant", "compare", *DEFAULTS, *sys.argv[1:]]
    main()
