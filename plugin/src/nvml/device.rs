//! NVML's facts about one GPU: identity, location, processes. Bus ids are normalised to sysfs form.

use std::ffi::{c_uint, c_ulong};

use gantry_topology::{GpuUuid, PathClass, PcieAddress, PeerStatus};
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError as WrapperError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;

use super::{Code, MigControl, Nvml, NvmlError, Telemetry};

/// Name and function pointer of a raw call, or the error that the library lacks it.
macro_rules! symbol {
    ($nvml:expr, $function:ident) => {
        match &$nvml.library.lib().$function {
            Ok(function) => Ok((stringify!($function), *function)),
            Err(_) => Err($crate::nvml::NvmlError::Missing { call: stringify!($function) }),
        }
    };
}
pub(super) use symbol;

/// A call on one GPU that fills one value.
pub(super) type Getter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, *mut T) -> sys::nvmlReturn_t;
/// A call on one NVLink of one GPU that fills one value.
pub(super) type LinkGetter<T> = unsafe extern "C" fn(sys::nvmlDevice_t, c_uint, *mut T) -> sys::nvmlReturn_t;

/// The return code of a call as a result.
pub(super) fn check(call: &'static str, gpu: Option<u32>, code: sys::nvmlReturn_t) -> Result<(), NvmlError> {
    if code == sys::nvmlReturn_enum_NVML_SUCCESS {
        Ok(())
    } else {
        Err(NvmlError::Call { call, gpu, code: Code::of(code) })
    }
}

/// The result of a call through nvml-wrapper, with the call and its GPU added to the error.
pub(super) fn wrapped<T>(
    call: &'static str,
    gpu: Option<u32>,
    result: Result<T, WrapperError>,
) -> Result<T, NvmlError> {
    result.map_err(|error| match error {
        WrapperError::FailedToLoadSymbol(_) => NvmlError::Missing { call },
        WrapperError::Utf8Error(error) => {
            NvmlError::Unexpected { call, gpu, returned: error.to_string(), expected: "UTF-8 text" }
        }
        error => NvmlError::Call { call, gpu, code: Code::of(error.into()) },
    })
}

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

/// Registration of a GPU with the NVLink fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FabricStatus {
    pub step: FabricStep,
    /// The position; only once the registration is completed.
    pub info: Option<FabricInfo>,
    pub health: FabricHealth,
}

/// How far the registration with the NVLink fabric is. CUDA does not start before it is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricStep {
    /// The GPU has no fabric.
    None,
    /// The fabric manager has not begun.
    NotStarted,
    InProgress,
    Completed,
    /// It ended with this code.
    Failed(Code),
}

/// Health of the GPU's connection to the NVLink fabric, as far as NVML reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FabricHealth {
    /// The routes to other GPUs are broken.
    pub route_unhealthy: bool,
    /// A wrong configuration, by NVML's number.
    pub misconfigured: Option<u32>,
    /// NVML's summary is unhealthy.
    pub unhealthy: bool,
    /// Fewer links carry traffic than there are.
    pub degraded_bandwidth: bool,
    /// Routes or accesses are being recovered.
    pub recovering: bool,
    /// NVML's summary is "limited capacity".
    pub limited: bool,
}

impl FabricHealth {
    fn of(mask: c_uint, summary: u8) -> Self {
        let field = |shift: u32, width: u32| mask >> shift & width;
        let is_set = |shift: u32| field(shift, 3) == sys::NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE;
        let configuration = field(
            sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION,
            sys::NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION,
        );
        let summary = c_uint::from(summary);
        Self {
            route_unhealthy: is_set(sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY),
            misconfigured: (configuration > sys::NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE)
                .then_some(configuration),
            unhealthy: summary == sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY,
            degraded_bandwidth: is_set(sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW),
            recovering: is_set(sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY)
                || is_set(sys::NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY),
            limited: summary == sys::NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY,
        }
    }
}

