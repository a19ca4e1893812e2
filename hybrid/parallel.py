"""The grid of ranks and everything that depends on the machine: process groups, collectives, device, memory.

N ranks form D replicas of T tensor ranks, ``rank = d * T + t``. A *tensor group* is the T neighbours of one replica
(one node's fast links); a *slice group* is the D ranks that share ``t``. This is the only module that names a device
backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

Axis = Literal["world", "tensor", "slice"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these two and warns under the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

# How long a rank that lost a peer waits before it prints, so that the log opens with the rank that failed first.
_PEER_LOST_DELAY_S = 3.0
_PEER_LOST_MARKS = (
    *("gloo", "nccl"),  # name themselves in what they raise, which is no class of torch.distributed's
    "failed on rank",  # an error that ranks shared before they raised it
)


def uses_cuda() -> bool:
    """Whether ranks compute on GPUs: where there are any, unless HYBRID_DEVICE=cpu says otherwise."""
    return os.environ.get("HYBRID_DEVICE", "cuda") != "cpu" and torch.cuda.is_available()


class ParallelMesh:
    """D x T ranks with one process group for each axis; a group of one rank has none and moves nothing.

    ``bytes_received`` counts what collectives brought to this rank from others. It is added up where the tensors are
    handed over, never computed from a formula.
    """

    def __init__(self, *, rank: int, world_size: int, tp_size: int, local_rank: int, local_size: int) -> None:
        if tp_size < 1 or world_size % tp_size:
            divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
            raise ValueError(
                f"tp_size {tp_size} does not divide the world of {world_size} ranks; set --tp_size to one of {divisors}"
            )
        self.rank, self.world_size, self.local_rank, self.local_size = rank, world_size, local_rank, local_size
        self.tp_size, self.tp_rank = tp_size, rank % tp_size
        self.dp_size, self.dp_rank = world_size // tp_size, rank // tp_size
        self.is_main = rank == 0
        self.device = torch.device("cuda", local_rank) if uses_cuda() else torch.device("cpu")
        self.bytes_received = 0
        self._groups: dict[Axis, dist.ProcessGroup | None] = {"world": None, "tensor": None, "slice": None}
        if world_size > 1:
            self._groups["world"] = dist.group.WORLD
            for d in range(self.dp_size):
                self._new_group("tensor", [d * tp_size + t for t in range(tp_size)])
            for t in range(tp_size):
                self._new_group("slice", [d * tp_size + t for d in range(self.dp_size)])

    def _new_group(self, axis: Axis, ranks: list[int]) -> None:
        # Every rank takes part in making every group, members or not.
        if len(ranks) == self.world_size:
            self._groups[axis] = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_group(ranks)
            if isinstance(group, dist.ProcessGroup):  # else a marker for a group without this rank
                self._groups[axis] = group

    def size(self, axis: Axis) -> int:
        return {"world": self.world_size, "tensor": self.tp_size, "slice": self.dp_size}[axis]

    def index(self, axis: Axis) -> int:
        """This rank's place in its group of that axis."""
        return {"world": self.rank, "tensor": self.tp_rank, "slice": self.dp_rank}[axis]

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", axis: Axis = "world") -> torch.Tensor:
        """Reduce ``tensor`` in place over the axis and return it."""
        if self.size(axis) > 1:
            dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=self._groups[axis])
            self.bytes_received += tensor.nbytes * (self.size(axis) - 1) // self.size(axis)
        return tensor

    def reduce_scalars(self, values: Sequence[float], op: str = "sum", axis: Axis = "world") -> list[float]:
        """Reduce a few numbers in one float64 collective."""
        if self.size(axis) == 1:
            return [float(value) for value in values]
        # MPS and some accelerators lack float64, but the collectives here run on CPU or CUDA.
        return self.all_reduce(torch.tensor(values, dtype=torch.float64, device=self.device), op, axis).tolist()

    def all_gather(self, buffer: torch.Tensor, axis: Axis, async_op: bool = False) -> dist.Work | None:
        """Fill a flat buffer of equal pieces, of which this rank's is in place already."""
        size = self.size(axis)
        if size == 1:
            return None
        piece = buffer.chunk(size)[self.index(axis)]
        self.bytes_received += buffer.nbytes - piece.nbytes
        return _all_gather_single(buffer, piece, group=self._groups[axis], async_op=async_op)

    def all_gather_ranges(
        self, buffer: torch.Tensor, bounds: Sequence[int], axis: Axis, async_op: bool = False
    ) -> list[dist.Work]:
        """Fill a flat buffer whose pieces may be uneven: rank i of the axis holds ``bounds[i]:bounds[i + 1]``."""
        size = self.size(axis)
        if size == 1:
            return []
        if all(bounds[i + 1] - bounds[i] == bounds[1] for i in range(size)):
            work = self.all_gather(buffer, axis, async_op)
            return [] if work is None else [work]
        works, group = [], self._groups[axis]
        for i in range(size):
            piece = buffer[bounds[i] : bounds[i + 1]]
            if piece.numel() == 0:
                continue
            if i != self.index(axis):
                self.bytes_received += piece.nbytes
            works.append(dist.broadcast(piece, group=group, group_src=i, async_op=async_op))
        return [work for work in works if work is not None]

    def reduce_scatter(self, buffer: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Sum a flat buffer of equal pieces over the axis; returns this rank's piece, a view into the buffer."""
        size = self.size(axis)
        piece = buffer.chunk(size)[self.index(axis)]
        if size > 1:
            self.bytes_received += buffer.nbytes - piece.nbytes
            _reduce_scatter_single(piece, buffer, group=self._groups[axis])
        return piece

    def reduce_scatter_ranges(self, buffer: torch.Tensor, bounds: Sequence[int], axis: Axis) -> torch.Tensor:
        """`reduce_scatter` for pieces that may be uneven; returns this rank's piece, a view into the buffer."""
        size, index = self.size(axis), self.index(axis)
        if size == 1 or all(bounds[i + 1] - bounds[i] == bounds[1] for i in range(size)):
            return self.reduce_scatter(buffer, axis)
        for i in range(size):
            piece = buffer[bounds[i] : bounds[i + 1]]
            if piece.numel():
                dist.reduce(piece, group=self._groups[axis], group_dst=i)
        mine = buffer[bounds[index] : bounds[index + 1]]
        self.bytes_received += mine.nbytes * (size - 1)
        return mine

    def all_gather_object(self, value: Any, axis: Axis = "world") -> list[Any]:
        if self.size(axis) == 1:
            return [value]
        values: list[Any] = [None] * self.size(axis)
        dist.all_gather_object(values, value, group=self._groups[axis])
        return values

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=src)
        return box[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    # -- the machine ---------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes that this rank may still take on its device; on a host, its share of what is available."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            # What torch keeps cached but does not use is free to us as well.
            return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return psutil.virtual_memory().available // self.local_size

    def memory_in_use(self) -> int:
        """Bytes this rank holds on its device: allocated tensors on a GPU, resident memory on a host."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss

    def peak_memory(self) -> int:
        """The most bytes this rank has held on its device so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def synchronize(self) -> None:
        """Wait for the device; what is timed afterwards has really happened."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give back to the system what the allocator keeps but nobody uses."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif _MALLOC_TRIM is not None:
            # glibc keeps freed buffers of some MB in the heap of the thread that made them, where they fragment: after
            # some gathers a rank would hold several times what it uses.
            _MALLOC_TRIM(0)


def init_parallel(
    tp_size: int = 1, *, timeout_s: float = 1800, threads: int | Literal["auto"] = "auto"
) -> ParallelMesh:
    """Join the world that the environment describes (RANK, LOCAL_RANK, WORLD_SIZE, as torchrun sets them).

    Without those variables this is a world of one process, and no process group is made. A process group that exists
    already is used as it is. Host threads are shared out between the ranks of a machine: two ranks that each start
    as many threads as there are cores slow each other down twentyfold.

    Raises:
        ValueError: ``tp_size`` does not divide the world.
    """
    joined = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    if tp_size < 1 or world_size % tp_size:
        # Before the rendezvous, so that a wrong flag is answered at once. The mesh knows the sentence.
        ParallelMesh(rank=rank, world_size=world_size, tp_size=tp_size, local_rank=local_rank, local_size=local_size)
    if uses_cuda():
        torch.cuda.set_device(local_rank)
    if threads == "auto":
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, local_size))
    torch.set_num_threads(threads)
    if world_size > 1 and not joined:
        backend = "cpu:gloo,cuda:nccl" if uses_cuda() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return ParallelMesh(rank=rank, world_size=world_size, tp_size=tp_size, local_rank=local_rank, local_size=local_size)


def run_main(main: Callable[[], Any]) -> None:
    """Run a recipe's entry point so that a failure on one rank ends the world quickly, its own traceback first.

    The rank that fails prints and exits at once without waiting for its peers, whose collectives then break; they
    hold their own report back for a moment, and say that they only lost a peer. A world of one process behaves as
    Python does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        main()
        return
    rank = os.environ.get("RANK", "?")
    try:
        main()
    except SystemExit as stop:
        if not (dist.is_available() and dist.is_initialized()):
            raise
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.code if isinstance(stop.code, int) else int(stop.code is not None))  # see below
    except BaseException as error:  # noqa: BLE001  (whatever ends a rank has to end the world)
        text = traceback.format_exc()
        if _is_lost_peer(error):
            time.sleep(_PEER_LOST_DELAY_S)
            text = f"lost another rank, whose own traceback says why; here it surfaced as:\n{text}"
        print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Not sys.exit: threads of the process group would wait for peers that are waiting for us.
        os._exit(1)
    finally:
        with contextlib.suppress(RuntimeError, ValueError):
            if dist.is_initialized():
                dist.destroy_process_group()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank failed rather than this one."""
    marked = isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _PEER_LOST_MARKS)
    return marked or isinstance(error, dist.DistError)
