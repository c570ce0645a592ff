//! The PCI tree behind a machine's path classes: a hierarchy of bridges from which a reader of sysfs finds the same class for
//! each pair of devices as the machine file gives. Values only; [`super::sysfs`] writes them down.
//!
//! How a class is built, and how it is read back ([`class_between`]):
//!
//! | class | the two devices share |
//! |---|---|
//! | PIX | a PCIe switch: the last bridge they share is its upstream port, at most one downstream port below it leads to each |
//! | PXB | a root port, below which lies more than one switch |
//! | PHB | a host bridge (`pciDDDD:BB`), each behind a root port of its own |
//! | NODE | a NUMA node, each on a host bridge of its own |
//! | SYS | nothing |

use std::collections::BTreeSet;

use gantry_topology::PathClass;

use crate::facts::{Address, Facts};

/// One GPU, NIC or NVSwitch in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub address: Address,
    /// NUMA node of its host bridge; `None` if unknown.
    pub numa: Option<u32>,
    /// The folders above it in `/sys/devices`, the host bridge's first, and its own last.
    pub path: Vec<String>,
}

/// The tree, by its leaves: the machine's GPUs, then its NICs, then the NVSwitches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    /// The leaves.
    pub endpoints: Vec<Endpoint>,
    /// Pairs for which no tree can show the class that the machine file gives.
    pub misfits: Vec<Misfit>,
}

/// A pair of devices with a class in the machine file that contradicts other pairs or the NUMA nodes. NVML reports the
/// class of the file; the tree shows the nearest possible one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "devices {first} and {second}: the file says {given}, but no PCI tree with its other paths shows more than {shown}"
)]
pub struct Misfit {
    pub first: usize,
    pub second: usize,
    pub given: PathClass,
    pub shown: PathClass,
}

impl Tree {
    /// The tree of a machine.
    pub fn of(facts: &Facts) -> Self {
        let mut builder = Builder::new(facts);
        builder.place_devices();
        builder.place_switches();
        let endpoints = builder.endpoints;
        let misfits = misfits(facts, &endpoints);
        Self { endpoints, misfits }
    }
}

/// The class of a pair, read as a client of sysfs reads it: from the folders above each device and their NUMA nodes.
pub fn class_between(first: &Endpoint, second: &Endpoint) -> PathClass {
    let pairs = first.path.iter().zip(&second.path);
    let shared = pairs.take_while(|(a, b)| a == b).count();
    let below = first.path.len().max(second.path.len()) - shared;
    match shared {
        0 if first.numa == second.numa => PathClass::Node,
        0 => PathClass::Sys,
        1 => PathClass::Phb,
        _ if below <= 2 => PathClass::Pix,
        _ => PathClass::Pxb,
    }
}

fn misfits(facts: &Facts, endpoints: &[Endpoint]) -> Vec<Misfit> {
    let devices = facts.gpus.len() + facts.nics.len();
    let mut misfits = Vec::new();
    for second in 0..devices {
        for first in 0..second {
            let given = modern(facts.machine().paths().get(first, second));
            let shown = match (endpoints.get(first), endpoints.get(second)) {
                (Some(a), Some(b)) => class_between(a, b),
                _ => continue,
            };
            if given != shown {
                misfits.push(Misfit { first, second, given, shown });
            }
        }
    }
    misfits
}

/// A class under its present name.
fn modern(class: PathClass) -> PathClass {
    if class.crosses_sockets() { PathClass::Sys } else { class }
}

struct Builder<'a> {
    facts: &'a Facts,
    endpoints: Vec<Endpoint>,
    taken: BTreeSet<(u32, u8)>,
}

impl<'a> Builder<'a> {
    fn new(facts: &'a Facts) -> Self {
        let gpus = facts.gpus.iter().map(|gpu| (gpu.address, gpu.numa));
        let nics = facts.nics.iter().map(|nic| (nic.address, nic.numa));
        let endpoints: Vec<Endpoint> =
            gpus.chain(nics).map(|(address, numa)| Endpoint { address, numa, path: Vec::new() }).collect();
        let buses = endpoints.iter().map(|endpoint| endpoint.address);
        let taken = buses
            .chain(facts.switches.iter().copied())
            .map(|address| (address.domain, address.bus))
            .collect();
        Self { facts, endpoints, taken }
    }

