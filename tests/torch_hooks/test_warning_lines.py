"""A warning that PyTorch gives through a hook of gpulab's names the user's line, as it does without gpulab."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab


def test_a_warning_names_the_users_line() -> None:
    items = TensorDataset(torch.ones(8, 4))
    shown = warnings.showwarning
    with pytest.warns(UserWarning, match="pickle") as caught, gpulab.profile(save=False, show=False):
        assert warnings.showwarning is not shown
        loader = DataLoader(items, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda b: b)
        with pytest.raises(Exception, match="lambda"):
            line = sys._getframe().f_lineno + 1
            next(iter(loader))
    told = [w for w in caught if "pickle" in str(w.message)]
    assert [(w.filename, w.lineno) for w in told] == [(__file__, line)]
    assert warnings.showwarning is shown