/// Which processes may compute on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number.
    #[default]
    Default,
    /// One at a time.
    Exclusive,
    /// None.
    Prohibited,
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

/// The far end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    Gpu,
    /// An NVSwitch.
    Switch,
    /// The CPU, on POWER9.
    Processor,
    /// Unknown to NVML, or newer than this build.
    Unknown,
}

/// Memory rows that are, or will be, replaced by spare ones (Ampere and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemappedRows {
    /// Rows replaced for corrected errors.
    pub corrected: u32,
    /// Rows replaced for uncorrected errors.
    pub uncorrected: u32,
    /// Some rows wait for a reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failed: bool,
}

/// The action that the driver requests to recover a GPU (drivers 560 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    None,
    /// A reset of the GPU.
    Reset,
    /// A reboot of the node.
    Reboot,
    /// End all peer-to-peer traffic.
    DrainPeers,
    /// End all work, then reset the GPU.
    DrainAndReset,
    /// An action newer than this build.
    Other(u32),
}

/// Words of a CPU or NUMA mask: 16384 bits, more than Linux supports.
const MASK_WORDS: usize = 16_384 / c_ulong::BITS as usize;

impl<'nvml> Device<'nvml> {
    /// Calls `function` of nvml-wrapper, which makes the NVML call `call`.
    pub(super) fn call<T>(
        &self,
        call: &'static str,
        function: impl FnOnce(&nvml_wrapper::Device<'nvml>) -> Result<T, WrapperError>,
    ) -> Result<T, NvmlError> {
        let _call = self.nvml.trace.begin(call, Some(self.index));
        // SAFETY: the handle came from the NVML that `self` borrows.
        let device = unsafe { nvml_wrapper::Device::new(self.handle, &self.nvml.library) };
        wrapped(call, Some(self.index), function(&device))
    }

    /// Calls `function`, which fills `value`. Versioned structs must come in with their version set.
    pub(super) fn get<T>(
        &self,
        (call, function): (&'static str, Getter<T>),
        mut value: T,
    ) -> Result<T, NvmlError> {
        let _call = self.nvml.trace.begin(call, Some(self.index));
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe { function(self.handle, &raw mut value) })?;
        Ok(value)
    }

    /// Calls `function` on NVLink `link`, which fills `value`.
    pub(super) fn get_link<T>(
        &self,
        (call, function): (&'static str, LinkGetter<T>),
        link: u8,
        mut value: T,
    ) -> Result<T, NvmlError> {
        let _call = self.nvml.trace.begin(call, Some(self.index));
        // SAFETY: the handle came from the NVML that `self` borrows; the out-pointer is a local of the type the call declares.
        check(call, Some(self.index), unsafe { function(self.handle, c_uint::from(link), &raw mut value) })?;
        Ok(value)
    }
}

impl<'nvml> Device<'nvml> {
    /// The readings of this GPU.
    pub const fn telemetry(self) -> Telemetry<'nvml> {
        Telemetry(self)
    }

    /// The MIG layout of this GPU.
    pub const fn mig(self) -> MigControl<'nvml> {
        MigControl(self)
    }

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

