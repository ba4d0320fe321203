"""Calibration: statistics of the base model, quantization methods that use them, and the quality gate."""

from .evaluation import HeadScore, HeldOut, Report, evaluate, held_out
from .hessian import Hessian, prepare_hessian
from .quantizer import CalibratedQuantizer
from .solve import CALIBRATED_METHODS, SolveReport, solve
from .statistics import Statistics

__all__ = [
    "CALIBRATED_METHODS",
    "CalibratedQuantizer",
    "HeadScore",
    "HeldOut",
    "Hessian",
    "Report",
    "SolveReport",
    "Statistics",
    "evaluate",
    "held_out",
    "prepare_hessian",
    "solve",
]
