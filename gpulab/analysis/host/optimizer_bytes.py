"""Bytes that an optimizer's update moves of each parameter, fused and not: the one table for findings and predictions.

Of 32-bit numbers. An operator reads each of its tensors once and writes its result once. A multi-tensor operator
(foreach) makes one such pass over all parameters, so it moves as many bytes as operators tensor by tensor; Adagrad's
makes one pass more. A fused update is a single pass. With parameters p, gradients g and the optimizer's own state, as
(tensors read, tensors written):

=====================  ===================================================================  =======  =================
class                  passes of torch.optim's operators                                      bytes  fused
=====================  ===================================================================  =======  =================
SGD                    p += g (2, 1)                                                             12  p g → p: 12
SGD with momentum b    b *= momentum (1, 1), b += g (2, 1), p += b (2, 1)                        32  p g b → p b: 20
Adam                   m to g (2, 1), v *= β (1, 1), v += g² (2, 1), √v (1, 1), ÷ (1, 1),        72  p g m v → p m v: 28
                       + ε (1, 1), p += m/… (3, 1)
AdamW                  p *= 1 - decay (1, 1), then as Adam                                       80  as Adam: 28
Adagrad                s += g² (2, 1), √s (1, 1), + ε (1, 1), p += g/… (3, 1)                    44  p g s → p s: 20
Adagrad, foreach       the same, and g *= rate (1, 1)                                            52  the same: 20
=====================  ===================================================================  =======  =================

Weight decay in the gradient, g + decay·p (2, 1), and Nesterov's momentum, g + momentum·b (2, 1), add 12 bytes each;
fused they take no pass of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

Pass = tuple[int, int]  # tensors read, tensors written

NUMBER_BYTES = 4
SCALE: Pass = (1, 1)
ADD: Pass = (2, 1)
_LERP, _ADD_SQUARE, _ROOT, _ADD_QUOTIENT = (2, 1), (2, 1), (1, 1), (3, 1)

_MOMENTUM = "SGD with momentum"
_ADAM: tuple[Pass, ...] = (_LERP, SCALE, _ADD_SQUARE, _ROOT, SCALE, SCALE, _ADD_QUOTIENT)
_PASSES: Mapping[str, tuple[Pass, ...]] = {
    "SGD": (ADD,),
    _MOMENTUM: (SCALE, ADD, ADD),
    "Adam": _ADAM,
    "AdamW": (SCALE, *_ADAM),
    "Adagrad": (_ADD_SQUARE, _ROOT, SCALE, _ADD_QUOTIENT),
}
_FUSED: Mapping[str, Pass] = {"SGD": (2, 1), _MOMENTUM: (3, 2), "Adam": (4, 3), "AdamW": (4, 3), "Adagrad": (3, 2)}
_FOREACH_ONLY: Mapping[str, tuple[Pass, ...]] = {"Adagrad": (SCALE,)}


class UpdateBytes(Struct, frozen=True):
    """Bytes that one update moves of each 32-bit parameter: operator after operator, and in one fused operation."""

    unfused_bytes: int
    fused_bytes: int

    @property
    def fused_fraction(self) -> float:
        return self.fused_bytes / self.unfused_bytes


def bytes_of(*passes: Pass) -> int:
    return NUMBER_BYTES * sum(read + written for read, written in passes)


def bytes_of_update(
    name: str, *, has_momentum: bool = False, further_adds: int = 0, foreach: bool = False
) -> UpdateBytes | None:
    """Of that class of torch.optim; None for one that PyTorch cannot fuse. `has_momentum` matters to SGD alone.

    `further_adds` are the passes that weight decay and Nesterov's momentum add.
    """
    kind = _MOMENTUM if name == "SGD" and has_momentum else name
    if kind not in _PASSES:
        return None
    passes = (*_PASSES[kind], *[ADD] * further_adds, *(_FOREACH_ONLY.get(kind, ()) if foreach else ()))
    return UpdateBytes(bytes_of(*passes), bytes_of(_FUSED[kind]))


FUSED_ADAM_BYTES = bytes_of(_FUSED["Adam"])
