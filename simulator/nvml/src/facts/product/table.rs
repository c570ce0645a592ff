//! The GPU products there are. Data only.

use nvml_wrapper_sys::bindings as sys;

use super::Product;

const TESLA: u32 = sys::nvmlBrandType_enum_NVML_BRAND_TESLA;
const NVIDIA: u32 = sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA;
const GEFORCE: u32 = sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE;
const RTX: u32 = sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX;

/// A data centre board without displays, MIG or C2C; the entries below change what differs.
const BASE: Product = Product {
    name: "",
    architecture: sys::NVML_DEVICE_ARCH_AMPERE,
    compute_capability: (8, 0),
    brand: NVIDIA,
    memory_mib: 0,
    bar1_mib: 65_536,
    device_id: 0,
    pcie: (4, 16),
    nvlink: (0, 0),
    nvlink_mbps: 0,
    power_watts: 300,
    cores: (108, 6912),
    clocks: (1410, 1593),
    memory_bus: 5120,
    ecc: true,
    mig: false,
    display: false,
    c2c: false,
};

const V100: Product = Product {
    architecture: sys::NVML_DEVICE_ARCH_VOLTA,
    compute_capability: (7, 0),
    brand: TESLA,
    bar1_mib: 32_768,
    pcie: (3, 16),
    nvlink: (2, 6),
    nvlink_mbps: 25_781,
    cores: (80, 5120),
    clocks: (1530, 877),
    memory_bus: 4096,
    ..BASE
};

const A100: Product =
    Product { bar1_mib: 131_072, nvlink: (3, 12), nvlink_mbps: 25_000, power_watts: 400, mig: true, ..BASE };

const H100: Product = Product {
    architecture: sys::NVML_DEVICE_ARCH_HOPPER,
    compute_capability: (9, 0),
    bar1_mib: 131_072,
    pcie: (5, 16),
    nvlink: (4, 18),
    nvlink_mbps: 26_562,
    power_watts: 700,
    cores: (132, 16_896),
    clocks: (1980, 2619),
    mig: true,
    ..BASE
};

const GA102: Product = Product {
    compute_capability: (8, 6),
    nvlink: (3, 4),
    nvlink_mbps: 14_062,
    cores: (84, 10_752),
    clocks: (1740, 7251),
    memory_bus: 384,
    ..BASE
};

const ADA: Product = Product { architecture: sys::NVML_DEVICE_ARCH_ADA, compute_capability: (8, 9), ..BASE };

