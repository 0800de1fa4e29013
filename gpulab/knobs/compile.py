"""torch.compile, in place and undone afterwards, for the modules that a cell calls."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpulab.formatting import while_s
from gpulab.knobs.description import is_compiled
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, Value, Verification, cannot_tell, no_effect, took_effect
from gpulab.knobs.observation import Observation, trace_counts
from gpulab.knobs.preparation import PreparationEnded, endable
from gpulab.patching.hook_points import Call, Layer, around_outermost
from gpulab.run import Run

if TYPE_CHECKING:
    from torch.nn import Module

COMPILER = "torch._dynamo.convert_frame"  # on the stack while a call is compiled
IN_TRACE = re.compile(r"Torch-Compiled Region|CompiledFxGraph|CompiledFunction")
FIRST_CAPABILITY = 7.0  # lowest compute capability that Triton supports
# torch 2.13: aliases of modules, compiled functions, resumed frames, builtins
DYNAMOS = ("__import_", "__compiled_fn", "__resume_at", "__builtins_dict__")


class DynamoNames:
    """The names that Dynamo adds to the namespace of compiled code. They are removed when nothing uses them."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def add_module(self, module: Module) -> None:
        for part in module.modules():
            forward = getattr(type(part), "forward", None)
            names = getattr(forward, "__globals__", None)
            if names is not None:
                self._before.setdefault(id(names), (names, frozenset(n for n in names if n.startswith(DYNAMOS))))

    def remove(self) -> None:
        """Remove all new names. Compiled code reads them, so it must be gone by now."""
        for names, before in self._before.values():
            for name in [n for n in names if n.startswith(DYNAMOS) and n not in before]:
                del names[name]
        self._before.clear()
        _forget_hooks()


def _forget_hooks() -> None:
    """Drop Dynamo's hooks: they would remove the same names again and print a KeyError for each (torch 2.13)."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    instance = getattr(getattr(dynamo, "CleanupManager", None), "instance", None)
    for hooks in getattr(instance, "values", {}).values():
        hooks[:] = [hook for hook in hooks if hook.name in hook.scope]


class Compile(Knob):
    """Compiles each outermost module with parameters at its first call, as `Module.compile` does.

    Dynamo keeps the compiled code, so that further blocks do not compile again; `forget` drops it.
    """

    name = "compile"
    lesson = "08_fused_kernels"
    title = "torch.compile"
    help = "Fuses operations and launches fewer kernels; the first steps compile. reduce-overhead adds CUDA graphs"
    kind = "module call"
    options = ("off", "default", "reduce-overhead")
    climb_values = ("default",)  # a rule proposes reduce-overhead if launches are the cause
    slow_to_prepare = True
    spellings = {"on": "default", "true": "default"}
    refusal_rests_on = ("device", "modules")
    helps_against = {"launch_bound": 1, "memory_bound_ops": 1}

    def __init__(self) -> None:
        self._others: bool | None = None  # code compiled before the experiment exists; None: no experiment yet
        self._names = DynamoNames()
        self._switched_off = False  # whether the last value switched compiling off

    def value_in(self, observation: Observation) -> Value | None:
        """Off; None for a compiled cell, whose mode cannot be determined."""
        trained = [m for m in observation.modules if m.parameter_count]
        return "off" if trained and not any(m.compiled for m in trained) else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Refuses without a module or a compiler, or if the cell itself compiles."""
        modules = [m for m in observation.modules if m.parameter_count]
        if not modules:
            return "your code calls no torch.nn.Module with parameters"
        if value == "off":
            return None
        if any(m.compiled for m in modules):
            return "your code already calls torch.compile: change that call"
        if observation.differentiates_twice:
            return "your code differentiates a gradient (create_graph=True), which compiled code cannot (torch 2.13)"
        if observation.device.kind == "cuda":
            return _no_gpu_compiler(observation)
        if value == "reduce-overhead":
            return "reduce-overhead needs CUDA graphs, and this run's device is the CPU; use compile=default"
        return _no_cpp_compiler()

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Compile at the first call; afterwards the modules call their own code again.

        Set to off, all compiled code runs as written, also code that the cell itself compiled.
        """
        self._switched_off = value == "off"
        if self._switched_off:
            if "torch" in sys.modules:
                undo.enter_context(sys.modules["torch"].compiler.set_stance("force_eager"))
            return
        if self._others is None:
            self._others = _something_is_compiled()
        compiling = Compiling(str(value), effects, self._names)
        undo.callback(compiling.put_back)
        undo.enter_context(around_outermost(Layer.COMPILED, compiling.around))

    def forget(self) -> None:
        """Drop the compiled code, unless that would drop the user's own, too."""
        others, self._others = self._others, None
        if others is not False or not _something_is_compiled():
            return
        import torch
        from torch._inductor.async_compile import shutdown_compile_workers

        torch.compiler.reset()
        shutdown_compile_workers()
        self._names.remove()

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        counts = trace_counts(run)
        regions = [n for n in counts or () if IN_TRACE.search(n)]
        if value == "off":
            if not any(m.compiled for m in observation.modules):
                return no_effect("the baseline compiles nothing")
            if counts is None:
                return cannot_tell("compiled calls were disabled, but there is no trace to show it")
            if regions:
                return no_effect(f"“{regions[0]}” is in the trace")
            return took_effect("no compiled region in the trace")
        compiled = effects.counts["modules compiled"] - len(effects.refusals)
        if compiled <= 0:
            return no_effect("; ".join(effects.refusals) or "no module was called")
        if counts is None:
            return cannot_tell(f"{compiled} modules were compiled, but there is no trace to show that they ran")
        return took_effect(f"“{regions[0]}” in the trace") if regions else no_effect("no compiled region in the trace")

    def without(self, observation: Observation) -> Observation:
        """Removes the knob's own mark: unless it is set to off, the cell compiles no module, or the knob refuses."""
        if self._switched_off:
            return observation
        return replace(observation, modules=tuple(replace(m, compiled=False) for m in observation.modules))

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        mode = "" if value == "default" else f'mode="{value}"'
        return CodeEdit(
            "# remove torch.compile" if value == "off" else f"model.compile({mode})  # once, before the loop"
        )


