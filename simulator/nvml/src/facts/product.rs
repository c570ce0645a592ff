//! Facts of a GPU product: everything that NVML reports and a machine file lacks. A product outside the table is
//! described by its compute capability.

use std::sync::LazyLock;

use nvml_wrapper_sys::bindings as sys;

/// The products known, then the board of a machine file that names no model.
static KNOWN: LazyLock<Vec<Product>> = LazyLock::new(|| rows().filter_map(Product::read).collect());

/// One GPU product, with the figures NVML reports for every board of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Product {
    /// Product name as NVML prints it.
    pub name: &'static str,
    /// `NVML_DEVICE_ARCH_*`.
    pub architecture: u32,
    /// CUDA compute capability, major and minor.
    pub compute_capability: (u8, u8),
    /// `NVML_BRAND_*`.
    pub brand: u32,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// BAR1 aperture in MiB.
    pub bar1_mib: u64,
    /// PCI device id, without the vendor's.
    pub device_id: u16,
    /// PCIe generation and lanes the board can run.
    pub pcie: (u8, u8),
    /// NVLink version (0 if the board has none) and number of links in the hardware.
    pub nvlink: (u8, u8),
    /// Rate of one NVLink in MB/s, one direction.
    pub nvlink_mbps: u32,
    /// Default power limit in watts.
    pub power_watts: u32,
    /// Streaming multiprocessors and CUDA cores.
    pub cores: (u32, u32),
    /// Highest SM and memory clocks in MHz.
    pub clocks: (u32, u32),
    /// Width of the memory bus in bits.
    pub memory_bus: u32,
    /// Whether the board counts ECC errors.
    pub ecc: bool,
    /// Whether the GPU supports MIG.
    pub mig: bool,
    /// Whether the board drives displays (PCI class VGA, not 3D).
    pub display: bool,
    /// Whether GPU and CPU share NVLink-C2C.
    pub c2c: bool,
}

impl Product {
    /// Every product with a name.
    pub fn all() -> &'static [Self] {
        KNOWN.split_last().map_or(&[], |(_, named)| named)
    }

    /// The product called `model`; failing that, one of the architecture of `compute_capability`; failing both, a plain
    /// data centre GPU.
    pub fn find(model: Option<&str>, compute_capability: Option<(u8, u8)>) -> Self {
        let named = model.and_then(|model| KNOWN.iter().find(|product| product.name == model));
        let alike = || KNOWN.iter().find(|product| Some(product.compute_capability) == compute_capability);
        // The table is part of the source, and a test reads every row of it: it is never empty.
        named.or_else(alike).or(KNOWN.last()).copied().unwrap_or_default()
    }

    /// Reads a row of the table.
    fn read(row: &'static str) -> Option<Self> {
        let mut cells = row.split(',');
        let (name, architecture, capability, brand) =
            (cells.next()?, cells.next()?, cells.next()?, cells.next()?);
        let (major, minor) = capability.split_once('.')?;
        let (memory_mib, bar1_mib, device_id) = (cells.next()?, cells.next()?, cells.next()?);
        let mut number = || cells.next()?.parse::<u32>().ok();
        let mut small = || u8::try_from(number()?).ok();
        let (pcie, nvlink) = ((small()?, small()?), (small()?, small()?));
        let (nvlink_mbps, power_watts) = (number()?, number()?);
        let (cores, clocks, memory_bus) = ((number()?, number()?), (number()?, number()?), number()?);
        let features = cells.next()?;
        let has = |feature: &str| features.split(' ').any(|word| word == feature);
        cells.next().is_none().then_some(Self {
            name,
            architecture: match architecture {
                "pascal" => sys::NVML_DEVICE_ARCH_PASCAL,
                "volta" => sys::NVML_DEVICE_ARCH_VOLTA,
                "turing" => sys::NVML_DEVICE_ARCH_TURING,
                "ampere" => sys::NVML_DEVICE_ARCH_AMPERE,
                "ada" => sys::NVML_DEVICE_ARCH_ADA,
                "hopper" => sys::NVML_DEVICE_ARCH_HOPPER,
                "blackwell" => sys::NVML_DEVICE_ARCH_BLACKWELL,
                _ => return None,
            },
            compute_capability: (major.parse().ok()?, minor.parse().ok()?),
            brand: match brand {
                "tesla" => sys::nvmlBrandType_enum_NVML_BRAND_TESLA,
                "nvidia" => sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA,
                "geforce" => sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE,
                "rtx" => sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX,
                _ => return None,
            },
            memory_mib: memory_mib.parse().ok()?,
            bar1_mib: bar1_mib.parse().ok()?,
            device_id: u16::from_str_radix(device_id, 16).ok()?,
            pcie,
            nvlink,
            nvlink_mbps,
            power_watts,
            cores,
            clocks,
            memory_bus,
            ecc: has("ecc"),
            mig: has("mig"),
            display: has("display"),
            c2c: has("c2c"),
        })
    }
}

/// The rows of the table, without comments and header.
fn rows() -> impl Iterator<Item = &'static str> {
    let lines = include_str!("../../data/products.csv").lines();
    lines.filter(|line| !line.starts_with('#')).skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn product_is_found_by_name_and_else_by_architecture() {
        assert_eq!(Product::find(Some("NVIDIA L4"), None).memory_mib, 23_034);
        assert_eq!(
            Product::find(Some("NVIDIA Unheard-of"), Some((9, 0))).architecture,
            sys::NVML_DEVICE_ARCH_HOPPER
        );
        assert_eq!(Product::find(None, None).name, "NVIDIA Simulated GPU");
    }

    #[test]
    fn table_has_distinct_valid_products() {
        assert_eq!(KNOWN.len(), rows().count(), "every row is a product");
        for (position, product) in KNOWN.iter().enumerate() {
            assert!(KNOWN[..position].iter().all(|other| other.name != product.name));
            assert!(product.memory_mib > 0 && product.device_id > 0, "{}", product.name);
            assert_eq!(product.nvlink.0 == 0, product.nvlink_mbps == 0, "{}", product.name);
        }
    }
}
