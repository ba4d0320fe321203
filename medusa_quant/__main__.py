"""`python -m medusa_quant`."""

from .cli import main

main()