    /// The members of each group of `members` that are joined by pairs no further apart than `class`.
    fn split(&self, members: &[usize], class: PathClass) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for &member in members {
            let near = |group: &Vec<usize>| {
                group.iter().any(|other| modern(self.facts.machine().paths().get(member, *other)) <= class)
            };
            let (joined, mut apart): (Vec<_>, Vec<_>) = groups.into_iter().partition(near);
            let mut group: Vec<usize> = joined.into_iter().flatten().chain([member]).collect();
            group.sort_unstable();
            apart.push(group);
            groups = apart;
        }
        groups.sort_unstable();
        groups
    }

    fn place_devices(&mut self) {
        let all: Vec<usize> = (0..self.endpoints.len()).collect();
        let nodes = self.split(&all, PathClass::Node);
        self.settle_numa(&nodes);
        for node in nodes {
            for complex in self.split(&node, PathClass::Phb) {
                self.place_complex(&complex);
            }
        }
    }

    /// Gives each NUMA group a node number where no device of it has one: unused ones, so that groups differ.
    fn settle_numa(&mut self, groups: &[Vec<usize>]) {
        let mut known: BTreeSet<u32> = self.endpoints.iter().filter_map(|endpoint| endpoint.numa).collect();
        for group in groups {
            let of_group = group
                .iter()
                .find_map(|member| self.endpoints.get(*member).and_then(|endpoint| endpoint.numa));
            let number = match of_group {
                Some(number) => Some(number),
                // A machine of one group needs no numbers, and a real one without NUMA gives none.
                None if groups.len() == 1 => None,
                None => (0..).find(|number| !known.contains(number)),
            };
            known.extend(number);
            for member in group {
                if let Some(endpoint) = self.endpoints.get_mut(*member) {
                    endpoint.numa = endpoint.numa.or(number);
                }
            }
        }
    }

    /// Puts the devices of one host bridge into place.
    fn place_complex(&mut self, members: &[usize]) {
        let domain = self.domain_of(members);
        let root_bus = self.bus(domain);
        let host = format!("pci{:04x}:{:02x}", root_bus.0, root_bus.1);
        for (port, behind_port) in self.split(members, PathClass::Pxb).into_iter().enumerate() {
            let above = vec![host.clone(), bridge(root_bus, port + 1)];
            self.place_behind_port(above, domain, &behind_port);
        }
    }

    /// Puts the devices behind one root port into place: directly, below one switch, or below a switch of switches.
    fn place_behind_port(&mut self, above: Vec<String>, domain: u32, members: &[usize]) {
        let leaves = self.split(members, PathClass::Pix);
        if let [leaf] = leaves.as_slice() {
            if self.one_slot(leaf) {
                self.place(leaf, &above);
            } else {
                self.place_below_switch(above, domain, leaf);
            }
            return;
        }
        let (above, downstream) = self.switch(above, domain);
        for (port, leaf) in leaves.into_iter().enumerate() {
            let above = [above.as_slice(), &[bridge(downstream, port)]].concat();
            self.place_below_switch(above, domain, &leaf);
        }
    }

    fn place_below_switch(&mut self, above: Vec<String>, domain: u32, members: &[usize]) {
        let (above, downstream) = self.switch(above, domain);
        for (port, slot) in self.slots(members).into_iter().enumerate() {
            let above = [above.as_slice(), &[bridge(downstream, port)]].concat();
            self.place(&slot, &above);
        }
    }

    /// A switch below `above`: the path down to its upstream port, and the bus of its downstream ports.
    fn switch(&mut self, mut above: Vec<String>, domain: u32) -> (Vec<String>, (u32, u8)) {
        let upstream = self.bus(domain);
        above.push(bridge(upstream, 0));
        (above, self.bus(domain))
    }

    fn place(&mut self, members: &[usize], above: &[String]) {
        for member in members {
            if let Some(endpoint) = self.endpoints.get_mut(*member) {
                endpoint.path = above.to_vec();
                endpoint.path.push(endpoint.address.to_string());
            }
        }
    }

    /// NVSwitches hang on a host bridge of their own: the machine file states nothing of their paths.
    fn place_switches(&mut self) {
        let Some(first) = self.facts.switches.first() else {
            return;
        };
        let root_bus = self.bus(first.domain);
        let numa = self.endpoints.iter().filter_map(|endpoint| endpoint.numa).min();
        for (port, address) in self.facts.switches.iter().enumerate() {
            let host = format!("pci{:04x}:{:02x}", root_bus.0, root_bus.1);
            self.endpoints.push(Endpoint {
                address: *address,
                numa,
                path: vec![host, bridge(root_bus, port + 1), address.to_string()],
            });
        }
    }

    /// The members by the slot they sit in: functions of one device share it.
    fn slots(&self, members: &[usize]) -> Vec<Vec<usize>> {
        let mut slots: Vec<Vec<usize>> = Vec::new();
        for &member in members {
            let shares = |slot: &&mut Vec<usize>| slot.iter().any(|other| self.share_slot(member, *other));
            match slots.iter_mut().find(shares) {
                Some(slot) => slot.push(member),
                None => slots.push(vec![member]),
            }
        }
        slots
    }

    fn one_slot(&self, members: &[usize]) -> bool {
        self.slots(members).len() == 1
    }

    fn share_slot(&self, first: usize, second: usize) -> bool {
        match (self.endpoints.get(first), self.endpoints.get(second)) {
            (Some(a), Some(b)) => a.address.same_slot(b.address),
            _ => false,
        }
    }

    fn domain_of(&self, members: &[usize]) -> u32 {
        members
            .first()
            .and_then(|member| self.endpoints.get(*member))
            .map_or(0, |endpoint| endpoint.address.domain)
    }

    /// A bus number that nothing else has, in this domain or the next that has one.
    fn bus(&mut self, mut domain: u32) -> (u32, u8) {
        loop {
            let free = (0..=u8::MAX).find(|bus| !self.taken.contains(&(domain, *bus)));
            match free {
                Some(bus) => {
                    self.taken.insert((domain, bus));
                    return (domain, bus);
                }
                None => domain += 1,
            }
        }
    }
}

/// The `port`-th bridge on a bus: 32 devices, then their further functions.
fn bridge((domain, bus): (u32, u8), port: usize) -> String {
    format!("{domain:04x}:{bus:02x}:{:02x}.{:x}", port % 32, port / 32)
}
