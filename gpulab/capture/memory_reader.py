"""Takes the ledger of a run: what fills the memory before the backward pass and before the update of an early step.

For that one step torch's `saved_tensors_hooks` record which module and line save each activation. Later ledgers have no
hooks and show how memory grows. The second is due after 20 times its cost, so that a run of seconds has one. Each
further one is due after 200 times its cost, which is 0.5 % of the time.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial, wraps
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpulab.capture.loader_facts import arrays_in
from gpulab.capture.places import Naming, users_spot
from gpulab.capture.stack_reader import Spot
from gpulab.devices.gpus import in_graph_capture, torch_with_cuda
from gpulab.memory.failure import explain, memory_error
from gpulab.memory.growth import growing_line, growth_of_runs, steady_growth
from gpulab.memory.ledger import GRAPH, Claim, claims, holdings, module_names
from gpulab.memory.owners import Owner, Walk
from gpulab.memory.room import pool_of, room_of
from gpulab.memory.storages import Key, Live, attribute, live, storages_of, unobserved
from gpulab.memory.survey import all_roots, notebook, search
from gpulab.memory_record import Growth, Ledger, MemoryAccount, Moment, Pool
from gpulab.patching.attributes import replaced
from gpulab.user_code import is_users_file

PATIENCE = 8  # backward passes without an update, after which a ledger is taken all the same
FEWEST = 3  # ledgers, for growth: with fewer the end of a block is not searched
FURTHER = 3  # passes to the second ledger, ours: far enough from the first to show growth
EARLY_SHARE, SHARE = 20, 200  # the second ledger, a later one, is due when so many times its cost has passed
MOST = 40  # ledgers
NAMING_NS = 1_000_000_000  # for the names of the rest, at the end of the run
NAMED_FRACTION = 0.01  # ours: a smaller rest is not named


class Origin(NamedTuple):
    """What saved an activation: a module by id (0: none), its class, and the user's line."""

    module: int
    class_name: str
    spot: Spot | None


class _Snapshot(NamedTuple):
    """One ledger before the rest has names. It keeps no tensor alive. `spots`: lines by their claim."""

    moment: Moment
    step: int
    sizes: dict[Key, int]
    claims: dict[Key, Claim]
    rest: dict[Key, tuple[Callable[[], Any], ...]]
    spots: dict[Claim, Spot]


