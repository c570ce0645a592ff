//! Given every set of free GPUs of every recorded machine, then no set of equal bandwidth has a better class, or more
//! NVLinks at an equal class, than the chosen one; and in no class better than that of the chosen set is there any set.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod support;

use gantry_topology::{Collective, GpuSet, Machine, PathClass, Purpose, Rates, Table};

fn pairs(set: GpuSet) -> impl Iterator<Item = (usize, usize)> {
    set.iter().flat_map(move |a| set.iter().filter(move |b| *b > a).map(move |b| (a, b)))
}

/// 3 where NVLinks carry the set, else by the farthest pair.
fn class(machine: &Machine, rates: &Rates, ring: u32, set: GpuSet) -> u8 {
    let paths = machine.paths();
    let slot = set.iter().map(|gpu| rates.pcie_of(gpu).effective).min().unwrap();
    let crosses = pairs(set).any(|(a, b)| paths.get(a, b).crosses_sockets());
    if ring > if crosses { slot.min(rates.socket.effective) } else { slot } {
        return 3;
    }
    let farthest = pairs(set).map(|(a, b)| paths.get(a, b)).max().unwrap();
    match farthest {
        PathClass::Pix | PathClass::Pxb => 2,
        PathClass::Phb | PathClass::Node => 1,
        PathClass::Sys | PathClass::Soc => 0,
    }
}

#[test]
fn no_recorded_machine_gets_a_worse_class_or_fewer_links() {
    let mut states = 0;
    for name in support::names() {
        let machine = support::machine(&name);
        let rates = Rates::of(&machine);
        let table = Table::build(&machine);
        let links = Collective::new(&machine, &rates);
        let all = GpuSet::all(&machine);
        let rated: Vec<(u32, u8, u32)> = (0..=all.bits())
            .map(GpuSet::from_bits)
            .map(|set| {
                if set.len() < 2 {
                    return (0, 0, 0);
                }
                let ring = links.ring(set);
                let nvlinks = pairs(set).map(|(a, b)| u32::from(machine.nvlinks_between(a, b))).sum();
                (ring, class(&machine, &rates, ring, set), nvlinks)
            })
            .collect();
        for free in (0..=all.bits()).map(GpuSet::from_bits) {
            for (size, purpose) in
                (2..=free.len()).flat_map(|size| [(size, Purpose::Local), (size, Purpose::GangMember)])
            {
                let chosen = table.best_set(free, size, purpose).unwrap();
                let (ring, of_chosen, nvlinks) = rated[chosen.bits() as usize];
                for other in free.subsets(size) {
                    let (ring_of_other, of_other, nvlinks_of_other) = rated[other.bits() as usize];
                    assert!(of_other <= of_chosen, "{name}: {chosen} of {free}, but {other}");
                    let is_equal = (ring_of_other, of_other) == (ring, of_chosen);
                    assert!(
                        !is_equal || nvlinks_of_other <= nvlinks,
                        "{name}: {chosen} of {free}, but {other}"
                    );
                }
                states += 1;
            }
        }
    }
    assert!(states > 10_000, "{states}");
}
