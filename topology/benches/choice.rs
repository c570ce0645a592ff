//! What a choice costs: building a table, reading it, and the searches that go round it.
//! `cargo bench -p gantry-topology`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark")]

use divan::{Bencher, black_box};
use gantry_topology::machine::NvLinkPorts;
use gantry_topology::{
    Gpu, GpuSet, Machine, MachineParts, Nic, NvLinkBundle, PathClass, PathMatrix, Purpose, Table,
};

fn main() {
    divan::main();
}

/// Machines of 8 and 16 GPUs by what joins them.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A cube mesh of direct NVLinks (8 GPUs), and two such side by side (16).
    Mesh,
    /// NVSwitches, one NIC for each GPU.
    Switch,
    /// PCIe alone, two sockets.
    Pcie,
}

const KINDS: [Kind; 3] = [Kind::Mesh, Kind::Switch, Kind::Pcie];

/// The cube mesh of 8 V100s: links of each pair.
const CUBE_MESH: [(u8, u8, u8); 16] = [
    (0, 1, 1),
    (0, 2, 1),
    (0, 3, 2),
    (0, 4, 2),
    (1, 2, 2),
    (1, 3, 1),
    (1, 5, 2),
    (2, 3, 2),
    (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1),
    (4, 6, 1),
    (4, 7, 2),
    (5, 6, 2),
    (5, 7, 1),
    (6, 7, 2),
];

fn machine(kind: Kind, gpus: usize) -> Machine {
    let nics = if matches!(kind, Kind::Switch) { gpus } else { 0 };
    let near = |row: usize, column: usize| {
        let (a, b) = (row % gpus, column % gpus);
        match (a / 2 == b / 2, a * 2 / gpus == b * 2 / gpus) {
            (true, _) => PathClass::Pix,
            (_, true) => PathClass::Node,
            _ => PathClass::Sys,
        }
    };
    let mut parts = MachineParts {
        gpus: (0..u8::try_from(gpus).unwrap()).map(|index| Gpu { index, ..Gpu::default() }).collect(),
        nics: (0..nics).map(|nic| Nic { name: format!("mlx5_{nic}"), ..Nic::default() }).collect(),
        paths: PathMatrix::from_fn(gpus + nics, near),
        ..MachineParts::default()
    };
    match kind {
        Kind::Mesh => {
            for board in 0..u8::try_from(gpus / 8).unwrap() {
                parts.nvlinks.extend(
                    CUBE_MESH
                        .map(|(a, b, links)| NvLinkBundle { gpus: [a + 8 * board, b + 8 * board], links }),
                );
            }
        }
        Kind::Switch => {
            for gpu in &mut parts.gpus {
                gpu.nvlink =
                    Some(NvLinkPorts { version: Some(4), switch_links: 18, ..NvLinkPorts::default() });
            }
        }
        Kind::Pcie => {}
    }
    Machine::new(parts).unwrap()
}

/// A ring of GPUs, every one joined to four: all cuts and cycles of a dense mesh that was never built.
fn dense_mesh(gpus: u8) -> Machine {
    let mut parts = machine(Kind::Pcie, usize::from(gpus)).into_parts();
    for a in 0..gpus {
        for step in [1, 2] {
            let b = (a + step) % gpus;
            parts.nvlinks.push(NvLinkBundle { gpus: [a, b], links: 2 });
        }
    }
    Machine::new(parts).unwrap()
}

/// From 0 to 2 links between any two GPUs, by no pattern: every set has cycles that must be searched for.
fn uneven_mesh(gpus: u8) -> Machine {
    let mut parts = machine(Kind::Pcie, usize::from(gpus)).into_parts();
    let mut state = 3u32;
    for a in 0..gpus {
        for b in 0..a {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let links = [0, 1, 1, 1, 2][(state >> 16) as usize % 5];
            if links > 0 {
                parts.nvlinks.push(NvLinkBundle { gpus: [b, a], links });
            }
        }
    }
    Machine::new(parts).unwrap()
}

/// Different sets of free GPUs, so that no branch is learnt by heart.
fn states(gpus: usize) -> Vec<(GpuSet, usize)> {
    let mut state = 12345u32;
    (0..1024)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let free = GpuSet::from_bits(state >> 8) & GpuSet::first(gpus);
            (free, 1 + (state >> 28) as usize % free.len().max(1))
        })
        .collect()
}

#[divan::bench(args = [8, 16])]
fn lookup(bencher: Bencher<'_, '_>, gpus: usize) {
    let table = Table::build(&machine(Kind::Switch, gpus));
    let states = states(gpus);
    let mut next = states.iter().cycle();
    bencher.bench_local(|| {
        let (free, size) = *next.next().unwrap();
        black_box(table.best_set(black_box(free), black_box(size), Purpose::Local))
    });
}

#[divan::bench(args = [8, 16])]
fn lookup_with_its_worth(bencher: Bencher<'_, '_>, gpus: usize) {
    let table = Table::build(&machine(Kind::Switch, gpus));
    let states = states(gpus);
    let mut next = states.iter().cycle();
    bencher.bench_local(|| {
        let (free, size) = *next.next().unwrap();
        black_box(table.best(black_box(free), black_box(size), Purpose::Local))
    });
}

/// Three of sixteen: the size that takes the peer longest.
#[divan::bench(args = [8, 16])]
fn lookup_3(bencher: Bencher<'_, '_>, gpus: usize) {
    let table = Table::build(&machine(Kind::Mesh, gpus));
    bencher.bench_local(|| black_box(table.best(black_box(table.all()), 3, Purpose::Local)));
}

#[divan::bench(args = [8, 16])]
fn must_include_one_of_half(bencher: Bencher<'_, '_>, gpus: usize) {
    let table = Table::build(&machine(Kind::Switch, gpus));
    let must = GpuSet::single(gpus / 2);
    bencher
        .bench_local(|| black_box(table.best_with(table.all(), black_box(must), gpus / 2, Purpose::Local)));
}

#[divan::bench(args = KINDS)]
fn build_8(bencher: Bencher<'_, '_>, kind: Kind) {
    let machine = machine(kind, 8);
    bencher.bench_local(|| Table::build(black_box(&machine)));
}

#[divan::bench(args = KINDS, sample_count = 10)]
fn build_16(bencher: Bencher<'_, '_>, kind: Kind) {
    let machine = machine(kind, 16);
    bencher.bench_local(|| Table::build(black_box(&machine)));
}

#[divan::bench(sample_count = 5)]
fn build_16_dense_mesh(bencher: Bencher<'_, '_>) {
    let machine = dense_mesh(16);
    bencher.bench_local(|| Table::build(black_box(&machine)));
}

#[divan::bench(sample_count = 5)]
fn build_16_uneven_mesh(bencher: Bencher<'_, '_>) {
    let machine = uneven_mesh(16);
    bencher.bench_local(|| Table::build(black_box(&machine)));
}

#[divan::bench(args = KINDS, sample_count = 10)]
fn search_32(bencher: Bencher<'_, '_>, kind: Kind) {
    let table = Table::build(&machine(kind, 32));
    bencher.bench_local(|| black_box(table.best(table.all(), 6, Purpose::Local)));
}

#[divan::bench(sample_count = 5)]
fn search_32_dense_mesh(bencher: Bencher<'_, '_>) {
    let table = Table::build(&dense_mesh(32));
    bencher.bench_local(|| black_box(table.best(table.all(), 12, Purpose::Local)));
}