class MemoryReader:
    """Ledgers of one run, on the training thread.

    `passes` counts backward passes; at number `next` there is something to do. The first ledger comes after the first
    update, when the optimizer has its states: at the last backward pass before the second update. `note` gets the cost
    of each ledger in ns, and `steps` returns the number of complete steps.
    """

    def __init__(self, note: Callable[[int], object], steps: Callable[[], int]) -> None:
        self.passes, self.next = 0, PATIENCE
        self._last_pass = PATIENCE  # with the next ledger
        self._updates = self._due_ns = 0
        self._planned = 0, 0  # when and at which pass the next ledger was planned
        self.awaits_update, self.awaits_batch = True, False
        self.cost_ns = 0
        self._retries_before = _retries()
        self._note, self._steps = note, steps
        self._hooks = ActivationHooks()
        self._origins: dict[Key, Origin] = {}
        self._batches: set[Key] = set()
        self._snapshots: list[_Snapshot] = []

    def close(self) -> None:
        """Set no hooks any more: the run is over, or something is compiled, which the hooks would make stale."""
        self._hooks.close()

    def batch(self, batch: Any) -> None:
        """A batch of the step whose ledger is taken."""
        with suppress(Exception):
            self._batches.update(s.key for array in arrays_in(batch) for s in storages_of(array))

    def backward(self) -> None:
        """Backward pass number `next` begins."""
        if self.passes < self._last_pass:  # an earlier one of several passes before the update
            self._hooks.forget()
            self.next += 1
            return
        if not self._is_due():
            return
        self._origins = self._hooks.finish()
        self._take("backward")
        self.awaits_update, self.awaits_batch = True, False
        self._plan()

    def update(self) -> None:
        """An optimizer's step begins while `awaits_update`."""
        self._updates += 1
        if self._updates == 1 and not self._snapshots:
            self._hooks.begin()
            self.awaits_batch, self.awaits_update = True, not self.passes
            self.next, self._last_pass = self.passes + 1, 2 * self.passes or PATIENCE
        elif self._updates == 1 or self._snapshots or not self.passes:
            self._hooks.finish()
            self._take("update")
            self._origins, self._batches, self.awaits_update = {}, set(), False

    def _plan(self) -> None:
        """Plan the next ledger: later ones are rarer, and none of a short run costs more than it tells."""
        now_ns, first = perf_counter_ns(), self._due_ns == 0
        self._due_ns = now_ns + int((EARLY_SHARE if first else SHARE) * self.cost_ns / max(1, len(self._snapshots)))
        self._planned = now_ns, self.passes
        self.next = self._last_pass = self.passes + FURTHER if len(self._snapshots) < MOST else 1 << 62

    def _is_due(self) -> bool:
        """Whether enough time has passed since the last ledger; if not, look again when it should have."""
        now_ns = perf_counter_ns()
        if now_ns >= self._due_ns:
            return True
        began_ns, passes = self._planned
        each_ns = (now_ns - began_ns) / max(1, self.passes - passes)
        self.next = self._last_pass = self.passes + 1 + int((self._due_ns - now_ns) / max(1.0, each_ns))
        return False

    def _take(self, moment: Moment) -> None:
        began_ns = perf_counter_ns()
        with suppress(Exception):  # a tensor type of the user's own may raise at any call
            if not in_graph_capture():
                self._snapshots.append(self._snapshot(moment))
        took_ns = perf_counter_ns() - began_ns
        self.cost_ns += took_ns
        self._note(took_ns)

    def _snapshot(self, moment: Moment) -> _Snapshot:
        now = live()
        names = module_names(now.modules) if self._origins else {}
        spots: dict[Claim, Spot] = {}
        activations = {}
        for key, origin in self._origins.items():
            owner = names.get(origin.module) or origin.class_name or "code outside modules"
            where = "" if origin.spot is None else f"{origin.spot[0]}:{origin.spot[1]}"
            activations[key] = Claim("saved activations", owner, where)
            if origin.spot is not None:
                spots[activations[key]] = origin.spot
        claimed = claims(now, activations, self._batches)
        return _Snapshot(moment, self._steps(), now.bytes, claimed, _unclaimed(now, claimed), spots)

    def finish(
        self,
        naming: Naming,
        steps: int,
        gpu: int | None,
        error: BaseException | None,
    ) -> MemoryAccount:
        """What is known once the code has ended, after `steps` complete steps and with this error.

        `gpu`: the number of the run's GPU; None: its device is the CPU.
        """
        shell, namespace = notebook()
        barriers = (shell, namespace)
        cause, failure = memory_error(error), None
        stages = partial(all_roots, shell, namespace, cause)
        if cause is not None:
            failure = explain(cause, steps, naming.words(_last_spot(cause)), stages(), barriers)
        with suppress(MemoryError):  # a ledger is worth less than the account of the failure
            if not naming.code and failure is None and len(self._snapshots) < FEWEST:
                ledgers = tuple(one for shot in self._snapshots for one in self._ledgers(shot, naming, []))
                return MemoryAccount(ledgers, pool=self._pool(gpu), room=room_of(gpu), cost_ns=self.cost_ns)
            now = live()
            purposes = claims(now, {})
            end = _Snapshot("end", max(0, steps - 1), now.bytes, purposes, _unclaimed(now, purposes), {})
            keys = _rest_keys([*self._snapshots, end])
            walk = search(dict.fromkeys(keys, 0), stages() if keys else (), NAMING_NS, barriers)
            owners = walk.owners(now.bytes)
            updates = [shot for shot in self._snapshots if shot.moment == "update"]
            shots = [*self._snapshots, end] if self._snapshots else []
            is_whole = naming.code and failure is None
            growths = _growths([*updates, end], walk, owners, naming, "cpu" if gpu is None else f"cuda:{gpu}")
            return MemoryAccount(
                ledgers=tuple(one for shot in shots for one in self._ledgers(shot, naming, owners)),
                growth=tuple(sorted(growths, key=lambda growth: -growth.bytes_each)),
                rerun=growth_of_runs(naming.code, now, stages, barriers, naming.above) if is_whole else None,
                failure=failure,
                pool=self._pool(gpu),
                room=room_of(gpu) if failure is None else failure.room,
                cost_ns=self.cost_ns,
            )
        return MemoryAccount(failure=failure, cost_ns=self.cost_ns)

    def _pool(self, gpu: int | None) -> Pool | None:
        """The allocator of the run's GPU; its retries are those of this run."""
        pool = None if gpu is None else pool_of(gpu)
        before = self._retries_before.get(f"cuda:{gpu}", 0)
        return None if pool is None else replace(pool, retries=max(0, pool.retries - before))

    def _ledgers(self, shot: _Snapshot, naming: Naming, owners: list[Owner]) -> Iterator[Ledger]:
        lines = {claim: claim._replace(line=naming.words(shot.spots.get(claim))) for claim in set(shot.claims.values())}
        alive = [owner for owner in owners if any(_is_alive(shot.rest.get(key)) for key in owner.keys)]
        for device in sorted({device for device, _ in shot.sizes}):
            sizes = {key: count for key, count in shot.sizes.items() if key[0] == device}
            claimed = {key: lines[claim] for key, claim in shot.claims.items() if key in sizes}
            yield Ledger(device, shot.step, shot.moment, holdings(sizes, claimed, alive))


