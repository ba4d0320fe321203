"""Heads in several dtypes side by side: speed, acceptance, size and quality, measured in one run."""