    /// The PCI device id with that of the vendor, such as `0x20B010DE`.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn pci_id(&self) -> Result<u32, NvmlError> {
        Ok(self.call("nvmlDeviceGetPciInfo_v3", |device| device.pci_info())?.pci_device_id)
    }

    /// Product name.
    pub fn name(&self) -> Result<String, NvmlError> {
        let name = self.call("nvmlDeviceGetName", |device| device.name())?;
        Ok(name.trim().to_owned())
    }

    /// Board serial number. Boards without one return `NotSupported`.
    pub fn serial(&self) -> Result<String, NvmlError> {
        let serial = self.call("nvmlDeviceGetSerial", |device| device.serial())?;
        Ok(serial.trim().to_owned())
    }

    /// Minor number of `/dev/nvidiaN`.
    pub fn minor(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMinorNumber", |device| device.minor_number())
    }

    /// Total memory in bytes. The driver queries the GPU, so this fails for a lost GPU.
    pub fn memory(&self) -> Result<u64, NvmlError> {
        // Raw: nvml-wrapper calls nvmlDeviceGetMemoryInfo_v2, which drivers before 510 lack.
        let blank = sys::nvmlMemory_t { total: 0, free: 0, used: 0 };
        let (call, function) = symbol!(self.nvml, nvmlDeviceGetMemoryInfo)?;
        let total = self.get((call, function), blank)?.total;
        if total > MAX_MEMORY {
            return Err(self.unexpected(call, format!("{total} bytes"), "at most 64 TiB of memory"));
        }
        Ok(total)
    }

    /// CUDA compute capability: major and minor.
    pub fn compute_capability(&self) -> Result<(i32, i32), NvmlError> {
        let capability =
            self.call("nvmlDeviceGetCudaComputeCapability", |device| device.cuda_compute_capability())?;
        Ok((capability.major, capability.minor))
    }

    /// Newest PCIe generation that GPU and slot support together.
    pub fn max_pcie_generation(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMaxPcieLinkGeneration", |device| device.max_pcie_link_gen())
    }

    /// Most PCIe lanes that GPU and slot support together.
    pub fn max_pcie_width(&self) -> Result<u32, NvmlError> {
        self.call("nvmlDeviceGetMaxPcieLinkWidth", |device| device.max_pcie_link_width())
    }

    /// CPUs near the GPU, ascending.
    pub fn cpu_affinity(&self) -> Result<Vec<u32>, NvmlError> {
        let mask = self.call("nvmlDeviceGetCpuAffinity", |device| device.cpu_affinity(MASK_WORDS))?;
        Ok(bits(&mask))
    }

    /// NUMA nodes near the GPU, ascending: what `nvidia-smi topo -m` prints as NUMA affinity.
    pub fn memory_affinity(&self) -> Result<Vec<u32>, NvmlError> {
        let mask = self.call("nvmlDeviceGetMemoryAffinity", |device| {
            device.memory_affinity(MASK_WORDS, sys::NVML_AFFINITY_SCOPE_NODE)
        })?;
        Ok(bits(&mask))
    }

    /// NUMA node of the GPU's own memory, on coherent platforms; `None` where it has none.
    pub fn memory_numa(&self) -> Result<Option<u16>, NvmlError> {
        let node = self.call("nvmlDeviceGetNumaNodeId", |device| device.numa_node_id())?;
        Ok(u16::try_from(node).ok())
    }

    /// PCIe distance of this GPU and `other`; `None` for a level unknown to this build.
    pub fn common_ancestor(&self, other: Device<'_>) -> Result<Option<PathClass>, NvmlError> {
        // Raw: nvml-wrapper returns an error for an unknown level.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetTopologyCommonAncestor)?;
        let _call = self.nvml.trace.begin(name, Some(self.index));
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

    /// Why this GPU and `other` have no peer-to-peer access; `None` if they have, or if NVML does not know.
    pub fn peer_refusal(&self, other: Device<'_>) -> Result<Option<PeerStatus>, NvmlError> {
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetP2PStatus)?;
        for access in [
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ,
            sys::nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE,
        ] {
            let mut status = sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_UNKNOWN;
            // SAFETY: both handles came from a live NVML; the out-pointer is a local of the declared type.
            check(name, Some(self.index), unsafe {
                function(self.handle, other.handle, access, &raw mut status)
            })?;
            let refusal = match status {
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED => PeerStatus::Chipset,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_GPU_NOT_SUPPORTED => PeerStatus::Gpu,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED => PeerStatus::Topology,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_DISABLED_BY_REGKEY => PeerStatus::Disabled,
                sys::nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED => PeerStatus::NotSupported,
                _ => continue,
            };
            return Ok(Some(refusal));
        }
        Ok(None)
    }

    /// Registration with the NVLink fabric, and the position in a multi-node domain once it is completed.
    pub fn fabric(&self) -> Result<FabricStatus, NvmlError> {
        // Raw, both versions: nvml-wrapper has neither.
        match self.fabric_versioned() {
            // Drivers without the versioned call, or without its third version.
            Err(error) if lacks_call(&error) || error.code().is_some_and(is_version_mismatch) => {
                let info = self.get(
                    symbol!(self.nvml, nvmlDeviceGetGpuFabricInfo)?,
                    sys::nvmlGpuFabricInfo_t {
                        clusterUuid: [0; 16],
                        status: sys::nvmlReturn_enum_NVML_SUCCESS,
                        cliqueId: 0,
                        state: 0,
                    },
                )?;
                let health = FabricHealth::default();
                Ok(joined(info.state, info.status, (info.clusterUuid, info.cliqueId), health))
            }
            answer => answer,
        }
    }

    fn fabric_versioned(&self) -> Result<FabricStatus, NvmlError> {
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
        let health = FabricHealth::of(info.healthMask, info.healthSummary);
        Ok(joined(info.state, info.status, (info.clusterUuid, info.cliqueId), health))
    }

    /// Which processes may compute on the GPU.
    ///
    /// # Errors
    /// The code that NVML returned.
    pub fn compute_mode(&self) -> Result<ComputeMode, NvmlError> {
        // Raw: nvml-wrapper returns an error for an unknown mode.
        let mode = self.get(symbol!(self.nvml, nvmlDeviceGetComputeMode)?, 0)?;
        Ok(match mode {
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED => ComputeMode::Prohibited,
            sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
            | sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD => ComputeMode::Exclusive,
            _ => ComputeMode::Default,
        })
    }

    /// Processes with a compute context on this GPU.
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
            let _call = self.nvml.trace.begin(name, Some(self.index));
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

    pub(super) fn unexpected(
        &self,
        call: &'static str,
        returned: String,
        expected: &'static str,
    ) -> NvmlError {
        NvmlError::Unexpected { call, gpu: Some(self.index), returned, expected }
    }

    /// Whether link `link` is up. NVML returns `InvalidArgument` for a link that the GPU does not have.
    pub fn nvlink_active(&self, link: u8) -> Result<bool, NvmlError> {
        self.call("nvmlDeviceGetNvLinkState", |device| device.link_wrapper_for(link.into()).is_active())
    }

    /// NVLink generation of `link`, 1 to 5; `None` for one unknown to this build.
    pub fn nvlink_version(&self, link: u8) -> Result<Option<u8>, NvmlError> {
        let version =
            self.call("nvmlDeviceGetNvLinkVersion", |device| device.link_wrapper_for(link.into()).version())?;
        // NVML has its own list of versions, in which 2.2 and 3.1 are separate entries.
        Ok(match version {
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_1_0 => Some(1),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_0
            | sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_2_2 => Some(2),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_0
            | sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_3_1 => Some(3),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_4_0 => Some(4),
            sys::nvmlNvlinkVersion_enum_NVML_NVLINK_VERSION_5_0 => Some(5),
            _ => None,
        })
    }

    /// The type of the far end of `link`.
    pub fn nvlink_remote(&self, link: u8) -> Result<Remote, NvmlError> {
        // Raw: nvml-wrapper writes the type into a temporary and always returns Unknown.
        let symbol = symbol!(self.nvml, nvmlDeviceGetNvLinkRemoteDeviceType)?;
        let unknown = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
        Ok(match self.get_link(symbol, link, unknown)? {
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => Remote::Gpu,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => Remote::Switch,
            sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_IBMNPU => Remote::Processor,
            _ => Remote::Unknown,
        })
    }

    /// PCIe address of the far end of `link`; `None` if NVML has none (such as a switch that is invisible to a
    /// VM).
    pub fn nvlink_remote_bus_id(&self, link: u8) -> Result<Option<PcieAddress>, NvmlError> {
        let remote = self.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", |device| {
            device.link_wrapper_for(link.into()).remote_pci_info()
        })?;
        Ok(remote.bus_id.parse().ok())
    }

    /// Uncorrected memory errors since the driver was loaded or the GPU was reset.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` without ECC.
    pub fn uncorrected_errors(&self) -> Result<u64, NvmlError> {
        self.call("nvmlDeviceGetTotalEccErrors", |device| {
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
        })
    }

    /// Remapped rows.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` before Ampere.
    pub fn remapped_rows(&self) -> Result<RemappedRows, NvmlError> {
        // Raw: nvml-wrapper has no such call.
        let (name, function) = symbol!(self.nvml, nvmlDeviceGetRemappedRows)?;
        let _call = self.nvml.trace.begin(name, Some(self.index));
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        // SAFETY: the handle came from the NVML that `self` borrows; all out-pointers are locals of the declared type.
        check(name, Some(self.index), unsafe {
            function(self.handle, &raw mut corrected, &raw mut uncorrected, &raw mut pending, &raw mut failed)
        })?;
        Ok(RemappedRows { corrected, uncorrected, pending: pending != 0, failed: failed != 0 })
    }

    /// Whether memory pages wait for a driver reload to be retired.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` from Ampere on.
    pub fn retirement_pending(&self) -> Result<bool, NvmlError> {
        self.call("nvmlDeviceGetRetiredPagesPendingStatus", |device| device.are_pages_pending_retired())
    }

    /// The action that the driver requests to recover the GPU.
    ///
    /// # Errors
    /// The code that NVML returned; `NotSupported` or `InvalidArgument` from drivers without this field.
    pub fn recovery_action(&self) -> Result<RecoveryAction, NvmlError> {
        let call = "nvmlDeviceGetFieldValues";
        let field = FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION);
        let action = self.call(call, |device| {
            // One value is returned per field.
            let value = device.field_values_for(&[field])?.pop();
            value.ok_or(WrapperError::NoData)??.value
        })?;
        let action = match action {
            SampleValue::U32(action) => action,
            other => return Err(self.unexpected(call, format!("{other:?}"), "an unsigned integer")),
        };
        Ok(match action {
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NONE => RecoveryAction::None,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_GPU_RESET => RecoveryAction::Reset,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_NODE_REBOOT => RecoveryAction::Reboot,
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_P2P => {
                RecoveryAction::DrainPeers
            }
            sys::nvmlDeviceGpuRecoveryAction_s_NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET => {
                RecoveryAction::DrainAndReset
            }
            other => RecoveryAction::Other(other),
        })
    }
}

