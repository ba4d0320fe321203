"""Mixed precision: a dtype for each matrix of each head, from what its rounding costs in acceptance."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..checkpoints import MedusaHeads
from ..checkpoints.heads import LM_HEAD, WEIGHT, TensorId
from ..errors import InputError
from ..plan import Choice
from ..quantization import QuantizedWeight, Scheme, quantize_weight
from .calibrated import judge
from .evaluation import HeldOut
from .forward import Matrix

# What a matrix may become, from dear to cheap. fp16 is the start: nothing lost.
OPTIONS: tuple[tuple[str, int | None], ...] = (
    ("fp16", None),
    ("int8", -1),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
)
# A loss in acceptance is counted in whole drafts; KL tells apart what costs none on these states.
_KL_WEIGHT = 1e-3

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Point:
    """One step of the curve: bytes of all matrices, predicted acceptance length, and what changed last."""

    bytes: int
    acceptance: float
    changed: Choice | None

    def as_dict(self) -> dict[str, Any]:
        changed = None if self.changed is None else vars(self.changed)
        return {"bytes": self.bytes, "acceptance_length": self.acceptance, "changed": changed}


@dataclass(frozen=True)
class MixedPlan:
    """choices: matrices that leave fp16. curve: from all fp16 to the choice. source_acceptance: fp16's."""

    choices: tuple[Choice, ...]
    curve: tuple[Point, ...]
    source_acceptance: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "dtype": "fp16",
            "choices": [vars(choice) for choice in self.choices],
            "source_acceptance_length": self.source_acceptance,
            "curve": [point.as_dict() for point in self.curve],
        }


@dataclass(frozen=True)
class _Cost:
    choice: Choice
    bytes: int
    loss: float


def plan_mixed(
    heads: MedusaHeads,
    data: HeldOut,
    *,
    budget: int | None = None,
    max_loss: float | None = None,
    method: str = "mse",
    shared: Matrix | None = None,
    progress: Progress | None = None,
) -> MixedPlan:
    """The cheapest dtypes within a budget of bytes, or within a share of acceptance that may be lost.

    Each matrix is rounded alone (method rtn or mse) in every option and the heads judged on the held-out
    states; losses are taken to add up. From all fp16, the change that costs least per byte saved is made
    until the bytes fit `budget`, or the next would lose more than `max_loss` of the acceptance length.
    Raises InputError where not exactly one limit is given, or even the cheapest options exceed the budget.
    """
    if (budget is None) == (max_loss is None):
        raise InputError(
            "mixed precision needs one limit", fix="pass --budget-mb X or --max-acceptance-loss Y"
        )
    start = judge(heads, data, heads, shared).acceptance
    costs = _measure(heads, data, method, start, shared, progress)
    current = {key: options[0] for key, options in costs.items()}
    total, loss = sum(cost.bytes for cost in current.values()), 0.0
    curve = [Point(total, start, None)]
    queue: list[tuple[float, int, tuple[int, str], int]] = []
    for number, key in enumerate(costs):
        _offer(queue, costs[key], 0, key, number)
    while queue and (budget is None or total > budget):
        _, number, key, index = heapq.heappop(queue)
        before, after = current[key], costs[key][index]
        if max_loss is not None and loss + after.loss - before.loss > max_loss * start:
            continue
        current[key], total, loss = after, total + after.bytes - before.bytes, loss + after.loss - before.loss
        curve.append(Point(total, start - loss, after.choice))
        _offer(queue, costs[key], index, key, number)
    if budget is not None and total > budget:
        raise InputError(
            "the budget is below what the cheapest dtypes take",
            expected=f"at least {total / 1e6:.2f} MB",
            found=f"{budget / 1e6:.2f} MB",
        )
    chosen = tuple(cost.choice for cost in current.values() if cost.choice.dtype != "fp16")
    return MixedPlan(chosen, tuple(curve), start)


def _offer(
    queue: list[tuple[float, int, tuple[int, str], int]],
    options: list[_Cost],
    index: int,
    key: tuple[int, str],
    number: int,
) -> None:
    """Queue the best next change of a matrix: that with the least loss per byte saved."""
    rest = [
        ((option.loss - options[index].loss) / (options[index].bytes - option.bytes), later)
        for later, option in enumerate(options)
        if later > index and option.bytes < options[index].bytes
    ]
    if rest:
        price, later = min(rest)
        heapq.heappush(queue, (price, number, key, later))


def _measure(
    heads: MedusaHeads,
    data: HeldOut,
    method: str,
    start: float,
    shared: Matrix | None,
    progress: Progress | None,
) -> dict[tuple[int, str], list[_Cost]]:
    matrices = [tensor for tensor in heads if tensor.id.role in (WEIGHT, LM_HEAD)]
    keys = list(dict.fromkeys((tensor.id.head, tensor.id.role) for tensor in matrices))
    costs: dict[tuple[int, str], list[_Cost]] = {}
    for number, (head, role) in enumerate(keys):
        if progress is not None:
            progress(number, len(keys))
        own = [tensor for tensor in matrices if (tensor.id.head, tensor.id.role) == (head, role)]
        costs[head, role] = []
        worst = 0.0
        for dtype, group_size in OPTIONS:
            choice = Choice(head, role, dtype, group_size)
            if dtype == "fp16":
                costs[head, role].append(_Cost(choice, sum(2 * tensor.numel for tensor in own), 0.0))
                continue
            changed, size = _rounded(heads, [tensor.id for tensor in own], choice, method)
            report = judge(changed, data, heads, shared)
            loss = start - report.acceptance + _KL_WEIGHT * (report.heads[head].kl or 0.0)
            # Chance may make a coarser rounding look better than a finer one.
            worst = max(worst, loss)
            costs[head, role].append(_Cost(choice, size, worst))
    return costs


def _rounded(heads: MedusaHeads, ids: list[TensorId], choice: Choice, method: str) -> tuple[MedusaHeads, int]:
    tensors, size = dict(heads.tensors), 0
    for tensor_id in ids:
        tensor = tensors[tensor_id]
        weight = tensor.load()
        assert isinstance(weight, Tensor)
        scheme = Scheme.for_dtype(choice.dtype, choice.group_size)
        quantized, _ = quantize_weight(weight, scheme, method)
        size += quantized.nbytes
        tensors[tensor_id] = replace(tensor, dtype=choice.dtype, load=partial(_same, quantized))
    return replace(heads, tensors=tensors), size


def _same(value: QuantizedWeight) -> QuantizedWeight:
    return value
