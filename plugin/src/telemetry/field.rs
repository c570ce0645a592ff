//! The metrics by the names, types and units of NVIDIA's dcgm-exporter.

/// Defines the fields: each has its metric's name, type and help text.
macro_rules! fields {
    ($($field:ident = $name:literal $kind:ident $help:literal;)*) => {
        /// A metric of a GPU or GPU instance.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Field { $($field,)* }

        impl Field {
            pub const ALL: &[Self] = &[$(Self::$field,)*];

            pub const fn name(self) -> &'static str {
                match self { $(Self::$field => $name,)* }
            }

            pub const fn kind(self) -> &'static str {
                match self { $(Self::$field => stringify!($kind),)* }
            }

            pub const fn help(self) -> &'static str {
                match self { $(Self::$field => $help,)* }
            }
        }
    };
}

fields! {
    SmClock = "DCGM_FI_DEV_SM_CLOCK" gauge "Clock of the multiprocessors in MHz";
    MemoryClock = "DCGM_FI_DEV_MEM_CLOCK" gauge "Clock of the memory in MHz";
    ClockReasons = "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS" gauge "Why the clocks are held down, as NVML's bits";
    MemoryCelsius = "DCGM_FI_DEV_MEMORY_TEMP" gauge "Temperature of the memory in degrees Celsius";
    Celsius = "DCGM_FI_DEV_GPU_TEMP" gauge "Temperature of the GPU in degrees Celsius";
    Watts = "DCGM_FI_DEV_POWER_USAGE" gauge "Power in W";
    WattLimit = "DCGM_FI_DEV_POWER_MGMT_LIMIT" gauge "Power limit in W, above which the clocks are held down";
    Millijoules = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION" counter "Energy in mJ since the driver was loaded";
    PcieSentKb = "DCGM_FI_DEV_PCIE_TX_THROUGHPUT" counter "KB per second that the GPU sent over PCIe";
    PcieReceivedKb = "DCGM_FI_DEV_PCIE_RX_THROUGHPUT" counter "KB per second that the GPU received over PCIe";
    PcieReplays = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER" counter "PCIe transfers that were repeated";
    GpuLoad = "DCGM_FI_DEV_GPU_UTIL" gauge "Share of time in which a kernel ran, in percent";
    MemoryLoad = "DCGM_FI_DEV_MEM_COPY_UTIL" gauge "Share of time in which memory was read or written, in percent";
    EncoderLoad = "DCGM_FI_DEV_ENC_UTIL" gauge "Load of the video encoder in percent";
    DecoderLoad = "DCGM_FI_DEV_DEC_UTIL" gauge "Load of the video decoder in percent";
    Xid = "DCGM_FI_DEV_XID_ERRORS" gauge "The last Xid since the plugin started; 0 without one";
    MemoryTotal = "DCGM_FI_DEV_FB_TOTAL" gauge "Memory in MiB";
    MemoryFree = "DCGM_FI_DEV_FB_FREE" gauge "Free memory in MiB";
    MemoryUsed = "DCGM_FI_DEV_FB_USED" gauge "Memory used by processes in MiB";
    MemoryReserved = "DCGM_FI_DEV_FB_RESERVED" gauge "Memory kept by the driver in MiB";
    CorrectedVolatile = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL" counter "Corrected memory errors since the driver was loaded";
    UncorrectedVolatile = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL" counter "Uncorrected memory errors since the driver was loaded";
    CorrectedAggregate = "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL" counter "Corrected memory errors over the life of the board";
    UncorrectedAggregate = "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL" counter "Uncorrected memory errors over the life of the board";
    RetiredCorrected = "DCGM_FI_DEV_RETIRED_SBE" counter "Memory pages retired for corrected errors";
    RetiredUncorrected = "DCGM_FI_DEV_RETIRED_DBE" counter "Memory pages retired for uncorrected errors";
    RetirementPending = "DCGM_FI_DEV_RETIRED_PENDING" counter "1 if memory pages wait to be retired";
    RemappedUncorrected = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS" counter "Memory rows replaced for uncorrected errors";
    RemappedCorrected = "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS" counter "Memory rows replaced for corrected errors";
    RemapFailure = "DCGM_FI_DEV_ROW_REMAP_FAILURE" gauge "1 if a memory row could not be replaced";
    NvLinkFlitErrors = "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL" counter "CRC errors in NVLink flow control";
    NvLinkDataErrors = "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL" counter "CRC errors in NVLink data";
    NvLinkReplays = "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL" counter "NVLink transfers that were repeated";
    NvLinkRecoveries = "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL" counter "Recoveries of NVLinks";
    NvLinkMib = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL" counter "MiB per second that the GPU sent and received over NVLink";
    GraphicsActive = "DCGM_FI_PROF_GR_ENGINE_ACTIVE" gauge "Share of time in which the compute engine was active, 0 to 1";
    SmActive = "DCGM_FI_PROF_SM_ACTIVE" gauge "Share of time in which a multiprocessor had a warp, 0 to 1";
    SmOccupancy = "DCGM_FI_PROF_SM_OCCUPANCY" gauge "Share of the warps that the multiprocessors can hold, 0 to 1";
    TensorActive = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" gauge "Share of time in which the tensor pipe was active, 0 to 1";
    DramActive = "DCGM_FI_PROF_DRAM_ACTIVE" gauge "Share of the memory bandwidth in use, 0 to 1";
    Fp64Active = "DCGM_FI_PROF_PIPE_FP64_ACTIVE" gauge "Share of time in which the fp64 pipe was active, 0 to 1";
    Fp32Active = "DCGM_FI_PROF_PIPE_FP32_ACTIVE" gauge "Share of time in which the fp32 pipe was active, 0 to 1";
    Fp16Active = "DCGM_FI_PROF_PIPE_FP16_ACTIVE" gauge "Share of time in which the fp16 pipe was active, 0 to 1";
    PcieSent = "DCGM_FI_PROF_PCIE_TX_BYTES" gauge "Bytes per second that the GPU sent over PCIe";
    PcieReceived = "DCGM_FI_PROF_PCIE_RX_BYTES" gauge "Bytes per second that the GPU received over PCIe";
    NvLinkSent = "DCGM_FI_PROF_NVLINK_TX_BYTES" gauge "Bytes per second that the GPU sent over NVLink";
    NvLinkReceived = "DCGM_FI_PROF_NVLINK_RX_BYTES" gauge "Bytes per second that the GPU received over NVLink";
}

/// A value for each field that the GPU answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Values([Option<f64>; Field::ALL.len()]);

impl Default for Values {
    fn default() -> Self {
        Self([None; Field::ALL.len()])
    }
}

impl Values {
    pub fn get(&self, field: Field) -> Option<f64> {
        self.0.get(field as usize).copied().flatten()
    }

    pub(super) fn set(&mut self, field: Field, value: impl Into<Option<f64>>) {
        if let Some(place) = self.0.get_mut(field as usize) {
            *place = value.into();
        }
    }
}
