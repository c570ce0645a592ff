//! Machines for programs that plan and decide. They may not do so themselves.

use gantry_topology::{Gpu, Machine, MachineParts, NvLinkPorts, PathClass, PathMatrix};

/// Eight GPUs on two sockets, and what `shape` makes of them.
pub(crate) fn machine(shape: impl FnOnce(&mut MachineParts)) -> Machine {
    let mut parts = MachineParts {
        gpus: (0..8)
            .map(|index| Gpu {
                index,
                ..Gpu::default()
            })
            .collect(),
        paths: PathMatrix::from_fn(8, |a, b| {
            if a / 4 == b / 4 {
                PathClass::Node
            } else {
                PathClass::Sys
            }
        }),
        ..MachineParts::default()
    };
    shape(&mut parts);
    match Machine::new(parts) {
        Ok(machine) => machine,
        Err(error) => unreachable!("{error}"),
    }
}

/// Eight GPUs behind NVSwitches.
pub(crate) fn switched() -> Machine {
    machine(|parts| {
        for gpu in &mut parts.gpus {
            gpu.nvlink = Some(NvLinkPorts {
                version: Some(4),
                switch_links: 18,
                ..NvLinkPorts::default()
            });
        }
    })
}
