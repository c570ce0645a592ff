//! Identifiers of a machine file: GPU UUIDs, PCIe addresses, lists of CPU or NUMA numbers. Each is checked when it is constructed, so that no
//! other module has to.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A malformed identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is no {kind}; {allowed}")]
pub struct IdError {
    /// The expected kind of identifier.
    pub kind: &'static str,
    /// The value found.
    pub value: String,
    /// The form allowed.
    pub allowed: &'static str,
}

/// Defines a string newtype with values checked by a function, and its conversions.
macro_rules! checked_string {
    ($(#[$doc:meta])* $name:ident, $check:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        #[schemars(with = "String")]
        pub struct $name(String);

        impl $name {
            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                $check(text).map(Self)
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }
    };
}

checked_string!(
    /// A GPU's UUID as NVML prints it: `GPU-` and a UUID. Kept as written.
    GpuUuid,
    check_gpu_uuid
);
checked_string!(
    /// A MIG device's UUID as NVML prints it: `MIG-` and a UUID, or before driver 470 `MIG-GPU-<uuid>/<gpu instance>/<compute
    /// instance>`. Kept as written.
    MigUuid,
    check_mig_uuid
);
checked_string!(
    /// A PCIe address in sysfs form, lower case: `0000:07:00.0`. NVML's eight-digit domains are shortened.
    PcieAddress,
    normalise_pcie_address
);
checked_string!(
    /// A list of CPU or NUMA numbers as Linux writes it: `0-15,128-143`. Kept as written.
    IdList,
    check_id_list
);

impl IdList {
    /// The largest number a list may hold; Linux's own bound on CPUs is 8192.
    pub const MAX: u32 = 16_383;

    /// The numbers, in the order written.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.split(',').filter_map(parse_range).flat_map(|(from, to)| from..=to)
    }

    /// The numbers as ranges, both ends included: ascending, each number in one of them, no two of them joined.
    pub fn ranges(&self) -> Vec<(u32, u32)> {
        let mut written: Vec<(u32, u32)> = self.0.split(',').filter_map(parse_range).collect();
        written.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (from, to) in written {
            match ranges.last_mut() {
                Some((_, end)) if from <= *end + 1 => *end = to.max(*end),
                _ => ranges.push((from, to)),
            }
        }
        ranges
    }
}

fn check_gpu_uuid(text: &str) -> Result<String, IdError> {
    let tail = text.strip_prefix("GPU-").unwrap_or_default();
    let valid =
        !tail.is_empty() && tail.len() <= 80 && tail.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    if valid {
        Ok(text.to_owned())
    } else {
        Err(IdError {
            kind: "GPU UUID",
            value: text.to_owned(),
            allowed: "write GPU- and hexadecimal digits with dashes",
        })
    }
}

fn check_mig_uuid(text: &str) -> Result<String, IdError> {
    let tail = text.strip_prefix("MIG-").unwrap_or_default();
    let tail = tail.strip_prefix("GPU-").unwrap_or(tail);
    let valid = !tail.is_empty()
        && tail.len() <= 96
        && tail.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-' || b == b'/');
    if valid {
        Ok(text.to_owned())
    } else {
        Err(IdError {
            kind: "MIG UUID",
            value: text.to_owned(),
            allowed: "write MIG- and hexadecimal digits with dashes",
        })
    }
}

fn normalise_pcie_address(text: &str) -> Result<String, IdError> {
    let parse = || {
        let mut colons = text.splitn(3, ':');
        let domain = u32::from_str_radix(colons.next()?, 16).ok()?;
        let bus = u8::from_str_radix(colons.next()?, 16).ok()?;
        let (device, function) = colons.next()?.split_once('.')?;
        let device = u8::from_str_radix(device, 16).ok().filter(|device| *device < 32)?;
        let function = u8::from_str_radix(function, 16).ok().filter(|function| *function < 8)?;
        Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    };
    parse().ok_or_else(|| IdError {
        kind: "PCIe address",
        value: text.to_owned(),
        allowed: "write domain:bus:device.function in hexadecimal, such as 0000:07:00.0",
    })
}

fn check_id_list(text: &str) -> Result<String, IdError> {
    if !text.is_empty() && text.len() <= 4096 && text.split(',').all(|part| parse_range(part).is_some()) {
        Ok(text.to_owned())
    } else {
        Err(IdError {
            kind: "list of numbers",
            value: text.to_owned(),
            allowed: "write numbers and ranges up to 16383 with commas, such as 0-15,128-143",
        })
    }
}

/// Linux writes no zeros before a number: what has some has lost something, or is a number of another kind.
fn parse_range(part: &str) -> Option<(u32, u32)> {
    let number = |text: &str| {
        text.parse::<u32>().ok().filter(|n| {
            *n <= IdList::MAX && !text.starts_with('+') && (text == "0" || !text.starts_with('0'))
        })
    };
    let (from, to) = match part.split_once('-') {
        Some((from, to)) => (number(from)?, number(to)?),
        None => (number(part)?, number(part)?),
    };
    (from <= to).then_some((from, to))
}
