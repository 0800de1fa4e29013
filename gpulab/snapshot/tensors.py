"""The values of tensors, copied once per piece of memory and written back into that same memory.

What is copied are bytes of storages, not tensors: tied weights and views are copied once and stay tied, strides and
memory formats are never touched, and autograd's version counters do not move. A GPU's bytes stay on it while they are
at most GPU_SHARE of its free memory, else they go to the host.

Always copied is what trains: parameters, buffers, what an optimizer, a scheduler or a scaler holds, leaf tensors that
require a gradient, gradients. Other tensors are copied too where they are small or shaped like a weight (an average of
the weights); the rest is watched by autograd's version counter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.devices import gpus
from gpulab.devices.cgroups import free_host_bytes
from gpulab.errors import GpulabError
from gpulab.formatting import size
from gpulab.snapshot.containers import ObjectPath

if TYPE_CHECKING:
    import torch

GPU_SHARE = 0.3  # of the GPU's free memory may go into copies
SMALL_BYTES = 2**20  # of a tensor that is no training state
SMALL_TOTAL_BYTES = 64 * 2**20


class TooLarge(GpulabError):
    """The copies do not fit into the host's free memory."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        self.bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"A copy of the training's state takes {size(needed_bytes)} and the host has "
            f"{size(free_bytes)} free: the state cannot be restored between runs."
        )


class Met(Struct):
    """A tensor that was met; `training`: it is part of what trains."""

    tensor: torch.Tensor
    place: ObjectPath
    training: bool


class Form:
    """All of a tensor but its values: the memory it looks at and how, whether it requires a gradient, which it has."""

    __slots__ = ("_alias", "_grad", "_is_leaf", "_requires_grad", "_seen", "met")

    def __init__(self, met: Met) -> None:
        tensor = met.tensor
        self.met = met
        self._alias = tensor.detach()
        self._seen = _view_of(tensor)
        self._is_leaf, self._requires_grad = tensor.is_leaf, tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        """Make it as it was. Raises RuntimeError where torch refuses."""
        tensor = self.met.tensor
        if _view_of(tensor) != self._seen:
            tensor.data = self._alias
        if not self._is_leaf:
            return
        if not tensor.is_leaf:
            tensor.detach_()
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if tensor.grad is not self._grad:
            tensor.grad = self._grad


