"""Which implementation of scaled dot product attention torch may choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec.structs import replace

from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe import trace_counts
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run

BACKENDS = {"math": "MATH", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
NOT_TRACED = (
    "whether your code uses scaled_dot_product_attention shows only in a trace, and no step was traced: "
    "run more steps, without --no-trace"
)
OPERATOR = "scaled_dot_product"


class Attention(Knob):
    """The back end of `scaled_dot_product_attention`. What it cannot take goes to math, which takes everything."""

    name = "attention"
    lesson = "08_fused_kernels"
    title = "Attention"
    help = "Backend of scaled_dot_product_attention: flash and efficient do not materialize the attention matrix"
    kind: Kind = "backend setting"
    options: tuple[Value, ...] = ("auto", "math", "efficient", "flash")
    # torch's own choice, then those that keep the attention matrix out of memory
    climb_values: tuple[Value, ...] = ("auto", "flash", "efficient")
    aliases = ("sdpa", "flash")
    spellings: Mapping[str, str] = {"mem_efficient": "efficient"}
    helps_against: Mapping[str, int] = {"unfused_attention": 1}

    def value_in(self, observation: Observation) -> Value | None:
        """torch chooses, as far as can be seen; which it chose is the observation's `attention`."""
        return "auto" if _has_attention(observation) else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if not _has_attention(observation) and not observation.operators:
            return NOT_TRACED
        if not _has_attention(observation):
            return "your code never calls scaled_dot_product_attention; hand-written attention has no backends"
        if value == "efficient" and observation.device.kind == "cpu":
            return "efficient attention needs a GPU; on the CPU choose math or flash"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Allow this back end, for the whole process; regions of the cell's own that choose one still do."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        effects = KnobEffects()
        if value == "auto":
            yield effects
            return
        allowed = [getattr(SDPBackend, BACKENDS[str(value)]), SDPBackend.MATH]
        with sdpa_kernel(list(dict.fromkeys(allowed))):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        counts = trace_counts.counts(run)
        if counts is None:
            return Verification("cannot tell", "no trace to show which backend ran")
        forward = {n: c for n, c in counts.items() if not n.endswith("_backward")}
        ran = {n.removeprefix("aten::"): c for n, c in forward.items() if n.startswith(f"aten::_{OPERATOR}")}
        if not ran and value == "math" and observation.attention not in (None, "math"):  # torch.compile takes it apart
            return Verification("took effect", f"{observation.attention} attention is no longer in the trace")
        if not ran:
            return Verification("cannot tell", "no attention in the trace")
        operator, count = max(ran.items(), key=lambda item: item[1])
        words = f"{count} calls of {operator}"
        if value == "auto":
            return Verification("no effect", f"{words}; the baseline lets torch choose, too")
        if str(value) not in operator:
            return Verification("no effect", f"{words}: {value} attention does not support these inputs")
        if observation.attention == value:
            return Verification("no effect", f"{words}, as in the baseline")
        return Verification("took effect", words)

    def without(self, observation: Observation) -> Observation:
        """What the baseline uses is not seen beside the back end that was chosen for it."""
        return replace(observation, attention=None)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == "auto":
            return CodeEdit("# remove sdpa_kernel(…): torch chooses")
        backends = list(dict.fromkeys([BACKENDS[str(value)], "MATH"]))
        listed = ", ".join(f"SDPBackend.{b}" for b in backends)
        return CodeEdit(
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
            f"with sdpa_kernel([{listed}]):\n    …  # the training loop"
        )


def _has_attention(observation: Observation) -> bool:
    return observation.attention is not None or any(OPERATOR in name for name in observation.operators)


ATTENTION = Attention()
