"""The values of tensors, copied once per piece of memory and written back into the same memory.

Bytes of storages are copied, not tensors: tied weights and views are copied once and stay tied, strides and memory
formats are untouched, and autograd's version counters do not change. Copies of a GPU's bytes stay on the GPU up to
GPU_SHARE of its free memory, else they go to the host.

Training state is always copied: parameters, buffers, tensors of an optimizer, a scheduler or a scaler, leaf tensors
that require a gradient, gradients. Other tensors are copied if they are small or shaped like a weight (an average of
the weights); for the rest, autograd's version counter shows whether they changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.devices import gpus
from gpulab.devices.cgroups import free_host_bytes
from gpulab.errors import GpulabError
from gpulab.formatting import size
from gpulab.patching.randomness import Undo
from gpulab.snapshot.containers import ChangeDetector, ObjectPath, undo_all

if TYPE_CHECKING:
    import torch

GPU_SHARE = 0.3  # of the GPU's free memory may be used for copies
SMALL_BYTES = 2**20  # limit for a tensor that is no training state
SMALL_TOTAL_BYTES = 64 * 2**20


class TooLarge(GpulabError):
    """The copies do not fit into the host's free memory."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        self.bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"A copy of the training's state takes {size(needed_bytes)} and the host has "
            f"{size(free_bytes)} free: the state cannot be restored between runs."
        )


class TensorPlace(Struct):
    """A tensor and its path; `training`: it is training state."""

    tensor: torch.Tensor
    place: ObjectPath
    training: bool


class Piece:
    """A contiguous piece of a storage, and a copy of it once `copy` was called."""

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        import torch

        self._storage, self._end, self.bytes = storage, end, end - start
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self._live = view.set_(storage, start, (self.bytes,), (1,))
        self._copied: torch.Tensor | None = None

    @property
    def gpu(self) -> int | None:
        """The GPU that holds it; None if it is elsewhere."""
        device = self._storage.device
        return device.index if device.type == "cuda" else None

    def copy(self, *, to_host: bool) -> None:
        """Save the bytes, on the host also if the GPU turns out to be full."""
        import torch

        try:
            self._copied = self._live.cpu() if to_host and self.gpu is not None else self._live.clone()
        except torch.cuda.OutOfMemoryError:  # enough free memory, but fragmented
            self._copied = self._live.cpu()

    def put_back(self) -> None:
        assert self._copied is not None
        if self._storage.nbytes() < self._end:  # a sharding library freed the memory
            self._storage.resize_(self._end)
        self._live.copy_(self._copied)


class Tensors:
    """The tensors that were reached. `copy` may refuse; `put_back` can be called repeatedly."""

    def __init__(self, tensors: Iterable[TensorPlace]) -> None:
        self.could_not: list[str] = []
        usable = []
        for one in tensors:
            obstacle = _obstacle(one.tensor)
            if obstacle is None:
                usable.append(one)
            elif one.training:
                self.could_not.append(f"`{one.place}`: {obstacle}")
        copied, others = _divided(usable)
        self._forms = [(one.place, undo_form(one.tensor)) for one in copied]
        self._pieces = _pieces([one.tensor for one in copied])
        self.not_copied = [ChangeDetector(one.place, partial(_version, one.tensor)) for one in others]
        self.bytes = sum(p.bytes for p in self._pieces)
        self._gpus = {p.gpu for p in self._pieces if p.gpu is not None}

    def copy(self) -> None:
        """Save all values, after the GPUs in use have computed them. Raises TooLarge and DeviceLost."""
        import torch

        gpus.synchronize(self._gpus)
        sums = Counter[int | None]()
        for piece in self._pieces:
            sums[piece.gpu] += piece.bytes
        roomy = {gpu for gpu in self._gpus if sums[gpu] <= GPU_SHARE * gpus.free_bytes(gpu)}
        needed, free = sum(n for gpu, n in sums.items() if gpu not in roomy), free_host_bytes()
        if free is not None and needed > free:
            raise TooLarge(needed, free)
        with torch.no_grad():
            for piece in self._pieces:
                piece.copy(to_host=piece.gpu not in roomy)
        gpus.synchronize(self._gpus)  # the code may use another stream

    def put_back(self) -> list[str]:
        """Restore all values; returns what could not be restored. Waits for the GPUs in use. Raises DeviceLost."""
        import torch

        gpus.synchronize(self._gpus)
        with torch.no_grad():
            failures = undo_all(self._forms)
            for piece in self._pieces:
                piece.put_back()
        gpus.synchronize(self._gpus)
        return failures


def undo_form(tensor: torch.Tensor) -> Undo:
    """Everything of a tensor except its values: storage, layout, `requires_grad`, and the gradient object."""
    alias, view = tensor.detach(), _view_of(tensor)
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    gradient = tensor.grad if is_leaf else None

    def undo() -> None:
        if _view_of(tensor) != view:
            tensor.data = alias
        if not is_leaf:
            return
        if not tensor.is_leaf:
            tensor.detach_()
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not gradient:
            tensor.grad = gradient

    return undo


def _view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Why the values cannot be copied byte by byte; None if they can."""
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


def _divided(tensors: list[TensorPlace]) -> tuple[list[TensorPlace], list[TensorPlace]]:
    """The tensors to copy, and the user's tensors that are only checked for changes."""
    weights = {one.tensor.shape for one in tensors if one.training and one.tensor.requires_grad}
    copied, others, small_bytes = [], [], 0
    for one in tensors:
        tensor = one.tensor
        start, end = _span(tensor)
        size = end - start
        is_dense = size <= 2 * tensor.numel() * tensor.element_size()
        if one.training or (tensor.shape in weights and tensor.is_floating_point() and is_dense):
            copied.append(one)
        elif size <= SMALL_BYTES and small_bytes + size <= SMALL_TOTAL_BYTES:
            copied.append(one)
            small_bytes += size
        elif one.place.users:
            others.append(one)
    return copied, others


def _pieces(tensors: list[torch.Tensor]) -> list[Piece]:
    """The memory of these tensors, without overlaps."""
    storages: dict[int, torch.UntypedStorage] = {}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
            spans[storage._cdata].append(_span(tensor))
    return [Piece(storages[key], *span) for key, overlapping in spans.items() for span in _joined(overlapping)]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its storage, gaps between its elements included."""
    if not tensor.numel():
        return 0, 0
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


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor keeps no count
        return None
