//! NVLink ports: which link of which GPU ends where. Direct bundles take the lowest link numbers, in the order of the peers;
//! links into NVSwitches follow, dealt out over the switches as evenly as on the real boards.

use gantry_topology::Machine;

/// The far end of one NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remote {
    /// Another GPU, and the number of this link there.
    Gpu {
        /// Index of the peer.
        index: usize,
        /// Link number at the peer.
        link: u8,
    },
    /// An NVSwitch.
    Switch {
        /// Which NVSwitch of the machine.
        index: usize,
    },
}

/// For each GPU its links, by link number; every one is active until the control file says otherwise.
pub(super) fn ports(machine: &Machine) -> Vec<Vec<Remote>> {
    let mut ports: Vec<Vec<Remote>> = vec![Vec::new(); machine.gpus().len()];
    for bundle in machine.nvlinks() {
        let [a, b] = bundle.gpus.map(usize::from);
        for _ in 0..bundle.links {
            let (at_a, at_b) = (next_link(&ports, a), next_link(&ports, b));
            push(&mut ports, a, Remote::Gpu { index: b, link: at_b });
            push(&mut ports, b, Remote::Gpu { index: a, link: at_a });
        }
    }
    let switches = switches(machine);
    for (gpu, links) in ports.iter_mut().enumerate() {
        let count = usize::from(machine.switch_links(gpu));
        links.extend((0..count).map(|link| Remote::Switch { index: link * switches / count }));
    }
    ports
}

/// How many NVSwitches the machine's GPUs are joined to: 6 on the V100 and A100 boards, 4 on Hopper's, 2 on Blackwell's.
pub(super) fn switches(machine: &Machine) -> usize {
    let widest = (0..machine.gpus().len()).map(|gpu| machine.switch_links(gpu)).max().unwrap_or(0);
    let version = machine.gpus().iter().filter_map(|gpu| gpu.nvlink.and_then(|ports| ports.version)).max();
    match (widest, version) {
        (0, _) => 0,
        (_, Some(5..)) => 2,
        (_, Some(4)) => 4,
        (13.., _) => 4,
        _ => 6,
    }
}

fn next_link(ports: &[Vec<Remote>], gpu: usize) -> u8 {
    // A machine allows far fewer links per GPU than a byte counts.
    ports.get(gpu).and_then(|links| u8::try_from(links.len()).ok()).unwrap_or(u8::MAX)
}

fn push(ports: &mut [Vec<Remote>], gpu: usize, remote: Remote) {
    if let Some(links) = ports.get_mut(gpu) {
        links.push(remote);
    }
}
