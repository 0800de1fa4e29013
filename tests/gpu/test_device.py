"""What gpulab says about an NVIDIA GPU before anybody has started CUDA, and the doctor's trial, on a real one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from gpulab.devices import doctor, gpus  # noqa: E402
from gpulab.devices.machine import detect_device  # noqa: E402

pytestmark = pytest.mark.gpu

DETECT = """
import json, os, sys

from msgspec.structs import asdict
sys.path[:] = json.loads(sys.argv[1])
import torch
from gpulab.devices.machine import detect_device

told = asdict(detect_device("auto"))
started = torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    code = 1
    try:
        code = int(torch.ones(2, device="cuda").sum().item()) - 2
    finally:
        os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
torch.zeros(1, device="cuda")
print(json.dumps({"told": told, "started": started, "fork": code, "known": asdict(detect_device("cuda"))}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_device_detection_starts_no_cuda_and_survives_a_fork() -> None:
    command = [sys.executable, "-c", DETECT, json.dumps([p or "." for p in sys.path])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    told, known = found["told"], found["known"]
    assert isinstance(told, dict) and isinstance(known, dict)
    assert found["started"] is False, "CUDA was started in the user's process"
    assert found["fork"] == 0, "a forked process cannot use the GPU any more"
    assert (told["kind"], told["index"], told["name"]) == ("cuda", known["index"], known["name"])
    assert told["uuid"] == known["uuid"], "NVML and PyTorch mean the same GPU"
    assert told["memory_total_bytes"] == pytest.approx(known["memory_total_bytes"], rel=0.05)
    for detail in ("sm_count", "compute_capability", "nvml_index", "driver"):
        assert told["details"][detail] in (known["details"][detail], None), detail


def test_another_process_describes_the_same_gpus() -> None:
    theirs = gpus.gpus_by_cuda()
    assert len(theirs) == torch.cuda.device_count()
    torch.zeros(1, device="cuda")
    here = detect_device("cuda:0")
    assert (theirs[0].name, theirs[0].uuid) == (here.name, here.uuid)
    assert (theirs[0].memory_total_bytes, theirs[0].sm_count) == (here.memory_total_bytes, here.details["sm_count"])


def test_the_doctor_tries_cupti() -> None:
    trial = gpus.try_tracing()
    assert 60 <= trial.kernels <= gpus.LAUNCHED, trial  # a few of a session's first ones may be lost
    checks = {check.name: check for check in doctor.examine()}
    assert checks["GPU work in the trace"].state == "ok"
    assert checks["PyTorch"].state == "ok" and torch.cuda.get_device_name() in checks["PyTorch"].evidence
