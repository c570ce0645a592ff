//! Handles: numbers that look like pointers and are never followed, so that a stale or forged one is an error, not a crash.
//!
//! A device handle holds a mark, the GPU's index, and for a MIG device the ids of its GPU instance and compute instance with a
//! digest of its UUID: where another device has taken its place meanwhile, the handle is stale, as the real library's is.

/// What `nvmlDevice_t` is here: a whole GPU or a MIG device.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device(u64);

/// What `nvmlGpuInstance_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuInstance(u64);

/// What `nvmlComputeInstance_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeInstance(u64);

/// What `nvmlEventSet_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventSet(u64);

/// What `nvmlGpmSample_t` is here.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpmSample(u64);

/// Where an instance was when its handle was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InstanceHandle {
    /// Index of the GPU.
    pub(crate) gpu: usize,
    /// Id of the GPU instance.
    pub(crate) gpu_instance: u32,
    /// Id of the compute instance; 0 in the handle of a GPU instance.
    pub(crate) compute_instance: u32,
    /// A digest of what was there, [`DIGEST_BITS`] wide.
    pub(crate) digest: u32,
}

/// What a device handle stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandleTarget {
    /// The GPU of this index.
    Whole(usize),
    /// A MIG device.
    Mig(InstanceHandle),
}

/// Bits of a handle that distinguish one content of a slot from another.
pub(crate) const DIGEST_BITS: u32 = 17;

const DEVICE_MARK: u64 = 0x6e76_6d6c_0000_0000;
const GPU_INSTANCE_MARK: u64 = 0x6e76_6769_0000_0000;
const COMPUTE_INSTANCE_MARK: u64 = 0x6e76_6369_0000_0000;
const SET_MARK: u64 = 0x6e76_6573_0000_0000;
const SAMPLE_MARK: u64 = 0x6e76_706d_0000_0000;
const MARK_MASK: u64 = 0xffff_ffff_0000_0000;
/// Set in the handles of instances, clear in those of whole GPUs.
const INSTANCE: u64 = 1 << 31;

impl InstanceHandle {
    /// The place in the lower half of a handle: a bit, 5 for the GPU, 5 and 4 for the instances, the digest.
    fn bits(self) -> u64 {
        let digest = u64::from(self.digest) & ((1 << DIGEST_BITS) - 1);
        INSTANCE
            | (self.gpu as u64 & 31) << 26
            | (u64::from(self.gpu_instance) & 31) << 21
            | (u64::from(self.compute_instance) & 15) << DIGEST_BITS
            | digest
    }

    fn of(handle: u64, mark: u64) -> Option<Self> {
        let field = |shift: u32, bits: u32| (handle >> shift & ((1 << bits) - 1)) as u32;
        (handle & MARK_MASK == mark && handle & INSTANCE != 0).then(|| Self {
            gpu: field(26, 5) as usize,
            gpu_instance: field(21, 5),
            compute_instance: field(DIGEST_BITS, 4),
            digest: field(0, DIGEST_BITS),
        })
    }
}

impl Device {
    /// The handle of a whole GPU.
    pub(crate) fn whole(index: usize) -> Self {
        // A machine has far fewer GPUs than 15 bits count.
        Self(DEVICE_MARK | (index as u64 & 0x7fff) << 16)
    }

    /// The handle of a MIG device.
    pub(crate) fn mig(place: InstanceHandle) -> Self {
        Self(DEVICE_MARK | place.bits())
    }

    /// What the handle stands for; nothing, if it was not made here.
    pub(crate) fn named(self) -> Option<HandleTarget> {
        if let Some(place) = InstanceHandle::of(self.0, DEVICE_MARK) {
            return Some(HandleTarget::Mig(place));
        }
        let valid = self.0 & MARK_MASK == DEVICE_MARK && self.0 & 0xffff == 0;
        valid.then_some(HandleTarget::Whole((self.0 >> 16 & 0x7fff) as usize))
    }
}

impl GpuInstance {
    /// The handle of the GPU instance at `place`.
    pub(crate) fn at(place: InstanceHandle) -> Self {
        Self(GPU_INSTANCE_MARK | place.bits())
    }

    /// The place, if the handle was made here.
    pub(crate) fn place(self) -> Option<InstanceHandle> {
        InstanceHandle::of(self.0, GPU_INSTANCE_MARK)
    }
}

impl ComputeInstance {
    /// The handle of the compute instance at `place`.
    pub(crate) fn at(place: InstanceHandle) -> Self {
        Self(COMPUTE_INSTANCE_MARK | place.bits())
    }

    /// The place, if the handle was made here.
    pub(crate) fn place(self) -> Option<InstanceHandle> {
        InstanceHandle::of(self.0, COMPUTE_INSTANCE_MARK)
    }
}

impl EventSet {
    /// The handle of set `number`.
    pub(crate) fn of(number: u64) -> Self {
        Self(SET_MARK | (number & !MARK_MASK))
    }

    /// The number of the set; 0, which no set has, for anything that is no handle of a set.
    pub(crate) fn number(self) -> u64 {
        if self.0 & MARK_MASK == SET_MARK { self.0 & !MARK_MASK } else { 0 }
    }
}

impl GpmSample {
    /// The handle of sample `number`.
    pub(crate) fn of(number: u64) -> Self {
        Self(SAMPLE_MARK | (number & !MARK_MASK))
    }

    /// The number of the sample; 0, which no sample has, for anything that is no handle of one.
    pub(crate) fn number(self) -> u64 {
        if self.0 & MARK_MASK == SAMPLE_MARK { self.0 & !MARK_MASK } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_handles_made_here_are_taken() {
        for index in [0, 1, 31] {
            assert_eq!(Device::whole(index).named(), Some(HandleTarget::Whole(index)));
        }
        assert_eq!(EventSet::of(7).number(), 7);
        for forged in [0, 1, 0x7f00_dead_beef, DEVICE_MARK | 1, SET_MARK | 7] {
            assert_eq!(Device(forged).named(), None);
            assert_eq!(GpuInstance(forged).place(), None);
        }
        assert_eq!(EventSet(DEVICE_MARK | 7).number(), 0);
    }

    #[test]
    fn handle_finds_its_instance_and_no_other_kind() {
        let place =
            InstanceHandle { gpu: 31, gpu_instance: 14, compute_instance: 6, digest: (1 << DIGEST_BITS) - 1 };
        assert_eq!(Device::mig(place).named(), Some(HandleTarget::Mig(place)));
        assert_eq!(GpuInstance::at(place).place(), Some(place));
        assert_eq!(ComputeInstance::at(place).place(), Some(place));
        assert_eq!(GpuInstance(Device::mig(place).0).place(), None);
        assert_eq!(ComputeInstance(GpuInstance::at(place).0).place(), None);
        assert_eq!(Device(ComputeInstance::at(place).0).named(), None);
    }
}