def _unclaimed(now: Live, claimed: dict[Key, Claim]) -> dict[Key, tuple[Callable[[], Any], ...]]:
    """The tensors of each storage without an owner in the training; none of one that only autograd's graph holds."""
    rest: dict[Key, tuple[Callable[[], Any], ...]] = {
        key: tuple(map(weakref.ref, tensors)) for key, tensors in now.tensors.items() if key not in claimed
    }
    return rest | {key: () for key in now.graph if key not in rest and claimed[key].owner == GRAPH}


def _is_alive(references: Collection[Callable[[], Any]] | None) -> bool:
    """Whether a storage is still there; of one in a graph, which has no tensor of its own, it is assumed."""
    return references is not None and (not references or any(reference() is not None for reference in references))


def _rest_keys(snapshots: Iterable[_Snapshot]) -> set[Key]:
    """Storages without a claim that are still alive, of snapshots in which they matter."""
    keys: set[Key] = set()
    for shot in snapshots:
        if sum(shot.sizes[key] for key in shot.rest) >= NAMED_FRACTION * sum(shot.sizes.values()):
            keys |= {key for key, references in shot.rest.items() if _is_alive(references)}
    return keys


def _growths(shots: list[_Snapshot], walk: Walk, owners: list[Owner], naming: Naming, device: str) -> Iterator[Growth]:
    """The owners whose memory on the device grew by about the same amount in each step, named by what has come."""
    if len(shots) < FEWEST:
        return
    for owner in owners:
        keys = [key for key in owner.keys if key[0] == device]
        held = [sum(shot.sizes[key] for key in keys if _is_alive(shot.rest.get(key))) for shot in shots]
        points = [(shot.step, count) for shot, count in zip(shots, held, strict=True)]
        each = steady_growth(points)
        if each is not None:
            fresh = [key for key in keys if not _is_alive(shots[0].rest.get(key))]
            name = walk.name_of(owner.root, fresh or keys, shots[-1].sizes)
            line = growing_line(naming.code, name, naming.above)
            yield Growth(name, each, points[-1][0] - points[0][0], line)


def _last_spot(error: BaseException) -> Spot | None:
    """The user's innermost line in the traceback."""
    spot = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users_file(frame.f_code.co_filename):
            spot = frame.f_code.co_filename, line, frame.f_code.co_qualname
    return spot


def _retries() -> dict[str, int]:
    """How often torch's allocator on each GPU has given its cache back so far in this process."""
    torch = torch_with_cuda()
    if torch is None:
        return {}
    with suppress(Exception):
        counts = range(torch.cuda.device_count())
        return {f"cuda:{i}": int(torch.cuda.memory_stats(i).get("num_alloc_retries", 0)) for i in counts}
    return {}


# -- which module and line saves an activation -------------------------------------------------------------------------


