//! NVML errors: which call failed, on which GPU, with which code, and what the operator can do.

use std::fmt;
use std::path::PathBuf;

use nvml_wrapper_sys::bindings as sys;

/// A failure of NVML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// The library is missing or is not an NVML library.
    #[error(
        "NVML library {} cannot be loaded ({problem}); install NVIDIA's driver on this node, or set its path with \
         --nvml-library",
        path.display()
    )]
    Load {
        /// The path or soname tried.
        path: PathBuf,
        /// The loader's message.
        problem: String,
    },
    /// The library is older than the call.
    #[error("{call} is missing from the NVML library; the driver is older than the call")]
    Missing { call: &'static str },
    /// A call failed.
    #[error("{call}{} failed: {code}{}", GpuSuffix(*.gpu), Advice(call, *.code))]
    Call {
        call: &'static str,
        /// Index of the GPU it was about, if it was about one.
        gpu: Option<u32>,
        /// The code that NVML returned.
        code: Code,
    },
    /// A call succeeded with an unexpected value.
    #[error("{call}{} returned {returned:?}, expected {expected}", GpuSuffix(*.gpu))]
    Unexpected {
        call: &'static str,
        /// Index of the GPU.
        gpu: Option<u32>,
        returned: String,
        expected: &'static str,
    },
}

impl NvmlError {
    /// The code, if NVML returned one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the GPU, driver or library does not support this.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::Missing { .. })
            || matches!(self.code(), Some(Code::NotSupported | Code::NotFound | Code::FunctionNotFound))
    }

    /// Whether nothing exists at the requested index or id.
    pub fn is_nothing_there(&self) -> bool {
        matches!(self.code(), Some(Code::NotFound | Code::InvalidArgument))
    }

    /// Whether the driver is gone: every call fails until NVML is loaded again.
    pub fn is_driver_gone(&self) -> bool {
        matches!(self.code(), Some(Code::Uninitialized | Code::DriverNotLoaded | Code::LibRmVersionMismatch))
    }

    /// What this error of a GPU's calls means for the GPU. "Lost" is used only for a GPU that fell off the bus.
    pub fn of_gpu(&self) -> String {
        match self.code() {
            Some(Code::GpuIsLost | Code::GpuNotFound) => format!("GPU lost: {self}"),
            Some(Code::ResetRequired) => format!("GPU needs a reset: {self}"),
            _ => format!("GPU cannot be queried: {self}"),
        }
    }

    /// Whether the GPU cannot be reached.
    pub fn is_gpu_lost(&self) -> bool {
        matches!(self.code(), Some(Code::GpuIsLost | Code::ResetRequired | Code::GpuNotFound))
    }
}

/// A failure code of an NVML call (`nvmlReturn_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// NVML is not initialised, or the driver went away.
    Uninitialized,
    /// An argument is invalid.
    InvalidArgument,
    /// Not available on this device.
    NotSupported,
    /// The caller lacks a permission.
    NoPermission,
    NotFound,
    /// A buffer is too small.
    InsufficientSize,
    /// The board's external power is missing.
    InsufficientPower,
    /// The kernel driver is not loaded.
    DriverNotLoaded,
    /// The call timed out.
    Timeout,
    /// The kernel has a problem with the GPU's interrupts.
    IrqIssue,
    /// A library that the driver needs is missing.
    LibraryNotFound,
    /// The driver does not know the function.
    FunctionNotFound,
    /// The board's stored configuration is corrupted.
    CorruptedInforom,
    /// The GPU has fallen off the bus.
    GpuIsLost,
    /// The GPU needs a reset.
    ResetRequired,
    /// The operating system refused.
    OperatingSystem,
    /// Library and kernel driver are of different versions.
    LibRmVersionMismatch,
    /// A client of the driver uses the GPU.
    InUse,
    /// The driver has no memory left.
    Memory,
    NoData,
    /// ECC prevents the vGPU.
    VgpuEccNotSupported,
    /// Something other than memory is used up.
    InsufficientResources,
    FreqNotSupported,
    /// The driver does not know this version of an argument.
    ArgumentVersionMismatch,
    /// The function was removed.
    Deprecated,
    /// The GPU or its software is not ready.
    NotReady,
    /// The GPU does not exist.
    GpuNotFound,
    /// The GPU's state does not allow the call.
    InvalidState,
    ResetTypeNotSupported,
    AlreadyInitialized,
    /// The driver itself does not know what failed.
    Unknown,
    /// A code that is newer than this build.
    Other(u32),
}

