"""Reads a machine through NVIDIA's own Python bindings and prints what it finds as JSON, then waits for one event.

The test that starts it compares the first line with the machine file, raises an Xid after reading it, and compares the second.
"""

import json
import sys

import pynvml as nvml

# Links asked for on each GPU: the most that any GPU has. The bindings' own bound differs by version.
LINKS = 18


def link(device, number):
    """What NVML tells of one NVLink, or the error it answers with."""
    try:
        active = nvml.nvmlDeviceGetNvLinkState(device, number)
    except nvml.NVMLError as error:
        return {"error": error.value}
    if not active:
        return {"active": False}
    return {
        "active": True,
        "remote": nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, number).busId,
        "kind": nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, number),
    }


def migs(device):
    """What NVML tells of the MIG devices of one GPU."""
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
        except nvml.NVMLError_NotFound:
            continue
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        attributes = nvml.nvmlDeviceGetAttributes_v2(mig)
        found.append({
            "uuid": nvml.nvmlDeviceGetUUID(mig),
            "parent": nvml.nvmlDeviceGetUUID(parent),
            "name": nvml.nvmlDeviceGetName(mig),
            "instances": [
                nvml.nvmlDeviceGetGpuInstanceId(mig),
                nvml.nvmlDeviceGetComputeInstanceId(mig),
            ],
            "slices": [
                attributes.gpuInstanceSliceCount,
                attributes.computeInstanceSliceCount,
            ],
            "multiprocessors": attributes.multiprocessorCount,
            "memory": nvml.nvmlDeviceGetMemoryInfo(mig).total,
        })
    return found


def mode(device):
    """Whether MIG is on; nothing if the GPU cannot be cut."""
    try:
        return nvml.nvmlDeviceGetMigMode(device)[0]
    except nvml.NVMLError_NotSupported:
        return None


def gpu(device, devices):
    """What NVML tells of one GPU."""
    pci = nvml.nvmlDeviceGetPciInfo(device)
    memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
    words = nvml.nvmlDeviceGetCpuAffinity(device, 8)
    count = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT])[0]
    return {
        "uuid": nvml.nvmlDeviceGetUUID(device),
        "name": nvml.nvmlDeviceGetName(device),
        "index": nvml.nvmlDeviceGetIndex(device),
        "minor": nvml.nvmlDeviceGetMinorNumber(device),
        "serial": nvml.nvmlDeviceGetSerial(device),
        "busId": pci.busId,
        "pciDeviceId": pci.pciDeviceId,
        "memory": memory.total,
        "capability": list(nvml.nvmlDeviceGetCudaComputeCapability(device)),
        "architecture": nvml.nvmlDeviceGetArchitecture(device),
        "pcie": [
            nvml.nvmlDeviceGetMaxPcieLinkGeneration(device),
            nvml.nvmlDeviceGetMaxPcieLinkWidth(device),
        ],
        "cpus": [cpu for cpu in range(512) if words[cpu // 64] >> (cpu % 64) & 1],
        "levels": [
            nvml.nvmlDeviceGetTopologyCommonAncestor(device, other) for other in devices
        ],
        "links": [link(device, number) for number in range(LINKS)],
        "linkCount": count.value.uiVal if count.nvmlReturn == nvml.NVML_SUCCESS else None,
        "migMode": mode(device),
        "migs": migs(device),
        "temperature": nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        "processes": [
            process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
        ],
    }


def main():
    nvml.nvmlInit()
    devices = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    events = nvml.nvmlEventSetCreate()
    for device in devices:
        nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
    machine = {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": nvml.nvmlSystemGetCudaDriverVersion(),
        "gpus": [gpu(device, devices) for device in devices],
    }
    print(json.dumps(machine), flush=True)
    event = nvml.nvmlEventSetWait_v2(events, 120_000)
    heard = {
        "uuid": nvml.nvmlDeviceGetUUID(event.device),
        "xid": event.eventData,
        "gpuInstance": event.gpuInstanceId,
    }
    print(json.dumps(heard), flush=True)
    nvml.nvmlEventSetFree(events)
    nvml.nvmlShutdown()


if __name__ == "__main__":
    sys.exit(main())
