"""torch's switches for TF32: two generations of them, which refuse to be read once they disagree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

NEW = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))  # since torch 2.9


@contextmanager
def tf32_set(on: bool) -> Iterator[int]:
    """Let matrix products and cuDNN use TF32 or not; gives how many settings that changed. For the whole process.

    The old switches also set the new ones, so they are used as long as they can be read; code that has used the new
    ones alone finds only those changed.
    """
    import torch

    before_old, before_new = _old(), _new()
    try:
        if before_old is None:
            for key in NEW[:3]:
                torch._C._set_fp32_precision_setter(*key, "tf32" if on else "ieee")
        else:
            torch.backends.cuda.matmul.allow_tf32 = on
            torch.backends.cudnn.allow_tf32 = on
        yield _changes(before_old, before_new, on)
    finally:
        _put_back(before_old, before_new)


def _old() -> tuple[str, bool] | None:
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision(), bool(torch.backends.cudnn.allow_tf32)
    return None


def _new() -> dict[tuple[str, str], str]:
    import torch

    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    return {key: getter(*key) for key in NEW} if getter is not None else {}


def _changes(old: tuple[str, bool] | None, new: dict[tuple[str, str], str], on: bool) -> int:
    if old is None:
        return sum((new[key] == "tf32") != on for key in NEW[:3])
    return ((old[0] != "highest") != on) + (old[1] != on)


def _put_back(old: tuple[str, bool] | None, new: dict[tuple[str, str], str]) -> None:
    import torch

    if old is not None:
        torch.set_float32_matmul_precision(old[0])
        torch.backends.cudnn.allow_tf32 = old[1]
    for key, value in new.items():
        torch._C._set_fp32_precision_setter(*key, value)


__all__ = ["tf32_set"]