impl Code {
    pub(super) fn of(code: sys::nvmlReturn_t) -> Self {
        match code {
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => Self::Uninitialized,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => Self::InvalidArgument,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Self::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => Self::NoPermission,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => Self::NotFound,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => Self::InsufficientSize,
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => Self::DriverNotLoaded,
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => Self::Timeout,
            sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND => Self::LibraryNotFound,
            sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => Self::FunctionNotFound,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => Self::GpuIsLost,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Self::ResetRequired,
            sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => Self::OperatingSystem,
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => Self::LibRmVersionMismatch,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND => Self::GpuNotFound,
            sys::nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED => Self::AlreadyInitialized,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER => Self::InsufficientPower,
            sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE => Self::IrqIssue,
            sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM => Self::CorruptedInforom,
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => Self::InUse,
            sys::nvmlReturn_enum_NVML_ERROR_MEMORY => Self::Memory,
            sys::nvmlReturn_enum_NVML_ERROR_NO_DATA => Self::NoData,
            sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED => Self::VgpuEccNotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => Self::InsufficientResources,
            sys::nvmlReturn_enum_NVML_ERROR_FREQ_NOT_SUPPORTED => Self::FreqNotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => Self::ArgumentVersionMismatch,
            sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED => Self::Deprecated,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_READY => Self::NotReady,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE => Self::InvalidState,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_TYPE_NOT_SUPPORTED => Self::ResetTypeNotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN => Self::Unknown,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uninitialized => "NVML is not initialised",
            Self::InvalidArgument => "invalid argument",
            Self::NotSupported => "not supported",
            Self::NoPermission => "no permission",
            Self::NotFound => "not found",
            Self::InsufficientSize => "buffer too small",
            Self::DriverNotLoaded => "the NVIDIA driver is not loaded",
            Self::Timeout => "timed out",
            Self::LibraryNotFound => "a library of the driver is missing",
            Self::FunctionNotFound => "the driver does not know the function",
            Self::GpuIsLost => "the GPU has fallen off the bus",
            Self::ResetRequired => "the GPU needs a reset",
            Self::OperatingSystem => "the operating system rejected the call",
            Self::LibRmVersionMismatch => "library and kernel driver have different versions",
            Self::GpuNotFound => "the GPU does not exist",
            Self::AlreadyInitialized => "already initialised",
            Self::InsufficientPower => "the board has no external power",
            Self::IrqIssue => "the kernel has a problem with the GPU's interrupts (NVML error 11)",
            Self::CorruptedInforom => "the configuration stored on the board is corrupted",
            Self::InUse => "the GPU is in use",
            Self::Memory => "the driver is out of memory",
            Self::NoData => "no data",
            Self::VgpuEccNotSupported => "vGPU is not possible while ECC is on",
            Self::InsufficientResources => "the driver is out of a resource other than memory",
            Self::FreqNotSupported => "this clock rate is not supported",
            Self::ArgumentVersionMismatch => "the driver does not know this version of the call's argument",
            Self::Deprecated => "the driver no longer has the function",
            Self::NotReady => "the GPU is not ready",
            Self::InvalidState => "the GPU's state does not allow the call",
            Self::ResetTypeNotSupported => "this kind of reset is not supported",
            Self::Unknown => "the driver reports an internal error (NVML error 999)",
            Self::Other(code) => {
                return write!(f, "NVML error {code}, which is newer than this version of Gantry");
            }
        })
    }
}

/// ` on GPU 3`, or nothing.
struct GpuSuffix(Option<u32>);

impl fmt::Display for GpuSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(index) => write!(f, " on GPU {index}"),
            None => Ok(()),
        }
    }
}

