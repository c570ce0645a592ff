//! Proximity of a GPU: CPUs, NUMA nodes, other GPUs over PCIe, and peer access.

use std::ffi::{c_uint, c_ulong};

use gantry_topology::PathClass;
use nvml_wrapper_sys::bindings as sys;

use super::args::Out;
use super::call::{Call, Target};
use super::handle::Device;
use super::status::Status;
use super::system::put_set;

/// Bits of one element of a CPU or node set.
const BITS: usize = c_ulong::BITS as usize;

/// Writes a set of numbers as a bit mask. Numbers beyond the caller's array are left out, as the real library does.
fn put_mask(numbers: &[u32], size: c_uint, mask: Out<c_ulong>) -> Result<(), Status> {
    if size == 0 {
        return Err(Status::INVALID_ARGUMENT);
    }
    if numbers.is_empty() {
        // The machine file lacks the value. The real library returns the same if the platform lacks it.
        return Err(Status::NOT_SUPPORTED);
    }
    let mut words: Vec<c_ulong> = vec![0; size as usize];
    for number in numbers.iter().map(|number| *number as usize) {
        if let Some(word) = words.get_mut(number / BITS) {
            *word |= 1 << (number % BITS);
        }
    }
    mask.put_all(&words)
}

/// NVML's level of a path class.
fn level(class: PathClass) -> sys::nvmlGpuTopologyLevel_t {
    match class {
        PathClass::Pix => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE,
        PathClass::Pxb => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE,
        PathClass::Phb => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
        PathClass::Node => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
        PathClass::Sys | PathClass::Soc => sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM,
    }
}

fn level_between(call: &Call, first: Target<'_>, second: Target<'_>) -> sys::nvmlGpuTopologyLevel_t {
    let (first, second) = (first.facts.index, second.facts.index);
    if first == second {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
    } else {
        level(call.facts().machine().paths().get(first, second))
    }
}

/// Whether an NVLink that is up joins two GPUs, directly or through the switches.
fn joined(call: &Call, first: usize, second: usize) -> bool {
    use crate::facts::Remote;
    let up = |gpu: usize, wanted: &dyn Fn(&Remote) -> bool| {
        call.facts().gpus.get(gpu).is_some_and(|facts| {
            (0_u8..).zip(&facts.links).any(|(link, remote)| wanted(remote) && call.link_up(gpu, link))
        })
    };
    let direct = |remote: &Remote| matches!(remote, Remote::Gpu { index, .. } if *index == second);
    let switched = |remote: &Remote| matches!(remote, Remote::Switch { .. });
    up(first, &direct) || (up(first, &switched) && up(second, &switched))
}

nvml! {
    fn nvmlDeviceGetCpuAffinity(device: Device, size: c_uint, mask: Out<c_ulong>) |call| {
        put_mask(&call.gpu(device)?.facts.cpus, size, mask)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: Device, size: c_uint, mask: Out<c_ulong>, scope: c_uint) |call| {
        if scope > sys::NVML_AFFINITY_SCOPE_SOCKET {
            return Err(Status::INVALID_ARGUMENT);
        }
        // A machine file knows the node's CPUs only, so both scopes are answered with these.
        put_mask(&call.gpu(device)?.facts.cpus, size, mask)
    }

    fn nvmlDeviceGetMemoryAffinity(device: Device, size: c_uint, mask: Out<c_ulong>, scope: c_uint) |call| {
        if scope > sys::NVML_AFFINITY_SCOPE_SOCKET {
            return Err(Status::INVALID_ARGUMENT);
        }
        put_mask(&call.gpu(device)?.facts.numa_nodes, size, mask)
    }

    fn nvmlDeviceGetNumaNodeId(device: Device, node: Out<c_uint>) |call| {
        let node_of_memory = call.gpu(device)?.facts.memory_numa.ok_or(Status::NOT_SUPPORTED)?;
        node.put(c_uint::from(node_of_memory))
    }

    fn nvmlDeviceGetTopologyCommonAncestor(
        first: Device,
        second: Device,
        out: Out<sys::nvmlGpuTopologyLevel_t>,
    ) |call| {
        out.put(level_between(call, call.gpu(first)?, call.gpu(second)?))
    }

    fn nvmlDeviceGetTopologyNearestGpus(
        device: Device,
        wanted: sys::nvmlGpuTopologyLevel_t,
        count: Out<c_uint>,
        devices: Out<Device>,
    ) |call| {
        let own = call.gpu(device)?;
        let others = call.session.present.iter().copied().filter(|index| *index != own.facts.index);
        let at_level: Vec<Device> = others
            .filter(|index| level(call.facts().machine().paths().get(own.facts.index, *index)) == wanted)
            .map(Device::whole)
            .collect();
        put_set(count, devices, &at_level)
    }

    fn nvmlDeviceGetP2PStatus(
        first: Device,
        second: Device,
        capability: sys::nvmlGpuP2PCapsIndex_t,
        out: Out<sys::nvmlGpuP2PStatus_t>,
    ) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        if first.facts.index == second.facts.index {
            return Err(Status::INVALID_ARGUMENT);
        }
        let nvlink = joined(call, first.facts.index, second.facts.index);
        let works = match capability {
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ
            | sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE
            | sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_PCI => true,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK
            | sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_ATOMICS => nvlink,
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        out.put(if works {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK
        } else {
            sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED
        })
    }
}
