//! PCIe addresses as numbers, and the two ways NVML and sysfs write them.

use std::fmt;

use gantry_topology::PcieAddress;

/// A PCIe address, taken apart. Prints as sysfs writes it: `0000:07:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl Address {
    /// Device 0, function 0 of a bus: where a GPU sits.
    pub fn on_bus(domain: u32, bus: u8) -> Self {
        Self { domain, bus, device: 0, function: 0 }
    }

    /// Reads any form that [`PcieAddress`] takes; `None` if it takes none.
    pub fn parse(text: &str) -> Option<Self> {
        text.parse::<PcieAddress>().ok().and_then(|address| Self::of(&address))
    }

    /// The numbers of a checked address.
    pub fn of(address: &PcieAddress) -> Option<Self> {
        let mut colons = address.as_str().splitn(3, ':');
        let domain = u32::from_str_radix(colons.next()?, 16).ok()?;
        let bus = u8::from_str_radix(colons.next()?, 16).ok()?;
        let (device, function) = colons.next()?.split_once('.')?;
        Some(Self {
            domain,
            bus,
            device: u8::from_str_radix(device, 16).ok()?,
            function: u8::from_str_radix(function, 16).ok()?,
        })
    }

    /// As NVML's `busId` writes it: eight digits of domain, upper case, function 0.
    pub fn nvml(self) -> String {
        format!("{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// As NVML's `busIdLegacy` writes it: four digits of domain.
    pub fn nvml_legacy(self) -> String {
        format!("{:04X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// Whether both are functions of one device.
    pub fn same_slot(self, other: Self) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvmls_form_and_sysfs_form_name_the_same_device() {
        let address = Address::parse("00000000:0F:00.0").unwrap();
        assert_eq!(address.to_string(), "0000:0f:00.0");
        assert_eq!(address.nvml(), "00000000:0F:00.0");
        assert_eq!(address.nvml_legacy(), "0000:0F:00.0");
        assert_eq!(Address::parse("elsewhere"), None);
    }
}
