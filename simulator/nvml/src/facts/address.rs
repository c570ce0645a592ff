//! PCIe addresses as numbers, the two ways NVML and sysfs write them, and the buses that are free.

use std::fmt;

use gantry_topology::{Machine, PcieAddress};

/// A PCIe address, taken apart. Prints as sysfs writes it: `0000:07:00.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
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

/// Bus numbers that no device of the machine file has taken.
pub(super) struct FreeBuses {
    taken: Vec<(u32, u8)>,
    domain: u32,
    bus: u8,
}

impl FreeBuses {
    /// The lowest bus given out; those below belong to the board's own devices.
    const FIRST: u8 = 0x10;
    /// Buses between two given out, as boards with switches space them.
    const STEP: u8 = 3;

    pub(super) fn beside(machine: &Machine) -> Self {
        let gpus = machine.gpus().iter().map(|gpu| gpu.bus_id.as_ref());
        let nics = machine.nics().iter().map(|nic| nic.bus_id.as_ref());
        Self {
            taken: gpus.chain(nics).filter_map(given).map(|address| (address.domain, address.bus)).collect(),
            domain: 0,
            bus: Self::FIRST,
        }
    }

    pub(super) fn take(&mut self) -> Address {
        loop {
            let (domain, bus) = (self.domain, self.bus);
            match bus.checked_add(Self::STEP) {
                Some(next) => self.bus = next,
                None => (self.domain, self.bus) = (domain + 1, Self::FIRST),
            }
            if !self.taken.contains(&(domain, bus)) {
                return Address::on_bus(domain, bus);
            }
        }
    }
}

pub(super) fn given(address: Option<&PcieAddress>) -> Option<Address> {
    address.and_then(Address::of)
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