class ActivationHooks:
    """Records, between `begin` and `finish`, what saves each activation on this thread.

    The hooks return the tensor itself, so nothing is copied. With hooks torch does not check whether a saved tensor was
    changed in place; so they do. They give way to other hooks, to what refuses hooks (`torch.func`), and to functions
    of the user's own, whose `ctx.saved_tensors` would else be other objects than those saved.
    """

    def __init__(self) -> None:
        self._origins: dict[Key, Origin] = {}
        self._stack: list[Any] = []
        self._undo = ExitStack()
        self._active = self._pushed = self._closed = False
        self._thread = get_ident()

    def close(self) -> None:
        self._closed = True
        self._end()

    def begin(self) -> None:
        """Set the hooks, unless other code has set its own or something is compiled."""
        if self._closed or get_ident() != self._thread:
            return
        import torch
        from torch.nn.modules import module as modules

        autograd: Any = torch._C._autograd
        if not hasattr(autograd, "_top_saved_tensors_default_hooks"):  # before torch 2.7 other hooks cannot be seen
            return
        self._active = True
        self._push()
        if not self._pushed:
            self._active = False
            return
        self._undo.callback(modules.register_module_forward_pre_hook(self._enter).remove)
        self._undo.callback(modules.register_module_forward_hook(self._leave, always_call=True).remove)
        self._undo.enter_context(replaced(autograd, "_saved_tensors_hooks_disable", self._giving_way))
        self._undo.enter_context(replaced(torch.autograd.function.FunctionCtx, "save_for_backward", self._giving_way))

    def forget(self) -> None:
        """Forget the origins: their activations are freed with their backward pass."""
        self._origins.clear()

    def finish(self) -> dict[Key, Origin]:
        """Remove the hooks; returns the origins by storage."""
        self._end()
        origins, self._origins = self._origins, {}
        return origins

    def _end(self) -> None:
        self._active = False
        self._undo.close()
        self._stack.clear()
        self._pop()

    def _push(self) -> None:
        """Set our hooks (again) where there are no others and none are refused."""
        import torch

        autograd: Any = torch._C._autograd
        if self._pushed or not self._active:
            return
        if autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None:
            autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._pushed = True

    def _push_again(self) -> None:
        """Not within a function of the user's own, which runs without grad."""
        import torch

        if torch.is_grad_enabled():
            self._push()

    def _pop(self) -> None:
        """Remove our hooks if they are the innermost; otherwise the next call does."""
        if not self._pushed or get_ident() != self._thread:
            return
        import torch

        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and top[0] == self._pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._pushed = False

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._pop()
            return original(*args, **kwargs)

        return call

    def _enter(self, module: Any, args: Any) -> None:
        if get_ident() == self._thread:
            self._stack.append(module)
            self._push_again()

    def _leave(self, module: Any, args: Any, result: Any) -> None:
        if get_ident() == self._thread and self._stack and self._stack[-1] is module:
            self._stack.pop()
            self._push_again()

    def _pack(self, tensor: Any) -> Any:
        if not self._active:
            self._pop()
        else:
            with suppress(Exception):
                module = self._stack[-1] if self._stack else None
                number, name = (0, "") if module is None else (id(module), type(module).__name__)
                origin = Origin(number, name, users_spot(sys._getframe(1)))
                for storage in storages_of(tensor):
                    self._origins.setdefault(storage.key, origin)
        return _without_graph(tensor), _version(tensor)

    def _unpack(self, packed: Any) -> Any:
        tensor, version = packed
        if _version(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {_version(tensor)}; expected version {version} "
                "instead."
            )
        return tensor


def _without_graph(tensor: Any) -> Any:
    """The same memory and version. A result that refers to its graph, which holds it, would never be freed."""
    with suppress(Exception):
        import torch

        if not attribute(tensor, "is_leaf"):
            plain = unobserved() if type(tensor) is torch.Tensor else torch._C.DisableTorchFunction()
            with plain:
                return torch.Tensor.detach(tensor)
    return tensor


def _version(tensor: Any) -> int:
    """How often the tensor was changed in place; 0 where nobody counts."""
    with suppress(Exception), unobserved():
        return int(attribute(tensor, "_version"))
    return 0
