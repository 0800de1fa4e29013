"""All parts, the most informative first. Their limits add up to less than ten minutes."""

from __future__ import annotations

from benchmarks.gpu_first.session import Part

_HERE = "benchmarks.gpu_first"
TEARDOWN = {"TEARDOWN_CUPTI": "1"}

PARTS = (
    Part("versions", f"{_HERE}.versions", 35),
    Part("meters", f"{_HERE}.metering", 50, 15),
    Part("run-ahead", f"{_HERE}.run_ahead", 75, 15),
    Part("sessions", f"{_HERE}.sessions", 25, 12, {"sacrificial": 0}),
    Part("sessions, sacrificial kernels", f"{_HERE}.sessions", 20, 12, {"sacrificial": 64}),
    Part("sessions, CUPTI torn down", f"{_HERE}.sessions", 20, 12, {"sacrificial": 64}, TEARDOWN),
    Part("runs in one notebook", f"{_HERE}.notebook", 25, 10),
    Part("crash: graph capture", f"{_HERE}.crashes", 20, 8, {"probe": "graph_capture"}),
    Part("crash: device-side assert", f"{_HERE}.crashes", 12, 8, {"probe": "device_assert"}),
    Part("crash: assert in an experiment", f"{_HERE}.crashes", 15, 8, {"probe": "assert_in_experiment"}),
    Part("crash: out of memory", f"{_HERE}.crashes", 20, 8, {"probe": "out_of_memory"}),
    Part("crash: graph overwrites the loss", f"{_HERE}.crashes", 35, 10, {"probe": "overwritten_loss"}),
    Part("crash: second GPU", f"{_HERE}.crashes", 10, 6, {"probe": "second_gpu"}),
    Part("traces", f"{_HERE}.traces", 15, 8, writes_traces=True),
    Part("kernel names", f"{_HERE}.names", 40, 10),
    Part("doubled work", f"{_HERE}.doubled", 60, 20),
    Part("tests", f"{_HERE}.gpu_tests", 60, 20),
    Part("kernel names, compiled", f"{_HERE}.names", 38, 15, {"compiled": True}),
)
BUDGET_S = 580.0
