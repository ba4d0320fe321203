"""Keep the project's `kernels/` folder from being imported as `kernels`, another project's package.

`python -m pytest` puts the root on sys.path, and pytest this folder: transformers then takes either's
`kernels/` for the package of that name. medusa_quant itself is found because it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (_TESTS, _TESTS.parent)]
