from __future__ import annotations

import pytest

from pageahead.experiment.profile.activity import Activity, lane, short_name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("kOptimizer32bit2State", "kOptimizer32bit2State"),
        (
            "void kOptimizerStatic8bit2StateBlockwise<__half, 0, 256, 1>(__half *, float)",
            "kOptimizerStatic8bit2StateBlockwise",
        ),
        ("_Z21kOptimizer32bit2StateI6__halfLi1ELi4096ELi8EEvPT_S2_", "kOptimizer32bit2State"),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEvi",
            "vectorized_elementwise_kernel",
        ),
        (
            "void at::native::(anonymous namespace)::fill_kernel<int>(at::native::Array<int>)",
            "fill_kernel",
        ),
        ("_Zodd", "_Zodd"),
        ("", ""),
    ],
)
def test_short_names(name, short) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("activity", "expected"),
    [
        (Activity("copy", 0, 1, direction="to_device"), "fetch"),
        (Activity("managed", 0, 1, direction="to_device"), "fetch"),
        (Activity("managed", 0, 1, direction="to_host"), "write-back"),
        (Activity("copy", 0, 1, direction="other"), "other"),
        (Activity("kernel", 0, 1, "kOptimizerStatic8bit1StateBlockwise"), "update"),
        (Activity("kernel", 0, 1, "optimizer_update_32bit"), "update"),
        (Activity("kernel", 0, 1, "fill_kernel"), "other"),
        (Activity("fill", 0, 1), "other"),
        (Activity("synchronization", 0, 1, "device"), None),
        (Activity("call", 0, 1, "cudaLaunchKernel"), None),
        (Activity("wait", 0, 1), None),
        (Activity("fault", 0, 1, "gpu", faults=3), None),
    ],
)
def test_lanes(activity, expected) -> None:
    assert lane(activity) == expected