class Compiling:
    """Compiles modules at their first call; `put_back` removes the compiled calls."""

    def __init__(self, mode: str, effects: KnobEffects, names: DynamoNames) -> None:
        self._mode = mode
        self._names = names
        self._effects = effects
        self._modules: dict[int, Module] = {}
        self._compiled: list[Module] = []
        self._ended = False  # the time for compiling is over

    def around(self, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One outermost call. A module that cannot be compiled runs as it is, and the reason is noted."""
        if id(module) not in self._modules:
            self._modules[id(module)] = module
            self._compile(module)
        if not any(m is module for m in self._compiled):
            return call(args, kwargs)
        from torch._dynamo.exc import TorchDynamoException

        began = time.monotonic()
        try:
            with endable(COMPILER):
                return call(args, kwargs)
        except TorchDynamoException as e:
            words = " ".join(str(e).split("\n\n")[0].split())
            why = f"failed to compile ({type(e).__name__}: {words[:160]})"
        except PreparationEnded:
            why = f"did not compile within {while_s(time.monotonic() - began)}"
            self._ended = True
        self._effects.refuse(f"{type(module).__name__} {why}")
        self._take_off(module)
        return call(args, kwargs)

    def _compile(self, module: Module) -> None:
        own = any(is_compiled(m) for m in module.modules())
        if self._ended or own or next(module.parameters(), None) is None:
            return
        import torch

        self._names.add_module(module)
        vars(module)["_compiled_call_impl"] = torch.compile(_call(module), mode=self._mode)
        self._compiled.append(module)
        self._effects.count("modules compiled")

    def _take_off(self, module: Module) -> None:
        vars(module).pop("_compiled_call_impl", None)
        self._compiled = [m for m in self._compiled if m is not module]

    def put_back(self) -> None:
        for module in list(self._compiled):
            self._take_off(module)


def _call(module: Module) -> Any:
    """The call that `Module.compile` compiles; for torch's own classes (`Sequential`) it silently compiles nothing."""
    from torch._dynamo import external_utils, trace_rules

    own = trace_rules.check(module.forward)
    return external_utils.wrap_inline(module._call_impl) if own else module._call_impl


def _something_is_compiled() -> bool:
    """Whether anything went through torch.compile. An optimizer alone also loads Dynamo, with no back end."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(b is not None for b in getattr(dynamo, "cached_backends", {}).values())


def _no_cpp_compiler() -> str | None:
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(command.split()[0]) is None:
        return f"torch.compile needs a C++ compiler on the CPU, and there is no {command} (Debian: apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "torch.compile needs Python's header files on the CPU (Debian: apt install python3-dev)"
    return _space_in_its_paths()


def _space_in_its_paths() -> str | None:
    """Why a path with a space prevents compiling: PyTorch (2.13) splits the command line at spaces."""
    import torch

    paths = [sysconfig.get_path("include"), str(Path(torch.__file__).parent)]
    spaced = next((path for path in paths if any(c.isspace() for c in path)), None)
    if spaced is None:
        return None
    return f"on the CPU torch.compile fails if a path contains a space, as {spaced} does"


def _no_gpu_compiler(observation: Observation) -> str | None:
    capability = observation.device.details.get("compute_capability")
    if capability and float(capability) < FIRST_CAPABILITY:
        has = f"{observation.device.name} has {capability}"
        return f"torch.compile needs a GPU with compute capability {FIRST_CAPABILITY} or higher, and {has}"
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on the GPU: pip install triton"
    compiler = os.environ.get("CC") or next((c for c in ("gcc", "clang") if shutil.which(c)), "")
    if not compiler or shutil.which(compiler.split()[0]) is None:
        return "Triton needs a C compiler, and neither gcc nor clang is installed (Debian: apt install gcc)"
    return None


COMPILE = Compile()