/// Advice on the code of a call, after a semicolon; empty if the code is self-explanatory.
struct Advice(&'static str, Code);

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(call, code) = self;
        f.write_str(match code {
            Code::DriverNotLoaded | Code::Uninitialized => {
                "; load the kernel module (modprobe nvidia); if it does not stay loaded, see dmesg"
            }
            Code::LibRmVersionMismatch => {
                "; the driver was updated while in use: reload the kernel module or reboot"
            }
            // Root without the capability can see GPUs, but not their MIG layout.
            Code::NoPermission if call.contains("Mig") || call.contains("GpuInstance") => {
                "; MIG needs CAP_SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all in a container: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml)"
            }
            Code::NoPermission => "; run as root with access to /dev/nvidiactl and /dev/nvidia*",
            Code::LibraryNotFound => "; mount the whole driver, not only libnvidia-ml.so.1",
            Code::GpuIsLost => {
                "; look for an Xid in dmesg, then reboot the node or check the board's power and seating"
            }
            Code::ResetRequired => "; drain the GPU and run nvidia-smi --gpu-reset",
            Code::OperatingSystem => {
                "; see dmesg, and check that this container has /dev/nvidia*"
            }
            Code::InsufficientPower => "; check the board's power connectors",
            Code::IrqIssue => {
                "; see dmesg for NVRM and interrupts, check MSI and the IOMMU in the BIOS and kernel settings, then reboot the node"
            }
            Code::CorruptedInforom => "; drain the GPU and run nvidia-smi --gpu-reset; if it stays, replace the board",
            Code::InUse => "; end the processes that nvidia-smi lists, or wait for the reset under way",
            Code::Memory | Code::InsufficientResources => "; see dmesg, free memory on the node, and reboot it if this lasts",
            Code::NotReady => {
                "; wait until the driver and its daemons (nvidia-persistenced, nvidia-fabricmanager) have started; see systemctl status and dmesg"
            }
            Code::InvalidState => "; see nvidia-smi -q; a reset of the GPU (nvidia-smi --gpu-reset) may be under way or needed",
            Code::Timeout => "; see dmesg for NVRM and Xid; if this lasts, drain the GPU and run nvidia-smi --gpu-reset",
            Code::GpuNotFound => "; check lspci -d 10de: and dmesg on the node",
            Code::InsufficientSize => "; report this with the version of the driver",
            Code::AlreadyInitialized | Code::InvalidArgument => "; report this with the version of the driver",
            Code::NotSupported | Code::FunctionNotFound | Code::ArgumentVersionMismatch | Code::Deprecated => {
                "; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md"
            }
            Code::NotFound | Code::NoData => "; the driver has no such item now: see nvidia-smi -q",
            Code::FreqNotSupported | Code::VgpuEccNotSupported | Code::ResetTypeNotSupported => {
                "; see nvidia-smi -q for what this GPU supports"
            }
            Code::Unknown => {
                "; see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node"
            }
            Code::Other(_) => "; see nvmlReturn_t of the installed driver's nvml.h, and dmesg",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn error_names_call_gpu_code_and_remedy() {
        let error = NvmlError::Call {
            call: "nvmlDeviceGetUUID",
            gpu: Some(3),
            code: Code::of(sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED),
        };
        assert_eq!(
            error.to_string(),
            "nvmlDeviceGetUUID on GPU 3 failed: the GPU needs a reset; drain the GPU and run nvidia-smi --gpu-reset"
        );
        let denied = |call| NvmlError::Call {
            call,
            gpu: None,
            code: Code::of(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION),
        };
        insta::assert_snapshot!(denied("nvmlInit_v2"), @"nvmlInit_v2 failed: no permission; run as root with access to /dev/nvidiactl and /dev/nvidia*");
        insta::assert_snapshot!(denied("nvmlDeviceGetMigDeviceHandleByIndex"), @"nvmlDeviceGetMigDeviceHandleByIndex failed: no permission; MIG needs CAP_SYS_ADMIN and NVIDIA_MIG_MONITOR_DEVICES=all in a container: label the node gantry.dev/mig=true (manifests/plugin-mig.yaml)");
        let unknown = NvmlError::Call { call: "nvmlInit_v2", gpu: None, code: Code::of(4711) };
        insta::assert_snapshot!(unknown, @"nvmlInit_v2 failed: NVML error 4711, which is newer than this version of Gantry; see nvmlReturn_t of the installed driver's nvml.h, and dmesg");
    }

    /// Users search for the words; a number alone does not help.
    #[test]
    fn every_code_has_words_and_advice() {
        let lines = (1..=30).chain([999]).map(|number| {
            let code = Code::of(number);
            assert!(!matches!(code, Code::Other(_)), "{number}");
            format!("{number}: {code}{}", Advice("nvmlDeviceGetMemoryInfo", code))
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"), @r"
        1: NVML is not initialised; load the kernel module (modprobe nvidia); if it does not stay loaded, see dmesg
        2: invalid argument; report this with the version of the driver
        3: not supported; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md
        4: no permission; run as root with access to /dev/nvidiactl and /dev/nvidia*
        5: already initialised; report this with the version of the driver
        6: not found; the driver has no such item now: see nvidia-smi -q
        7: buffer too small; report this with the version of the driver
        8: the board has no external power; check the board's power connectors
        9: the NVIDIA driver is not loaded; load the kernel module (modprobe nvidia); if it does not stay loaded, see dmesg
        10: timed out; see dmesg for NVRM and Xid; if this lasts, drain the GPU and run nvidia-smi --gpu-reset
        11: the kernel has a problem with the GPU's interrupts (NVML error 11); see dmesg for NVRM and interrupts, check MSI and the IOMMU in the BIOS and kernel settings, then reboot the node
        12: a library of the driver is missing; mount the whole driver, not only libnvidia-ml.so.1
        13: the driver does not know the function; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md
        14: the configuration stored on the board is corrupted; drain the GPU and run nvidia-smi --gpu-reset; if it stays, replace the board
        15: the GPU has fallen off the bus; look for an Xid in dmesg, then reboot the node or check the board's power and seating
        16: the GPU needs a reset; drain the GPU and run nvidia-smi --gpu-reset
        17: the operating system rejected the call; see dmesg, and check that this container has /dev/nvidia*
        18: library and kernel driver have different versions; the driver was updated while in use: reload the kernel module or reboot
        19: the GPU is in use; end the processes that nvidia-smi lists, or wait for the reset under way
        20: the driver is out of memory; see dmesg, free memory on the node, and reboot it if this lasts
        21: no data; the driver has no such item now: see nvidia-smi -q
        22: vGPU is not possible while ECC is on; see nvidia-smi -q for what this GPU supports
        23: the driver is out of a resource other than memory; see dmesg, free memory on the node, and reboot it if this lasts
        24: this clock rate is not supported; see nvidia-smi -q for what this GPU supports
        25: the driver does not know this version of the call's argument; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md
        26: the driver no longer has the function; the driver, the GPU or the virtual machine does not offer this: check the versions in docs/install.md
        27: the GPU is not ready; wait until the driver and its daemons (nvidia-persistenced, nvidia-fabricmanager) have started; see systemctl status and dmesg
        28: the GPU does not exist; check lspci -d 10de: and dmesg on the node
        29: the GPU's state does not allow the call; see nvidia-smi -q; a reset of the GPU (nvidia-smi --gpu-reset) may be under way or needed
        30: this kind of reset is not supported; see nvidia-smi -q for what this GPU supports
        999: the driver reports an internal error (NVML error 999); see dmesg for NVRM and Xid; drain the GPU and run nvidia-smi --gpu-reset, or reboot the node
        ");
    }

    #[test]
    fn only_a_lost_gpu_is_called_lost() {
        let mut by_kind = BTreeMap::<String, Vec<u32>>::new();
        for number in (1..=30).chain([999, 4711]) {
            let code = Code::of(number);
            let error = NvmlError::Call { call: "nvmlDeviceGetHandleByIndex_v2", gpu: Some(1), code };
            let text = error.of_gpu();
            by_kind.entry(text.split(':').next().unwrap().to_owned()).or_default().push(number);
        }
        insta::assert_snapshot!(format!("{by_kind:?}"), @r#"{"GPU cannot be queried": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 999, 4711], "GPU lost": [15, 28], "GPU needs a reset": [16]}"#);
    }
}