class Piece:
    """A contiguous piece of a storage, and a copy of it once `copy` was called."""

    __slots__ = ("_copied", "_live", "_storage", "end", "start")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        import torch

        self._storage, self.start, self.end = storage, start, end
        width = next(w for w in _DTYPES if not (start % w or end % w or storage.data_ptr() % w))
        view = torch.empty(0, dtype=getattr(torch, _DTYPES[width]), device=storage.device)
        self._live = view.set_(storage, start // width, ((end - start) // width,), (1,))
        self._copied: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        return self.end - self.start

    @property
    def gpu(self) -> int | None:
        """The GPU it lies on; None elsewhere."""
        device = self._storage.device
        return device.index if device.type == "cuda" else None

    @property
    def kept_on(self) -> int | None:
        """The GPU that holds the copy; None: the host."""
        return None if self._copied is None or self._copied.device.type != "cuda" else self._copied.device.index

    def copy(self, *, to_host: bool) -> None:
        """Remember the bytes; on the host also where the GPU turns out to be full."""
        import torch

        if self.gpu is None:
            self._copied = self._live.clone()
            return
        try:
            self._copied = self._live.cpu() if to_host else self._live.clone()
        except torch.cuda.OutOfMemoryError:  # free, but in pieces
            self._copied = self._live.cpu()

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._copied is not None
        if self._storage.nbytes() < self.end:  # a sharding library gave the memory away
            self._storage.resize_(self.end)
        return self._live, self._copied


class Tensors:
    """The tensors that were met. `copy` may refuse; `put_back` can be called again and again."""

    def __init__(self, met: Iterable[Met]) -> None:
        self.could_not: list[str] = []
        usable = []
        for candidate in met:
            obstacle = _obstacle(candidate.tensor)
            if obstacle is None:
                usable.append(candidate)
            elif candidate.training:
                self.could_not.append(f"`{candidate.place}`: {obstacle}")
        copied, watched = _divided(usable)
        self._forms = [Form(m) for m in copied]
        self._pieces = _pieces([m.tensor for m in copied])
        self._watched = [(m, _version(m.tensor)) for m in watched]
        self._others = [(m, _version(m.tensor)) for m in copied if not m.training]
        self.bytes = sum(p.bytes for p in self._pieces)
        self.gpu_bytes: dict[int, int] = {}  # copies kept on each GPU

    def copy(self) -> None:
        """Remember all values, once the GPUs in use have computed them. Raises TooLarge and DeviceLost."""
        import torch

        gpus.synchronize(self._gpus)
        sums = _sums((p.gpu, p.bytes) for p in self._pieces)
        roomy = {gpu for gpu, n in sums.items() if gpu is not None and n <= GPU_SHARE * gpus.free_bytes(gpu)}
        needed, free = sum(n for gpu, n in sums.items() if gpu not in roomy), free_host_bytes()
        if free is not None and needed > free:
            raise TooLarge(needed, free)
        with torch.no_grad():
            for piece in self._pieces:
                piece.copy(to_host=piece.gpu not in roomy)
        gpus.synchronize(self._gpus)  # the code may use another stream
        kept = _sums((p.kept_on, p.bytes) for p in self._pieces)
        self.gpu_bytes = {gpu: n for gpu, n in kept.items() if gpu is not None}

    @property
    def _gpus(self) -> set[int]:
        return {p.gpu for p in self._pieces if p.gpu is not None}

    def changed(self) -> tuple[list[ObjectPath], list[ObjectPath]]:
        """Tensors of the user's that are no training state and have changed: those put back, and those not."""
        put_back, left = _changed(self._others), _changed(self._watched)
        return [m.place for m in put_back], [m.place for m in left]

    def put_back(self) -> list[str]:
        """Put all back; says what could not be. Waits for the GPUs in use. Raises DeviceLost."""
        import torch

        failed = []
        gpus.synchronize(self._gpus)
        with torch.no_grad():
            for form in self._forms:
                try:
                    form.put_back()
                except Exception as e:  # a user's tensor type may refuse anything
                    failed.append(f"`{form.met.place}`: {str(e).partition(chr(10))[0]}")
            for live, copies in _grouped(p.pair() for p in self._pieces):
                torch._foreach_copy_(live, copies)
        gpus.synchronize(self._gpus)
        self._others = [(m, _version(m.tensor)) for m, _ in self._others]
        self._watched = [(m, _version(m.tensor)) for m, _ in self._watched]
        return failed


_DTYPES = {8: "int64", 4: "int32", 1: "uint8"}  # the widest moves fastest


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Why its values cannot be copied byte by byte; None where they can."""
    import torch
    from torch.nn.parameter import is_lazy

    kind = type(tensor)
    if is_lazy(tensor):
        return "a lazy parameter that has no values yet"
    if getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__}, whose values lie elsewhere"
    if tensor.device.type == "meta":
        return "on the meta device, without values"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"of layout {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on the device {tensor.device}"
    return None


def _divided(met: list[Met]) -> tuple[list[Met], list[Met]]:
    weights = {m.tensor.shape for m in met if m.training and m.tensor.requires_grad}
    copied, watched, small_bytes = [], [], 0
    for m in met:
        start, end = _span(m.tensor) if m.tensor.numel() else (0, 0)
        size = end - start
        is_dense = size <= 2 * m.tensor.numel() * m.tensor.element_size()
        like_weight = m.tensor.shape in weights and m.tensor.is_floating_point() and is_dense
        is_small = size <= SMALL_BYTES and small_bytes + size <= SMALL_TOTAL_BYTES
        if m.training or like_weight or is_small:
            copied.append(m)
            small_bytes += 0 if m.training or like_weight else size
        else:
            watched.append(m)
    return copied, watched


def _pieces(tensors: list[torch.Tensor]) -> list[Piece]:
    """The memory these tensors look at, none of it twice."""
    storages: dict[int, torch.UntypedStorage] = {}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            spans[storage._cdata].append(_span(tensor))
    return [Piece(storages[key], *span) for key, overlapping in spans.items() for span in _joined(overlapping)]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end in its storage; what lies between its elements is part of it."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + int(last) + 1) * size


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _sums(sizes: Iterable[tuple[int | None, int]]) -> dict[int | None, int]:
    sums: dict[int | None, int] = defaultdict(int)
    for gpu, size_bytes in sizes:
        sums[gpu] += size_bytes
    return sums


def _grouped(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """By device and type: what torch can copy in one launch."""
    groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for live, copied in pairs:
        lives, copies = groups[live.device, copied.device, live.dtype]
        lives.append(live)
        copies.append(copied)
    return groups.values()


def _changed(versions: list[tuple[Met, int | None]]) -> list[Met]:
    return [m for m, version in versions if m.place.users and _version(m.tensor) != version]


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor keeps no count
        return None


def _view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
