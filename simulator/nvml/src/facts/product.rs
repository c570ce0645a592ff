//! Facts of a GPU product: everything that NVML reports and a machine file lacks. A product outside the table is
//! described by its compute capability.

mod table;

pub use table::PRODUCTS;
use table::UNNAMED;

/// One GPU product, with the figures NVML reports for every board of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Whether the GPU can be cut into MIG instances.
    pub mig: bool,
    /// Whether the board drives displays (PCI class VGA, not 3D).
    pub display: bool,
    /// Whether GPU and CPU share NVLink-C2C.
    pub c2c: bool,
}

impl Product {
    /// The product called `model`; failing that, one of the architecture of `compute_capability`; failing both, a plain
    /// data centre GPU.
    pub fn find(model: Option<&str>, compute_capability: Option<(u8, u8)>) -> Self {
        let known = || PRODUCTS.iter().chain([&UNNAMED]);
        let named = model.and_then(|model| known().find(|product| product.name == model));
        let alike = compute_capability
            .and_then(|wanted| known().find(|product| product.compute_capability == wanted));
        *named.or(alike).unwrap_or(&UNNAMED)
    }
}

#[cfg(test)]
mod tests {
    use nvml_wrapper_sys::bindings as sys;

    use super::*;

    #[test]
    fn a_product_is_found_by_its_name_and_else_by_its_architecture() {
        assert_eq!(Product::find(Some("NVIDIA L4"), None).memory_mib, 23_034);
        assert_eq!(
            Product::find(Some("NVIDIA Unheard-of"), Some((9, 0))).architecture,
            sys::NVML_DEVICE_ARCH_HOPPER
        );
        assert_eq!(Product::find(None, None), UNNAMED);
    }

    #[test]
    fn no_two_products_share_a_name() {
        for (position, product) in PRODUCTS.iter().enumerate() {
            assert!(PRODUCTS[..position].iter().all(|other| other.name != product.name));
            assert!(product.memory_mib > 0 && product.device_id > 0, "{}", product.name);
            assert_eq!(product.nvlink.0 == 0, product.nvlink_mbps == 0, "{}", product.name);
        }
    }
}