/// The products known, the more special name first where one contains the other.
pub const PRODUCTS: &[Product] = &[
    Product {
        name: "Tesla P100-SXM2-16GB",
        architecture: sys::NVML_DEVICE_ARCH_PASCAL,
        compute_capability: (6, 0),
        memory_mib: 16_384,
        device_id: 0x15f9,
        nvlink: (1, 4),
        nvlink_mbps: 19_200,
        cores: (56, 3584),
        clocks: (1480, 715),
        ..V100
    },
    Product { name: "Tesla V100-SXM2-16GB", memory_mib: 16_384, device_id: 0x1db1, ..V100 },
    Product { name: "Tesla V100-SXM2-32GB", memory_mib: 32_768, device_id: 0x1db5, ..V100 },
    Product {
        name: "Tesla V100-SXM3-32GB",
        memory_mib: 32_768,
        device_id: 0x1db8,
        power_watts: 350,
        clocks: (1597, 958),
        ..V100
    },
    Product {
        name: "Tesla V100-PCIE-16GB",
        memory_mib: 16_384,
        device_id: 0x1db4,
        nvlink: (0, 0),
        nvlink_mbps: 0,
        power_watts: 250,
        ..V100
    },
    Product {
        name: "Tesla T4",
        architecture: sys::NVML_DEVICE_ARCH_TURING,
        compute_capability: (7, 5),
        brand: TESLA,
        memory_mib: 15_360,
        bar1_mib: 256,
        device_id: 0x1eb8,
        pcie: (3, 16),
        power_watts: 70,
        cores: (40, 2560),
        clocks: (1590, 5001),
        memory_bus: 256,
        ..BASE
    },
    Product {
        name: "NVIDIA A100-SXM4-40GB",
        memory_mib: 40_960,
        device_id: 0x20b0,
        clocks: (1410, 1215),
        ..A100
    },
    Product { name: "NVIDIA A100-SXM4-80GB", memory_mib: 81_920, device_id: 0x20b2, ..A100 },
    Product { name: "NVIDIA A800-SXM4-80GB", memory_mib: 81_920, device_id: 0x20f3, nvlink: (3, 8), ..A100 },
    Product {
        name: "NVIDIA A100-PCIE-40GB",
        memory_mib: 40_960,
        device_id: 0x20f1,
        power_watts: 250,
        ..A100
    },
    Product {
        name: "NVIDIA A100 80GB PCIe",
        memory_mib: 81_920,
        device_id: 0x20b5,
        power_watts: 300,
        ..A100
    },
    Product {
        name: "NVIDIA A30",
        memory_mib: 24_576,
        device_id: 0x20b7,
        nvlink: (3, 4),
        power_watts: 165,
        cores: (56, 3584),
        clocks: (1440, 1215),
        memory_bus: 3072,
        ..A100
    },
    Product { name: "NVIDIA A40", memory_mib: 46_068, device_id: 0x2235, ..GA102 },
    Product {
        name: "NVIDIA A10",
        memory_mib: 23_028,
        bar1_mib: 32_768,
        device_id: 0x2236,
        nvlink: (0, 0),
        nvlink_mbps: 0,
        power_watts: 150,
        cores: (72, 9216),
        clocks: (1695, 6251),
        ..GA102
    },
    Product {
        name: "NVIDIA RTX A6000",
        brand: RTX,
        memory_mib: 49_140,
        bar1_mib: 65_536,
        device_id: 0x2230,
        clocks: (2100, 8001),
        display: true,
        ..GA102
    },
    Product {
        name: "NVIDIA GeForce RTX 3090",
        brand: GEFORCE,
        memory_mib: 24_576,
        bar1_mib: 256,
        device_id: 0x2204,
        power_watts: 350,
        cores: (82, 10_496),
        clocks: (2100, 9751),
        ecc: false,
        display: true,
        ..GA102
    },
    Product {
        name: "NVIDIA GeForce RTX 4090",
        brand: GEFORCE,
        memory_mib: 24_564,
        bar1_mib: 256,
        device_id: 0x2684,
        power_watts: 450,
        cores: (128, 16_384),
        clocks: (3105, 10_501),
        memory_bus: 384,
        ecc: false,
        display: true,
        ..ADA
    },
    Product {
        name: "NVIDIA L4",
        memory_mib: 23_034,
        bar1_mib: 32_768,
        device_id: 0x27b8,
        power_watts: 72,
        cores: (58, 7424),
        clocks: (2040, 6251),
        memory_bus: 192,
        ..ADA
    },
    Product {
        name: "NVIDIA L40S",
        memory_mib: 46_068,
        device_id: 0x26b9,
        power_watts: 350,
        cores: (142, 18_176),
        clocks: (2520, 9001),
        memory_bus: 384,
        ..ADA
    },
    Product { name: "NVIDIA H100 80GB HBM3", memory_mib: 81_559, device_id: 0x2330, ..H100 },
    Product {
        name: "NVIDIA H100 PCIe",
        memory_mib: 81_559,
        device_id: 0x2331,
        nvlink: (4, 12),
        power_watts: 350,
        cores: (114, 14_592),
        clocks: (1755, 1593),
        ..H100
    },
    Product { name: "NVIDIA H800", memory_mib: 81_559, device_id: 0x2324, nvlink: (4, 8), ..H100 },
    Product {
        name: "NVIDIA H200",
        memory_mib: 143_771,
        bar1_mib: 262_144,
        device_id: 0x2335,
        memory_bus: 6144,
        ..H100
    },
    Product {
        name: "NVIDIA H20",
        memory_mib: 97_871,
        device_id: 0x2329,
        power_watts: 500,
        cores: (78, 9984),
        ..H100
    },
    Product {
        name: "NVIDIA GH200 144G HBM3e",
        memory_mib: 146_831,
        device_id: 0x2348,
        power_watts: 900,
        memory_bus: 6144,
        c2c: true,
        ..H100
    },
    Product {
        name: "NVIDIA GH200 480GB",
        memory_mib: 97_871,
        device_id: 0x2342,
        power_watts: 900,
        c2c: true,
        ..H100
    },
    Product {
        name: "NVIDIA B200",
        architecture: sys::NVML_DEVICE_ARCH_BLACKWELL,
        compute_capability: (10, 0),
        memory_mib: 183_359,
        bar1_mib: 262_144,
        device_id: 0x2901,
        nvlink: (5, 18),
        nvlink_mbps: 53_125,
        power_watts: 1000,
        cores: (148, 18_944),
        clocks: (1965, 3996),
        memory_bus: 8192,
        ..H100
    },
    Product {
        name: "NVIDIA GB200",
        architecture: sys::NVML_DEVICE_ARCH_BLACKWELL,
        compute_capability: (10, 0),
        memory_mib: 189_471,
        bar1_mib: 262_144,
        device_id: 0x2941,
        nvlink: (5, 18),
        nvlink_mbps: 53_125,
        power_watts: 1200,
        cores: (152, 19_456),
        clocks: (2062, 3996),
        memory_bus: 8192,
        c2c: true,
        ..H100
    },
    Product {
        name: "NVIDIA B300 SXM6 AC",
        architecture: sys::NVML_DEVICE_ARCH_BLACKWELL,
        compute_capability: (10, 3),
        memory_mib: 275_040,
        bar1_mib: 524_288,
        device_id: 0x3182,
        pcie: (6, 16),
        nvlink: (5, 18),
        nvlink_mbps: 53_125,
        power_watts: 1100,
        cores: (148, 18_944),
        clocks: (2032, 3996),
        memory_bus: 8192,
        ..H100
    },
    Product {
        name: "NVIDIA GB300",
        architecture: sys::NVML_DEVICE_ARCH_BLACKWELL,
        compute_capability: (10, 3),
        memory_mib: 284_208,
        bar1_mib: 524_288,
        device_id: 0x31c2,
        pcie: (6, 16),
        nvlink: (5, 18),
        nvlink_mbps: 53_125,
        power_watts: 1400,
        cores: (152, 19_456),
        clocks: (2032, 3996),
        memory_bus: 8192,
        c2c: true,
        ..H100
    },
    Product {
        name: "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        architecture: sys::NVML_DEVICE_ARCH_BLACKWELL,
        compute_capability: (12, 0),
        memory_mib: 97_887,
        bar1_mib: 131_072,
        device_id: 0x2bb5,
        nvlink: (0, 0),
        nvlink_mbps: 0,
        power_watts: 600,
        cores: (188, 24_064),
        clocks: (2430, 12_481),
        memory_bus: 512,
        ..H100
    },
];

/// The board a machine file that names no model is taken to have.
pub(super) const UNNAMED: Product =
    Product { name: "NVIDIA Simulated GPU", memory_mib: 40_960, device_id: 0x20b0, ..A100 };
