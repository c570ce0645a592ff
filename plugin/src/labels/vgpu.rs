//! Parses the vendor capability in a virtual GPU's PCI configuration space, which names the hypervisor's driver.

/// Driver of the host of a virtual GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostDriver {
    /// Version, e.g. `460.16`.
    pub version: String,
    /// Branch, e.g. `r460_00`.
    pub branch: String,
}

/// Required bytes of configuration space; a process without CAP_SYS_ADMIN can read only 64.
pub(super) const CONFIGURATION: usize = 256;

/// The status register, its "has capabilities" bit, and the offset of the first capability (PCI Local Bus 3.0, 6.1).
const STATUS: usize = 0x06;
const HAS_CAPABILITIES: u8 = 0x10;
const FIRST: usize = 0x34;
/// The capability id for vendors.
const VENDOR: u8 = 0x09;
/// NVIDIA's capability: a mark, then records of number, length and content.
const MARK: &[u8] = b"VF";
const MARK_AT: usize = 3;
const RECORDS: usize = 5;
/// Length of each of the two texts in record 0.
const TEXT: usize = 10;

/// The host driver of a virtual GPU, if it reports one, by its configuration space; the outer `None`: no virtual GPU.
pub(super) fn read(configuration: &[u8]) -> Option<Option<HostDriver>> {
    let capability = vendor_capability(configuration)?;
    (capability.get(MARK_AT..RECORDS) == Some(MARK)).then(|| host_driver(capability))
}

/// The first vendor capability. `None` if the chain has a cycle or leaves the space.
fn vendor_capability(configuration: &[u8]) -> Option<&[u8]> {
    let byte = |at: usize| configuration.get(at).copied();
    if configuration.len() < CONFIGURATION || byte(STATUS)? & HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(byte(FIRST)?);
    // The space has room for no more.
    for _ in 0..CONFIGURATION {
        match (at, byte(at)?) {
            (0, _) | (_, 0xff) => return None,
            (_, VENDOR) => {
                let length = usize::from(byte(at + 2)?);
                return configuration.get(at..at + length);
            }
            _ => at = usize::from(byte(at + 1)?),
        }
    }
    None
}

fn host_driver(capability: &[u8]) -> Option<HostDriver> {
    let mut at = RECORDS;
    while *capability.get(at)? != 0 {
        match *capability.get(at + 1)? {
            0 => return None,
            length => at += usize::from(length),
        }
    }
    let text = |from: usize| {
        let bytes = capability.get(from..from + TEXT)?;
        let text = String::from_utf8_lossy(bytes);
        Some(text.trim_matches('\0').to_owned())
    };
    Some(HostDriver { version: text(at + 2)?, branch: text(at + 2 + TEXT)? })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A configuration space with these capabilities behind one another: id, then content from the third byte on.
    fn space(capabilities: &[(u8, &[u8])]) -> Vec<u8> {
        let mut space = vec![0; CONFIGURATION];
        space[STATUS] = HAS_CAPABILITIES;
        let mut at = 0x40;
        space[FIRST] = 0x40;
        for (position, (id, content)) in capabilities.iter().enumerate() {
            let next = at + content.len() + 3;
            space[at] = *id;
            space[at + 1] = if position + 1 < capabilities.len() { next as u8 } else { 0 };
            space[at + 2] = content.len() as u8 + 3;
            space[at + 3..next].copy_from_slice(content);
            at = next;
        }
        space
    }

    const DRIVER: &[u8] = b"VF\x00\x16460.16\0\0\0\0r460_00\0\0\0";

    #[test]
    fn virtual_gpu_reports_host_driver() {
        let space = space(&[(0x05, &[1, 2, 3]), (VENDOR, DRIVER)]);
        let driver = HostDriver { version: "460.16".into(), branch: "r460_00".into() };
        assert_eq!(read(&space), Some(Some(driver)));
    }

    #[test]
    fn records_before_the_driver_are_skipped() {
        let content = [b"VF\x02\x04xx", &DRIVER[2..]].concat();
        let found = read(&space(&[(VENDOR, &content)])).unwrap().unwrap();
        assert_eq!(found.version, "460.16");
    }

    #[test]
    fn virtual_gpu_without_driver_record_is_recognised() {
        assert_eq!(read(&space(&[(VENDOR, b"VF\x05\x00")])), Some(None));
        assert_eq!(read(&space(&[(VENDOR, b"VF\x00\x16460")])), Some(None));
    }

    #[test]
    fn passed_through_gpu_is_not_virtual() {
        assert_eq!(read(&space(&[(0x01, &[0; 5]), (VENDOR, b"\x14\x01")])), None);
        assert_eq!(read(&space(&[])), None);
        assert_eq!(read(&space(&[(VENDOR, DRIVER)])[..64]), None);
        let mut circle = space(&[(0x05, &[0])]);
        circle[0x41] = 0x40;
        assert_eq!(read(&circle), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(mut space in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(status) = space.get_mut(STATUS) {
                *status |= HAS_CAPABILITIES;
            }
            let _ = read(&space);
        }
    }
}
