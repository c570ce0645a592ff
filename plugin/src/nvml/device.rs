//! NVML's facts about one GPU: identity, location, processes. Bus ids are normalised to sysfs form.

use std::ffi::{c_uint, c_ulong};

use gantry_topology::{GpuUuid, PathClass, PcieAddress};
use nvml_wrapper_sys::bindings as sys;

use super::call::{check, symbol};
use super::{Nvml, NvmlError};

/// One GPU of an [`Nvml`].
#[derive(Clone, Copy)]
pub struct Device<'nvml> {
    pub(super) nvml: &'nvml Nvml,
    pub(super) handle: sys::nvmlDevice_t,
    pub(super) index: u32,
}

/// A GPU's position in a multi-node NVLink domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FabricInfo {
    /// UUID of the domain; all zero if the fabric is confined to this machine.
    pub cluster: [u8; 16],
    /// Clique within the domain.
    pub clique: u32,
}

/// A process with a context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id, in the PID namespace of the reader.
    pub pid: u32,
    /// GPU instance it runs in, on a GPU in MIG mode.
    pub gpu_instance: Option<u32>,
    /// Compute instance it runs in, on a GPU in MIG mode.
    pub compute_instance: Option<u32>,
}

/// Words of a CPU or NUMA mask: 16384 bits, more than Linux supports.
const MASK_WORDS: usize = 16_384 / c_ulong::BITS as usize;

impl Device<'_> {
    /// NVML's index.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The UUID, `GPU-...`.
    ///
    /// # Errors
    /// As for every call here: the code that NVML returned, or an unexpected value.
    pub fn uuid(&self) -> Result<GpuUuid, NvmlError> {
        let call = "nvmlDeviceGetUUID";
        let uuid = self.call(call, |device| device.uuid())?;
        uuid.parse().map_err(|_| self.unexpected(call, uuid, "GPU UUID"))
    }

    /// The PCIe address, in sysfs form.
    ///
    /// # Errors
    /// The code that NVML returned, or an unexpected value.
    pub fn bus_id(&self) -> Result<PcieAddress, NvmlError> {
        let call = "nvmlDeviceGetPciInfo_v3";
        let bus_id = self.call(call, |device| device.pci_info())?.bus_id;
        bus_id.parse().map_err(|_| self.unexpected(call, bus_id, "PCIe address"))
    }

    /// Product name.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn name(&self) -> Result<String, NvmlError> {
        let name = self.call("nvmlDeviceGetName", |device| device.name())?;
        Ok(name.trim().to_owned())
    }

    /// Board serial number. Boards without one return `NotSupported`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn serial(&self) -> Result<String, NvmlError> {
        let serial = self.call("nvmlDeviceGetSerial", |device| device.serial())?;
        Ok(serial.trim().to_owned())
    }

    /// Minor number of `/dev/nvidiaN`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn minor(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMinorNumber", |device| device.minor_number())
    }

    /// Total memory in bytes. The driver queries the GPU, so this fails for a lost GPU.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn memory(&self) -> Result<u64, NvmlError> {
        // Raw: nvml-wrapper calls nvmlDeviceGetMemoryInfo_v2, which drivers before 510 lack.
        let blank = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        Ok(self.get(symbol!(self.nvml, nvmlDeviceGetMemoryInfo)?, blank)?.total)
    }

    /// CUDA compute capability: major and minor.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn compute_capability(&self) -> Result<(i32, i32), NvmlError> {
        let capability =
            self.call("nvmlDeviceGetCudaComputeCapability", |device| device.cuda_compute_capability())?;
        Ok((capability.major, capability.minor))
    }

    /// Newest PCIe generation that GPU and slot support together.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn max_pcie_generation(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMaxPcieLinkGeneration", |device| device.max_pcie_link_gen())
    }

    /// Most PCIe lanes that GPU and slot support together.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn max_pcie_width(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMaxPcieLinkWidth", |device| device.max_pcie_link_width())
    }

    /// CPUs near the GPU, ascending.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn cpu_affinity(&self) -> Result<Vec<u32>, NvmlError> {
        let mask = self.call("nvmlDeviceGetCpuAffinity", |device| device.cpu_affinity(MASK_WORDS))?;
        Ok(bits(&mask))
    }

    /// NUMA nodes near the GPU, ascending: what `nvidia-smi topo -m` prints as NUMA affinity.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn memory_affinity(&self) -> Result<Vec<u32>, NvmlError> {
        let mask = self.call("nvmlDeviceGetMemoryAffinity", |device| {
            device.memory_affinity(MASK_WORDS, sys::NVML_AFFINITY_SCOPE_NODE)
        })?;
        Ok(bits(&mask))
    }

    /// NUMA node of the GPU's own memory, on coherent platforms; `None` where it has none.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn memory_numa(&self) -> Result<Option<u16>, NvmlError> {
        let node = self.call("nvmlDeviceGetNumaNodeId", |device| device.numa_node_id())?;
        Ok(u16::try_from(node).ok())
    }

    /// PCIe distance of this GPU and `other`; `None` for a level unknown to this build.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn common_ancestor(&self, other: Device<'_>) -> Result<Option<PathClass>, NvmlError> {
        // Raw: nvml-wrapper returns an error for an unknown level.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetTopologyCommonAncestor)?;
        let mut level = 0;
        // SAFETY: both handles came from a live NVML; the out-pointer is a local of the declared type.
        check(name, Some(self.index), unsafe { function(self.handle, other.handle, &raw mut level) })?;
        Ok(match level {
            // Two GPUs on one board are behind the board's own switch; nvidia-smi prints PIX for them too.
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL | sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE => {
                Some(PathClass::Pix)
            }
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE => Some(PathClass::Pxb),
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE => Some(PathClass::Phb),
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE => Some(PathClass::Node),
            sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM => Some(PathClass::Sys),
            _ => None,
        })
    }

    /// Position in a multi-node NVLink domain; `None` while the fabric manager is busy, or without a fabric.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn fabric(&self) -> Result<Option<FabricInfo>, NvmlError> {
        // Raw, both versions: nvml-wrapper has neither.
        match self.fabric_versioned() {
            // Drivers without the versioned call, or without its third version.
            Err(error) if error.is_unsupported() || error.code().is_some_and(is_version_mismatch) => {
                let info = self.get(
                    symbol!(self.nvml, nvmlDeviceGetGpuFabricInfo)?,
                    sys::nvmlGpuFabricInfo_t {
                        clusterUuid: [0; 16],
                        status: sys::nvmlReturn_enum_NVML_SUCCESS,
                        cliqueId: 0,
                        state: 0,
                    },
                )?;
                Ok(joined(info.state, info.status, info.clusterUuid, info.cliqueId))
            }
            answer => answer,
        }
    }

    fn fabric_versioned(&self) -> Result<Option<FabricInfo>, NvmlError> {
        let info = self.get(
            symbol!(self.nvml, nvmlDeviceGetGpuFabricInfoV)?,
            sys::nvmlGpuFabricInfo_v3_t {
                version: version::<sys::nvmlGpuFabricInfo_v3_t>(3),
                clusterUuid: [0; 16],
                status: sys::nvmlReturn_enum_NVML_SUCCESS,
                cliqueId: 0,
                state: 0,
                healthMask: 0,
                healthSummary: 0,
            },
        )?;
        Ok(joined(info.state, info.status, info.clusterUuid, info.cliqueId))
    }

    /// Processes with a compute context on this GPU.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn compute_processes(&self) -> Result<Vec<Process>, NvmlError> {
        // Raw: nvml-wrapper fails if more than five processes start between count and list.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetComputeRunningProcesses_v3)?;
        let blank =
            sys::nvmlProcessInfo_t { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 };
        // Processes start and end between the count and the list: leave room, and grow if it was not enough.
        let mut room: c_uint = 64;
        loop {
            let mut infos = vec![blank; room as usize];
            let mut count = room;
            // SAFETY: the handle came from the NVML that `self` borrows; `infos` holds `count` entries.
            let code = unsafe { function(self.handle, &raw mut count, infos.as_mut_ptr()) };
            if code == sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE && room < MAX_PROCESSES {
                room = count.max(room).saturating_mul(2).min(MAX_PROCESSES);
                continue;
            }
            check(name, Some(self.index), code)?;
            infos.truncate(count as usize);
            return Ok(infos.iter().map(process).collect());
        }
    }

    pub(super) fn unexpected(&self, call: &'static str, answer: String, expected: &'static str) -> NvmlError {
        NvmlError::Answer { call, gpu: Some(self.index), answer, expected }
    }
}

