"""`gpulab doctor`: what this machine can measure."""

from __future__ import annotations

import argparse

from gpulab.api import doctor
from gpulab.cli.output import write
from gpulab.devices.doctor import examine
from gpulab.store.folders import Store
from gpulab.views.waiting import waiting


def print_examination(options: argparse.Namespace) -> int:
    """Do `gpulab doctor`."""
    with waiting("checking this machine"):
        examined = doctor.render(examine(Store(options.store).root))
    write(examined)
    return 0
