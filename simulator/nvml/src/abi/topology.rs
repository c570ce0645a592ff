//! What a GPU is near: CPUs, NUMA nodes, other GPUs over PCIe, peer access, and beyond the node its multi-node NVLink
//! domain and chassis.

use std::ffi::{c_uchar, c_uint, c_ulong};

use gantry_topology::{PathClass, PeerStatus};
use nvml_wrapper_sys::bindings as sys;

use super::args::{OutPointer, Status, struct_version};
use super::call::{Call, Target};
use super::handle::Device;
use super::system::put_set;
use crate::control::FabricStep;
use crate::facts::Remote;

/// Bits of one element of a CPU or node set.
const BITS: usize = c_ulong::BITS as usize;

/// Writes a set of numbers as a bit mask. Numbers beyond the caller's array are left out, as the real library does.
fn put_mask(numbers: &[u32], size: c_uint, mask: OutPointer<c_ulong>) -> Result<(), Status> {
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
    let up = |gpu: usize, wanted: &dyn Fn(&Remote) -> bool| {
        call.facts().gpus.get(gpu).is_some_and(|facts| {
            (0_u8..).zip(&facts.links).any(|(link, remote)| wanted(remote) && call.link_up(gpu, link))
        })
    };
    let direct = |remote: &Remote| matches!(remote, Remote::Gpu { index, .. } if *index == second);
    let switched = |remote: &Remote| matches!(remote, Remote::Switch { .. });
    up(first, &direct) || (up(first, &switched) && up(second, &switched))
}

/// NVML's status of two GPUs that have no peer-to-peer access.
fn refusal(call: &Call, first: usize, second: usize) -> Option<sys::nvmlGpuP2PStatus_t> {
    let pair = [first.min(second), first.max(second)];
    let mut refusals = call.facts().machine().no_peer_access().iter();
    let refusal = refusals.find(|refusal| refusal.gpus.map(usize::from) == pair)?;
    Some(match refusal.status {
        PeerStatus::Chipset => sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED,
        PeerStatus::Gpu => sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_GPU_NOT_SUPPORTED,
        PeerStatus::Topology => sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED,
        PeerStatus::Disabled => sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_DISABLED_BY_REGKEY,
        PeerStatus::NotSupported => sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED,
    })
}

