"""A warning that PyTorch gives through a hook of gpulab's names the user's line, as it does without gpulab."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab


def begin(loader: DataLoader[object]) -> None:
    with pytest.raises(Exception, match="lambda"):
        next(iter(loader))


def test_a_warning_names_the_users_line() -> None:
    items = TensorDataset(torch.ones(8, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = warnings.showwarning
        with gpulab.profile(save=False, show=False):
            begin(DataLoader(items, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda b: b))
        assert warnings.showwarning is before
    about = [w for w in caught if "pickle" in str(w.message)]
    line = inspect.getsourcelines(begin)[1] + 2
    assert [(w.filename, w.lineno) for w in about] == [(__file__, line)]
