"""The grid of ranks and everything that depends on the machine: process groups, collectives, device, memory.

N ranks form D replicas of T tensor ranks, ``rank = d * T + t``. A *tensor group* is the T neighbours of one replica
(one node's fast links); a *slice group* is the D ranks that share ``t``. This is the only module that names a device
backend.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import psutil
import torch
import torch.distributed as dist

from hybrid import host_memory
from hybrid.peak import data_sheet_flops, measured_flops
from ops import tape
from ops.accumulate import accumulate

Axis = str  # "world", "tensor", "slice", or one of those that `ParallelMesh.slicing` names
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these two and warns under the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A rank that has waited this long for others says where, so that they find out if they wait for one another.
_PATIENCE_S = 5.0
_ROUNDS = 3  # in as many looks all of them must have been waiting in the same places
_WAITING = "hybrid/waiting"

# How long a rank that lost a peer waits before it prints, so that the log opens with the rank that failed first.
_PEER_LOST_DELAY_S = 3.0
_PEER_LOST_MARKS = (
    *("gloo", "nccl"),  # name themselves in what they raise, which is no class of torch.distributed's
    "failed on rank",  # an error that ranks shared before they raised it
)


def uses_cuda() -> bool:
    """Whether ranks compute on GPUs: where there are any, unless HYBRID_DEVICE=cpu says otherwise."""
    return os.environ.get("HYBRID_DEVICE", "cuda") != "cpu" and torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class Slicing:
    """A rank's place among weights that are cut into ``num_slices`` slices."""

    num_slices: int
    index: int  # which slice is this rank's
    pieces: Axis  # the ranks that share the slice, each with a piece of it
    slices: Axis  # ranks of one replica, one for each slice


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks of one axis that this rank is among."""

    size: int
    index: int
    process_group: dist.ProcessGroup | None  # None: this rank alone


class DivergenceError(RuntimeError):
    """Ranks have called, or their modules have run, in different orders."""


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
        self.position = "the start"  # what this rank is about to do with the others, for `wait` to compare
        self.parted = False  # ranks wait for different collectives, which will never end
        self._num_models = 0
        self._graph_pool: Any = None  # of CUDA graphs' memory, which they share: they never run at the same time
        self._peak_flops: dict[torch.dtype, float] = {}  # by what has been asked for
        self._groups: dict[Axis, _Group] = {}
        self._add_axis("world", [list(range(world_size))])
        self._add_axis("tensor", [[d * tp_size + t for t in range(tp_size)] for d in range(self.dp_size)])
        self._add_axis("slice", [[d * tp_size + t for d in range(self.dp_size)] for t in range(tp_size)])

    def _add_axis(self, axis: Axis, all_ranks: Sequence[list[int]]) -> Axis:
        """Make the process groups of an axis, of which this rank is in exactly one."""
        if axis in self._groups:
            return axis
        for ranks in all_ranks:
            process_group = None
            if len(ranks) == self.world_size > 1:
                process_group = dist.group.WORLD
            elif len(ranks) > 1:
                # Every rank takes part in making every group, members or not.
                process_group = cast("dist.ProcessGroup", dist.new_group(ranks))
            if self.rank in ranks:
                self._groups[axis] = _Group(len(ranks), ranks.index(self.rank), process_group)
        return axis

    def slicing(self, num_slices: int) -> Slicing:
        """The axes along which weights of ``num_slices`` slices are gathered; a collective the first time.

        As a rule ``num_slices`` is 1 or ``tp_size``. Key/value heads that are fewer than the tensor ranks make a
        number in between, and T / num_slices neighbours of each tensor group share a slice.
        """
        tp_size, sharers = self.tp_size, self.tp_size // num_slices
        index = self.tp_rank // sharers
        if num_slices == 1:
            return Slicing(1, 0, "world", self._add_axis("alone", [[rank] for rank in range(self.world_size)]))
        if num_slices == tp_size:
            return Slicing(num_slices, index, "slice", "tensor")
        bases = range(0, self.world_size, tp_size)
        pieces = [[base + s * sharers + r for base in bases for r in range(sharers)] for s in range(num_slices)]
        slices = [[base + s * sharers + r for s in range(num_slices)] for base in bases for r in range(sharers)]
        return Slicing(
            num_slices,
            index,
            self._add_axis(f"slice/{num_slices}", pieces),
            self._add_axis(f"tensor/{num_slices}", slices),
        )

    def count_model(self) -> int:
        """A number for a model that is laid out over this mesh, the same on every rank."""
        self._num_models += 1
        return self._num_models

    def size(self, axis: Axis) -> int:
        return self._groups[axis].size

    def index(self, axis: Axis) -> int:
        """This rank's place in its group of that axis."""
        return self._groups[axis].index

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", axis: Axis = "world") -> torch.Tensor:
        """Reduce ``tensor`` in place over the axis and return it."""
        self.start_all_reduce(tensor, op, axis, async_op=False)
        return tensor

    def start_all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", axis: Axis = "world", async_op: bool = True
    ) -> list[dist.Work]:
        """`all_reduce` that may be waited for later."""
        group = self._groups[axis]
        if group.size == 1:
            return []
        self.bytes_received += tensor.nbytes * (group.size - 1) // group.size
        return _works(dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=group.process_group, async_op=async_op))

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite a contiguous ``tensor`` in place with that of rank ``src`` and return it."""
        if self.world_size > 1:
            self.bytes_received += tensor.nbytes if self.rank != src else 0
            dist.broadcast(tensor, src=src)
        return tensor

    def reduce_scalars(self, values: Sequence[float], op: str = "sum", axis: Axis = "world") -> list[float]:
        """Reduce a few numbers in one float64 collective."""
        if self.size(axis) == 1:
            return [float(value) for value in values]
        # MPS and some accelerators lack float64, but the collectives here run on CPU or CUDA.
        return self.all_reduce(torch.tensor(values, dtype=torch.float64, device=self.device), op, axis).tolist()

    def all_gather(
        self,
        buffer: torch.Tensor,
        axis: Axis,
        *,
        piece: torch.Tensor | None = None,
        bounds: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> list[dist.Work]:
        """Fill a flat buffer with the pieces of all ranks of the axis.

        Args:
            piece: this rank's; None where it is in place already.
            bounds: where the pieces meet, size + 1 entries; equal pieces by default.
        """
        group = self._groups[axis]
        bounds = bounds or _equal_bounds(buffer, group.size)
        mine = buffer[bounds[group.index] : bounds[group.index + 1]]
        self.bytes_received += buffer.nbytes - mine.nbytes
        if self.device.type != "cpu" and group.size > 1 and _even(bounds):
            source = mine if piece is None else piece
            return _works(_all_gather_single(buffer, source, group=group.process_group, async_op=async_op))
        # gloo gathers into memory of its own and copies from there; broadcasts land in place, in half the time.
        if piece is not None:
            mine.copy_(piece)
        works = []
        for i in range(group.size if group.size > 1 else 0):
            part = buffer[bounds[i] : bounds[i + 1]]
            if part.numel():
                works += _works(dist.broadcast(part, group=group.process_group, group_src=i, async_op=async_op))
        return works

    def reduce_scatter(
        self,
        buffer: torch.Tensor,
        axis: Axis,
        total: torch.Tensor,
        *,
        bounds: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> PendingSum:
        """Add the sum over the axis of this rank's piece of ``buffer`` to ``total``, once the result is waited for.

        Args:
            buffer: flat, left undefined.
            total: of the piece's size; it may be of a wider dtype.
            bounds: as in `all_gather`.
        """
        group = self._groups[axis]
        bounds = bounds or _equal_bounds(buffer, group.size)
        mine = buffer[bounds[group.index] : bounds[group.index + 1]]
        if group.size == 1:
            return PendingSum([], [mine], total)
        self.bytes_received += mine.nbytes * (group.size - 1)
        if self.device.type != "cpu" and _even(bounds):
            works = _works(_reduce_scatter_single(mine, buffer, group=group.process_group, async_op=async_op))
            return PendingSum(works, [mine], total)
        # gloo would reduce the whole buffer on every rank. Each rank's pieces sent to it and summed there, in the dtype
        # of the total, move the fewest bytes and round once.
        sizes = [high - low for low, high in zip(bounds, bounds[1:], strict=False)]
        received = buffer.new_empty(mine.numel() * group.size)
        work = dist.all_to_all_single(
            received, buffer, [mine.numel()] * group.size, sizes, group=group.process_group, async_op=async_op
        )
        return PendingSum(_works(work), received.split(mine.numel()) if mine.numel() else [], total, keep=buffer)

    def all_gather_object(self, value: Any, axis: Axis = "world") -> list[Any]:
        if self.size(axis) == 1:
            return [value]
        values: list[Any] = [None] * self.size(axis)
        dist.all_gather_object(values, value, group=self._groups[axis].process_group)
        return values

    def all_gather_int(self, value: int) -> list[int]:
        """One number of every rank, on the host."""
        if self.world_size == 1:
            return [value]
        device = self._device_of_host_data()
        values = torch.empty(self.world_size, dtype=torch.int64, device=device)
        work = _all_gather_single(values, torch.tensor([value], device=device), async_op=True)
        self.wait(_works(work), on_host=device.type == "cpu")
        return values.tolist()

    def exchange_objects(self, outgoing: Sequence[Sequence[Any]]) -> list[Any]:
        """Send objects to the ranks they are for, pickled: ``outgoing[r]`` goes to rank r. Every rank calls it.

        Returns:
            What all ranks had for this one, by rank and in each one's order. Tensors should be on the host: one of a
            GPU's comes back on the GPU that has its number.

        Raises:
            ValueError: ``outgoing`` is not one list for each rank.
        """
        if len(outgoing) != self.world_size:
            raise ValueError(f"outgoing has {len(outgoing)} lists for {self.world_size} ranks; give one for each")
        if self.world_size == 1:
            return list(outgoing[0])
        packed = [pickle.dumps(list(o)) if len(o) and r != self.rank else b"" for r, o in enumerate(outgoing)]
        sizes = [len(part) for part in packed]
        received_sizes = self._all_to_all(torch.tensor(sizes), [1] * self.world_size, [1] * self.world_size).tolist()
        sent = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: sum(sizes)]
        received = self._all_to_all(sent, sizes, received_sizes)
        self.bytes_received += received.nbytes
        lists = [pickle.loads(part.numpy().data) if part.numel() else [] for part in received.split(received_sizes)]
        lists[self.rank] = list(outgoing[self.rank])
        return [each for objects in lists for each in objects]

    def _all_to_all(self, sent: torch.Tensor, sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        """Stretches of a flat tensor on the host, one for each rank of the world, for those that they had for this."""
        device = self._device_of_host_data()
        received = torch.empty(sum(received_sizes), dtype=sent.dtype, device=device)
        work = dist.all_to_all_single(received, sent.to(device), received_sizes, sizes, async_op=True)
        self.wait(_works(work), on_host=device.type == "cpu")
        return received.cpu()

    def _device_of_host_data(self) -> torch.device:
        """Where to put what is on the host so that the world can move it."""
        # A gloo group moves it without waiting for the device; one of NCCL alone cannot.
        return torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else self.device

    def wait(self, works: Iterable[dist.Work], *, on_host: bool | None = None) -> None:
        """Wait for collectives, and find out where ranks wait for one another's different ones.

        A rank whose host has waited for a while says where; once all have for longer, in different places, none can go
        on.

        Args:
            on_host: whether waiting blocks the host; by default where the mesh's device is the CPU.

        Raises:
            DivergenceError: so it is; the message says where each rank is.
        """
        patience = _PATIENCE_S if (self.device.type == "cpu" if on_host is None else on_host) else None
        told = False
        try:
            for work in works:
                seen: list[list[str] | None] = []
                while not _done_within(work, patience):
                    told = True
                    seen = [*seen, self._compare_positions()][-_ROUNDS:]
                    self._raise_if_parted(seen)
        finally:
            if told and not self.parted:  # else the others have yet to read it
                _store().set(f"{_WAITING}/{self.rank}", "")

    def _raise_if_parted(self, seen: Sequence[list[str] | None]) -> None:
        places = seen[-1]
        if places is None or len(set(places)) == 1 or len(seen) < _ROUNDS or any(other != places for other in seen):
            return
        self.parted = True
        said = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
        raise DivergenceError(
            f"ranks have parted and wait for one another: {said}. Every rank must run the same modules in the same "
            "order and call forward, backward and step equally often"
        )

    def _compare_positions(self) -> list[str] | None:
        """Where all ranks are waiting; None while one of them is not."""
        store = _store()
        store.set(f"{_WAITING}/{self.rank}", self.position)
        keys = [f"{_WAITING}/{rank}" for rank in range(self.world_size)]
        places = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        return places if all(places) else None

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
        return host_memory.free_bytes() // self.local_size

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

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second at which this rank's device multiplies matrices of a dtype, at best.

        In fp16 and bf16 that is a GPU's data sheet, if it is known by its name; otherwise a large product, timed the
        first time. No collective: ranks may differ by what a measurement does.
        """
        if dtype not in self._peak_flops:
            known = None
            if self.device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
                known = data_sheet_flops(torch.cuda.get_device_name(self.device))
            size = 4096 if self.device.type == "cuda" else 1024
            self._peak_flops[dtype] = known or measured_flops(self.device, dtype, size, self.synchronize)
        return self._peak_flops[dtype]

    def synchronize(self) -> None:
        """Wait for the device; what is timed afterwards has really happened."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record the kernels of a call as a CUDA graph, or on a host as a tape.

        Args:
            compute: works on tensors that stay where they are, and asks nothing of the device.

        Returns:
            what launches the kernels again, over what those tensors then hold; it gives the tensor that ``compute``
            returned, overwritten each time, and on a host a new one. A graph's memory comes from one pool for all
            graphs that are alive.

        Raises:
            NotRecordable: on a host, where ``compute`` goes by the numbers in a tensor.
        """
        if self.device.type != "cuda":
            return tape.record(compute)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # libraries set up their workspaces on a first call, which no graph may hold
            compute()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            output = compute()
        self._graph_pool = graph.pool()

        def launch() -> torch.Tensor:
            graph.replay()
            return output

        return launch

    def empty_cache(self) -> None:
        """Give back to the system what the allocator keeps but nobody uses."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            host_memory.give_back_freed()

    def make_room(self) -> None:
        """`empty_cache` for a mode that allocates otherwise than the last one did; on a host where there is no room.

        What is given back there has to be mapped and zeroed anew in the next step, a tenth of its time. So a rank that
        could take as much memory again as it holds keeps what it has.
        """
        if self.device.type == "cuda" or self.free_memory() < self.memory_in_use():
            self.empty_cache()


class PendingSum:
    """Pieces that will be added to a total; `wait` does it, once."""

    def __init__(
        self,
        works: list[dist.Work],
        pieces: Sequence[torch.Tensor],
        total: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> None:
        # Pieces that are views of a buffer keep it; what is sent from a buffer of its own must outlive the sending too.
        self._works, self._pieces, self._total, self._keep = works, pieces, total, keep

    def wait(self, mesh: ParallelMesh) -> None:
        mesh.wait(self._works)
        for piece in self._pieces:
            accumulate(self._total, piece)
        self._works, self._pieces, self._keep = [], [], None


def _done_within(work: dist.Work, seconds: float | None) -> bool:
    """Wait for a collective; False if it took longer, and it goes on."""
    if seconds is None:
        work.wait()
        return True
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended since, or failed, and raises why
    return True


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _equal_bounds(buffer: torch.Tensor, num_pieces: int) -> list[int]:
    """Where equal pieces of a flat buffer meet."""
    piece = buffer.numel() // num_pieces
    return [piece * i for i in range(num_pieces + 1)]


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _even(bounds: Sequence[int]) -> bool:
    return all(high - low == bounds[1] - bounds[0] for low, high in zip(bounds, bounds[1:], strict=False))


def init_parallel(
    tp_size: int = 1,
    *,
    timeout_s: float = 1800,
    threads: int | Literal["auto"] = "auto",
    keep_freed_memory: bool = True,
) -> ParallelMesh:
    """Join the world that the environment describes (RANK, LOCAL_RANK, WORLD_SIZE, as torchrun sets them).

    Without those variables this is a world of one process, and no process group is made. A process group that exists
    already is used as it is. Host threads are shared out between the ranks of a machine: two ranks that each start
    as many threads as there are cores slow each other down twentyfold.

    Args:
        keep_freed_memory: on a CPU, have the process keep freed buffers for the next ones, as on a GPU torch does.

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
    elif keep_freed_memory:
        host_memory.keep_freed()
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
    else:
        if not (dist.is_available() and dist.is_initialized()):
            return
        meet_at_the_end()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by way of the interpreter's end, which now and then destroys a process group's threads while they run
        # ("terminate called without an active exception") and turns a run that went well into a failure.
        os._exit(0)


def meet_at_the_end() -> None:
    """Wait for the other ranks, if there are any: one that left early would take down those still talking to it."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.barrier()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error says that another rank failed rather than this one."""
    marked = isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _PEER_LOST_MARKS)
    return marked or isinstance(error, dist.DistError)
