"""On the import path of a child process in place of NVML: plays the script that `SCRIPTED_NVML` holds as JSON."""

from __future__ import annotations

import json
import os
import sys

from tests.support.fake_nvml import fake_nvml

sys.modules[__name__] = fake_nvml(json.loads(os.environ["SCRIPTED_NVML"]))