nvml! {
    fn nvmlDeviceGetCpuAffinity(device: Device, size: c_uint, mask: OutPointer<c_ulong>) |call| {
        put_mask(&call.gpu(device)?.facts.cpus, size, mask)
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(device: Device, size: c_uint, mask: OutPointer<c_ulong>, scope: c_uint) |call| {
        if scope > sys::NVML_AFFINITY_SCOPE_SOCKET {
            return Err(Status::INVALID_ARGUMENT);
        }
        // A machine file knows the node's CPUs only, so both scopes are answered with these.
        put_mask(&call.gpu(device)?.facts.cpus, size, mask)
    }

    fn nvmlDeviceGetMemoryAffinity(device: Device, size: c_uint, mask: OutPointer<c_ulong>, scope: c_uint) |call| {
        if scope > sys::NVML_AFFINITY_SCOPE_SOCKET {
            return Err(Status::INVALID_ARGUMENT);
        }
        put_mask(&call.gpu(device)?.facts.numa_nodes, size, mask)
    }

    fn nvmlDeviceGetNumaNodeId(device: Device, node: OutPointer<c_uint>) |call| {
        let node_of_memory = call.gpu(device)?.facts.memory_numa.ok_or(Status::NOT_SUPPORTED)?;
        node.put(c_uint::from(node_of_memory))
    }

    fn nvmlDeviceGetTopologyCommonAncestor(
        first: Device,
        second: Device,
        out: OutPointer<sys::nvmlGpuTopologyLevel_t>,
    ) |call| {
        out.put(level_between(call, call.gpu(first)?, call.gpu(second)?))
    }

    fn nvmlDeviceGetTopologyNearestGpus(
        device: Device,
        wanted: sys::nvmlGpuTopologyLevel_t,
        count: OutPointer<c_uint>,
        devices: OutPointer<Device>,
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
        out: OutPointer<sys::nvmlGpuP2PStatus_t>,
    ) |call| {
        let (first, second) = (call.gpu(first)?, call.gpu(second)?);
        if first.facts.index == second.facts.index {
            return Err(Status::INVALID_ARGUMENT);
        }
        if let Some(status) = refusal(call, first.facts.index, second.facts.index) {
            return out.put(status);
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

const COMPLETED: c_uchar = sys::NVML_GPU_FABRIC_STATE_COMPLETED as c_uchar;
const IN_PROGRESS: c_uchar = sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS as c_uchar;
const NOT_STARTED: c_uchar = sys::NVML_GPU_FABRIC_STATE_NOT_STARTED as c_uchar;
const NOT_SUPPORTED: c_uchar = sys::NVML_GPU_FABRIC_STATE_NOT_SUPPORTED as c_uchar;
const HEALTHY: c_uchar = sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY as c_uchar;
const NO_SUMMARY: c_uchar = sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED as c_uchar;

/// Nothing degraded, recovering, unhealthy or timed out; nothing wrongly configured.
const HEALTHY_MASK: c_uint = sys::NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE
    << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW
    | sys::NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_FALSE
        << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY
    | sys::NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_FALSE
        << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY
    | sys::NVML_GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_FALSE
        << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY
    | sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE
        << sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION;

/// Membership of a multi-node domain, as in all versions of the struct. Boards with fabric-managed NVSwitches have no
/// domain beyond the node: state completed, UUID zero.
struct Membership {
    cluster: [c_uchar; 16],
    clique: c_uint,
    state: c_uchar,
    status: sys::nvmlReturn_t,
    health: (c_uint, c_uchar),
}

impl Membership {
    fn of(gpu: Target<'_>) -> Result<Self, Status> {
        // Before Hopper the driver knows no fabric.
        if gpu.facts.compute_capability < (9, 0) {
            return Err(Status::NOT_SUPPORTED);
        }
        let switched = gpu.facts.links.iter().any(|remote| matches!(remote, Remote::Switch { .. }));
        let changed = gpu.unusual().and_then(|state| state.fabric);
        let state = match changed.map(|fabric| fabric.state) {
            Some(FabricStep::NotSupported) => NOT_SUPPORTED,
            Some(FabricStep::NotStarted) => NOT_STARTED,
            Some(FabricStep::InProgress) => IN_PROGRESS,
            Some(FabricStep::Completed) => COMPLETED,
            None if switched || gpu.facts.fabric.is_some() => COMPLETED,
            None => NOT_SUPPORTED,
        };
        // A GPU receives its domain when the registration is completed.
        let (cluster, clique) = match &gpu.facts.fabric {
            Some(fabric) if state == COMPLETED => (cluster_bytes(&fabric.cluster_uuid), fabric.clique),
            _ => ([0; 16], 0),
        };
        let (mask, summary) = if state == COMPLETED { (HEALTHY_MASK, HEALTHY) } else { (0, NO_SUMMARY) };
        Ok(Self {
            cluster,
            clique,
            state,
            status: changed.map_or(sys::nvmlReturn_enum_NVML_SUCCESS, |fabric| fabric.status),
            health: (
                changed.and_then(|fabric| fabric.health_mask).unwrap_or(mask),
                changed.and_then(|fabric| fabric.summary).unwrap_or(summary),
            ),
        })
    }
}

/// The sixteen bytes of a domain's UUID: its hexadecimal digits, as far as there are any.
fn cluster_bytes(uuid: &str) -> [c_uchar; 16] {
    let mut bytes = [0; 16];
    let digits = uuid.chars().filter_map(|c| c.to_digit(16));
    for (position, digit) in digits.take(32).enumerate() {
        if let (Some(byte), Ok(digit)) = (bytes.get_mut(position / 2), c_uchar::try_from(digit)) {
            *byte |= digit << (4 * (1 - position % 2));
        }
    }
    bytes
}

nvml! {
    fn nvmlDeviceGetGpuFabricInfo(device: Device, info: OutPointer<sys::nvmlGpuFabricInfo_t>) |call| {
        let membership = Membership::of(call.gpu(device)?)?;
        info.put(sys::nvmlGpuFabricInfo_t {
            clusterUuid: membership.cluster,
            status: membership.status,
            cliqueId: membership.clique,
            state: membership.state,
        })
    }

    fn nvmlDeviceGetGpuFabricInfoV(device: Device, info: OutPointer<sys::nvmlGpuFabricInfo_v3_t>) |call| {
        let version = info.version()?;
        let membership = Membership::of(call.gpu(device)?)?;
        let (mask, summary) = membership.health;
        if version == struct_version::<sys::nvmlGpuFabricInfo_v2_t>(2) {
            info.cast().put(sys::nvmlGpuFabricInfo_v2_t {
                version,
                clusterUuid: membership.cluster,
                status: membership.status,
                cliqueId: membership.clique,
                state: membership.state,
                healthMask: mask,
            })
        } else if version == struct_version::<sys::nvmlGpuFabricInfo_v3_t>(3) {
            info.put(sys::nvmlGpuFabricInfo_v3_t {
                version,
                clusterUuid: membership.cluster,
                status: membership.status,
                cliqueId: membership.clique,
                state: membership.state,
                healthMask: mask,
                healthSummary: summary,
            })
        } else {
            Err(Status::VERSION_MISMATCH)
        }
    }

    fn nvmlDeviceGetPlatformInfo(device: Device, info: OutPointer<sys::nvmlPlatformInfo_v2_t>) |call| {
        let version = info.version()?;
        let gpu = call.gpu(device)?;
        // Blackwell is the first to report it.
        if gpu.facts.compute_capability < (10, 0) {
            return Err(Status::NOT_SUPPORTED);
        }
        let module = gpu.key().saturating_add(1);
        let mut guid = [0; 16];
        let address = gpu.facts.address;
        guid[14] = address.bus;
        guid[15] = module;
        if version == struct_version::<sys::nvmlPlatformInfo_v1_t>(1) {
            info.cast().put(sys::nvmlPlatformInfo_v1_t {
                version,
                ibGuid: guid,
                rackGuid: [0; 16],
                chassisPhysicalSlotNumber: 1,
                computeSlotIndex: 0,
                nodeIndex: 0,
                peerType: 1,
                moduleId: module,
            })
        } else if version == struct_version::<sys::nvmlPlatformInfo_v2_t>(2) {
            let mut serial = [0; 16];
            for (place, byte) in serial.iter_mut().zip(gpu.facts.serial.bytes()) {
                *place = byte;
            }
            info.put(sys::nvmlPlatformInfo_v2_t {
                version,
                ibGuid: guid,
                chassisSerialNumber: serial,
                slotNumber: 1,
                trayIndex: 0,
                hostId: 1,
                peerType: 1,
                moduleId: module,
            })
        } else {
            Err(Status::VERSION_MISMATCH)
        }
    }

    fn nvmlDeviceGetC2cModeInfoV(device: Device, info: OutPointer<sys::nvmlC2cModeInfo_v1_t>) |call| {
        // The struct has no version word, despite its name.
        let gpu = call.gpu(device)?;
        info.put(sys::nvmlC2cModeInfo_v1_t {
            isC2cEnabled: c_uint::from(gpu.facts.product.c2c),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domains_uuid_becomes_its_bytes() {
        let bytes = cluster_bytes("00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!((bytes[1], bytes[15]), (0x11, 0xff));
        assert_eq!(cluster_bytes("f")[0], 0xf0);
    }
}
