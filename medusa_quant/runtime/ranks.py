"""`Ranks`: the processes of one tensor-parallel run, what they exchange, and how rank 0 leads them.

Rank 0 schedules, samples and answers; the others repeat its calls on their shards (`follow`). Commands go
over gloo whatever the device, so that an idle server's ranks may wait for days.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MedusaQuantError

_END = "end"
_IDLE = timedelta(days=365)


class RankLostError(MedusaQuantError):
    """Another rank has ended; this one cannot go on."""

    exit_code = 1


class Ranks:
    """One process among `tp`; by default alone, where nothing is exchanged.

    data, control: process groups for tensors and for commands.
    """

    def __init__(self, rank: int = 0, tp: int = 1, data: Any = None, control: Any = None) -> None:
        self.rank, self.tp = rank, tp
        self._data, self._control = data, control

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def mine(self, size: int) -> slice:
        """This rank's share of `size` features, a multiple of tp."""
        width = size // self.tp
        return slice(self.rank * width, (self.rank + 1) * width)

    def gather(self, x: Tensor, blocks: int = 1) -> Tensor:
        """Shards [M, blocks * n / tp] of all ranks to the whole [M, blocks * n], block by block."""
        if self.tp == 1:
            return x
        parts = x.new_empty((self.tp, *x.shape))
        with _peers_alive():
            torch.distributed.all_gather(list(parts.unbind(0)), x.contiguous(), group=self._data)
        rows = x.shape[0]
        return parts.view(self.tp, rows, blocks, -1).permute(1, 2, 0, 3).reshape(rows, self.tp * x.shape[1])

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.tp > 1:
            with _peers_alive():
                torch.distributed.all_reduce(x, group=self._data)
        return x

    def tell(self, name: str, *arguments: Any) -> None:
        """Rank 0: have the others call `name` with these arguments. The others: nothing."""
        if self.tp > 1 and self.leads:
            self._broadcast((name, arguments))

    def end(self) -> None:
        """Rank 0: no more calls for now; `hear` gives the others None. The others: nothing."""
        self.tell(_END)

    def hear(self) -> tuple[str, tuple[Any, ...]] | None:
        """The next call that rank 0 tells of, None at the end."""
        heard: tuple[str, tuple[Any, ...]] = self._broadcast(None)
        return None if heard[0] == _END else heard

    def _broadcast(self, content: Any) -> Any:
        box = [content]
        with _peers_alive():
            torch.distributed.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What every rank does on its own and may fail at: where one fails all end, and one says why."""
        failure: MedusaQuantError | None = None
        try:
            yield
        except MedusaQuantError as error:
            failure = error
        codes: list[Any] = [None if failure is None else failure.exit_code]
        if self.tp > 1:
            codes = [None] * self.tp
            with _peers_alive():
                own = None if failure is None else failure.exit_code
                torch.distributed.all_gather_object(codes, own, group=self._control)
        failing = [rank for rank, code in enumerate(codes) if code is not None]
        if not failing:
            return
        if failure is not None and failing[0] == self.rank:
            raise failure
        raise SystemExit(codes[failing[0]])


ALONE = Ranks()


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks]:
    """The ranks torchrun started, or this process alone. At the end rank 0 lets the others go.

    Raises InputError where torch cannot run several.
    """
    tp = int(os.environ.get("WORLD_SIZE", "1"))
    if tp == 1:
        yield ALONE
        return
    if not torch.distributed.is_available():
        raise InputError(
            "this torch has no torch.distributed", fix="install one that has, or run one process"
        )
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device.startswith("cuda") else "gloo"
    torch.distributed.init_process_group(backend, timeout=timedelta(minutes=10))
    control = torch.distributed.new_group(backend="gloo", timeout=_IDLE)
    ranks = Ranks(torch.distributed.get_rank(), tp, torch.distributed.group.WORLD, control)
    try:
        yield ranks
    finally:
        with suppress(RankLostError):
            ranks.end()
        torch.distributed.destroy_process_group()


@contextmanager
def _peers_alive() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise RankLostError(
            f"another rank has ended ({str(error).splitlines()[0]}); its message says why"
        ) from error
