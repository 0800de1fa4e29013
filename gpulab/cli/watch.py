"""`gpulab watch`: the ranks of a job while they run, from any machine that sees their folder."""

from __future__ import annotations

import argparse
import os
import time

from gpulab.api.live_ranks import watch
from gpulab.store.folders import Store


def watch_job(options: argparse.Namespace) -> int:
    """Do `gpulab watch`; Ctrl-C ends it, and not the job."""
    try:
        return watch(Store(options.store).root, options.job, sleep=time.sleep)
    except KeyboardInterrupt:
        os.write(2, b"\n")
        return 0