/// Far above the memory of any GPU.
pub(super) const MAX_MEMORY: u64 = 64 << 40;

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

/// Whether the library or the driver does not know the call, whatever the GPU.
fn lacks_call(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Missing { .. }) || error.code() == Some(Code::FunctionNotFound)
}

/// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`: the library has the call, but not this version of its struct.
fn is_version_mismatch(code: super::Code) -> bool {
    code == super::Code::of(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
}

/// The version word of a struct (the header's `NVML_STRUCT_VERSION`, which bindgen drops): its size, and the
/// number above.
pub(super) fn version<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}

fn joined(
    state: sys::nvmlGpuFabricState_t,
    status: sys::nvmlReturn_t,
    (cluster, clique): ([u8; 16], c_uint),
    health: FabricHealth,
) -> FabricStatus {
    let step = match c_uint::from(state) {
        sys::NVML_GPU_FABRIC_STATE_NOT_STARTED => FabricStep::NotStarted,
        sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS => FabricStep::InProgress,
        sys::NVML_GPU_FABRIC_STATE_COMPLETED if status == sys::nvmlReturn_enum_NVML_SUCCESS => {
            FabricStep::Completed
        }
        sys::NVML_GPU_FABRIC_STATE_COMPLETED => FabricStep::Failed(Code::of(status)),
        // Without a fabric, or a state newer than this build.
        _ => FabricStep::None,
    };
    let info = (step == FabricStep::Completed).then_some(FabricInfo { cluster, clique });
    FabricStatus { step, info, health }
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
