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
    #[error("{call}{} failed: {code}{}", OnGpu(*.gpu), Advice(call, *.code))]
    Call {
        call: &'static str,
        /// Index of the GPU it was about, if it was about one.
        gpu: Option<u32>,
        /// The code that NVML returned.
        code: Code,
    },
    /// A call succeeded with an unexpected value.
    #[error("{call}{} returned {returned:?}, expected {expected}", OnGpu(*.gpu))]
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
    /// The kernel driver is not loaded.
    DriverNotLoaded,
    /// The call timed out.
    Timeout,
    /// A library that the driver needs is missing.
    LibraryNotFound,
    /// The driver does not know the function.
    FunctionNotFound,
    /// The GPU has fallen off the bus.
    GpuIsLost,
    /// The GPU needs a reset.
    ResetRequired,
    /// The operating system refused.
    OperatingSystem,
    /// Library and kernel driver are of different versions.
    LibRmVersionMismatch,
    /// The GPU does not exist.
    GpuNotFound,
    /// Any other code.
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
            Self::Other(code) => return write!(f, "NVML error {code}"),
        })
    }
}

/// ` on GPU 3`, or nothing.
struct OnGpu(Option<u32>);

impl fmt::Display for OnGpu {
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
            _ => "",
        })
    }
}

#[cfg(test)]
mod tests {
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
        assert!(denied("nvmlInit_v2").to_string().contains("run as root"));
        let mig = denied("nvmlDeviceGetMigDeviceHandleByIndex").to_string();
        assert!(mig.contains("gantry.dev/mig=true") && !mig.contains("root"), "{mig}");
        let unknown = NvmlError::Call { call: "nvmlInit_v2", gpu: None, code: Code::of(4711) };
        assert_eq!(unknown.to_string(), "nvmlInit_v2 failed: NVML error 4711");
    }
}
