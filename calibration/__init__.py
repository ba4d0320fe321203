"""Calibration: statistics of the base model, quantization methods that use them, and the quality gate."""