/// Upper bound of processes; far above the number of contexts of a GPU.
const MAX_PROCESSES: c_uint = 65_536;

/// The bits set in a mask, ascending.
fn bits(mask: &[c_ulong]) -> Vec<u32> {
    (0..)
        .zip(mask)
        .flat_map(|(word, bits)| {
            (0..c_ulong::BITS)
                .filter(move |bit| bits >> bit & 1 == 1)
                .map(move |bit| word * c_ulong::BITS + bit)
        })
        .collect()
}

/// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`: the library has the call, but not this version of its struct.
fn is_version_mismatch(code: super::Code) -> bool {
    code == super::Code::of(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
}

/// The version word of a struct (the header's `NVML_STRUCT_VERSION`, which bindgen drops): its size, and the
/// number above.
fn version<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}

fn joined(
    state: sys::nvmlGpuFabricState_t,
    status: sys::nvmlReturn_t,
    cluster: [u8; 16],
    clique: c_uint,
) -> Option<FabricInfo> {
    let complete = c_uint::from(state) == sys::NVML_GPU_FABRIC_STATE_COMPLETED
        && status == sys::nvmlReturn_enum_NVML_SUCCESS;
    complete.then_some(FabricInfo { cluster, clique })
}

fn process(info: &sys::nvmlProcessInfo_t) -> Process {
    Process {
        pid: info.pid,
        gpu_instance: instance(info.gpuInstanceId),
        compute_instance: instance(info.computeInstanceId),
    }
}

/// A MIG instance id; NVML writes all ones if there is none.
pub(super) fn instance(id: c_uint) -> Option<u32> {
    (id != c_uint::MAX).then_some(id)
}
