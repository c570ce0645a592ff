"""Cuts GPU 0 through NVIDIA's own Python bindings, as their users do, and prints what it finds as JSON.

The test that starts it compares this with what the simulator holds.
"""

import json
import sys

import pynvml as nvml


def refused(call, *arguments):
    """The code a call answers with."""
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        return error.value
    return nvml.NVML_SUCCESS


def main():
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(device, nvml.NVML_DEVICE_MIG_ENABLE)
    half = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, nvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE)
    seventh = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, nvml.NVML_GPU_INSTANCE_PROFILE_1_SLICE)
    fits = nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, half.id)
    instance = nvml.nvmlDeviceCreateGpuInstance(device, half.id)
    info = nvml.nvmlGpuInstanceGetInfo(instance)
    slices = nvml.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE
    shared = nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    part = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, slices, shared)
    for _ in range(part.instanceCount):
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, part.id)
    answer = {
        "fits": fits,
        "left": nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, half.id),
        "instance": [info.id, info.profileId, info.placement.start, info.placement.size],
        "names": [
            nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))
            for index in range(part.instanceCount)
        ],
        "full": refused(nvml.nvmlGpuInstanceCreateComputeInstance, instance, part.id),
        "inUse": refused(nvml.nvmlGpuInstanceDestroy, instance),
        "sevenths": nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, seventh.id),
    }
    print(json.dumps(answer), flush=True)
    nvml.nvmlShutdown()


if __name__ == "__main__":
    sys.exit(main())
