//! Groups NVLinks into bundles: from the far end of each active link to links between pairs of GPUs and links
//! to NVSwitches. Links that are down are left out.

use gantry_topology::machine::Fabric;
use gantry_topology::machine::MAX_LINKS_PER_GPU;
use gantry_topology::{Gpu, NvLinkBundle, NvLinkPorts, PcieAddress};

use super::Warnings;
use super::sysfs::Sysfs;
use crate::nvml::{Code, Device, NvmlError, Remote};

/// The active links of all GPUs.
#[derive(Debug, Default)]
pub(super) struct ActiveLinks {
    gpus: Vec<GpuLinks>,
}

/// The active links of one GPU.
#[derive(Debug, Clone, Default)]
struct GpuLinks {
    /// NVLink generation; `None` for a GPU without NVLink.
    version: Option<u8>,
    /// Whether the GPU has NVLinks at all, up or down.
    has_links: bool,
    /// Links to a switch.
    to_switch: u8,
    /// Index of the group of connected switches.
    island: u8,
    /// Peers at the far ends, once per link.
    to_gpus: Vec<usize>,
    /// Whether each link that the GPU has is up.
    states: Vec<bool>,
    /// Whether a call on a link failed, or a link ends at an unknown GPU: more links may be up than are
    /// counted.
    is_partial: bool,
}

impl ActiveLinks {
    /// The NVLink data of each GPU.
    pub(super) fn ports(&self) -> impl Iterator<Item = Option<NvLinkPorts>> + '_ {
        self.gpus.iter().map(|ends| {
            ends.has_links.then_some(NvLinkPorts {
                version: ends.version,
                switch_links: ends.to_switch,
                island: ends.island,
            })
        })
    }

    /// Links between pairs. A link works only if both ends report it, so the lower count is used.
    pub(super) fn bundles(&self) -> Vec<NvLinkBundle> {
        let mut bundles = Vec::new();
        for a in 0..self.gpus.len() {
            for b in a + 1..self.gpus.len() {
                let links = self.count(a, b).min(self.count(b, a));
                if links > 0 {
                    bundles.push(NvLinkBundle {
                        // Positions of GPUs, at most MAX_GPUS.
                        gpus: [a as u8, b as u8],
                        links,
                    });
                }
            }
        }
        bundles
    }

    /// Positions of GPUs with possibly uncounted active links. A link counts only if both ends report it.
    pub(super) fn unread(&self) -> impl Iterator<Item = u8> + '_ {
        let is_partial = |at: &usize| self.gpus.get(*at).is_some_and(|ends| ends.is_partial);
        let unread = move |ends: &GpuLinks| ends.is_partial || ends.to_gpus.iter().any(is_partial);
        let gpus = self.gpus.iter().enumerate();
        // Positions of GPUs, at most MAX_GPUS.
        gpus.filter(move |(_, ends)| unread(ends)).map(|(at, _)| at as u8)
    }

    /// Whether each link of each GPU is up. GPUs without links, or with one that could not be read, have none.
    pub(super) fn states(&self) -> impl Iterator<Item = &[bool]> {
        self.gpus.iter().map(|ends| if ends.is_partial { &[] } else { ends.states.as_slice() })
    }

    fn count(&self, from: usize, to: usize) -> u8 {
        let links = self.gpus[from].to_gpus.iter().filter(|peer| **peer == to);
        links.count().min(usize::from(MAX_LINKS_PER_GPU)) as u8
    }
}

/// Reads the links of every reachable GPU. `are_hidden`: some GPUs on the bus could not be read, and links to
/// them may be up.
pub(super) fn read(
    devices: &[Option<Device<'_>>],
    gpus: &[Gpu],
    are_hidden: bool,
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> ActiveLinks {
    let islands = islands(gpus);
    let gpus = devices
        .iter()
        .zip(islands)
        .map(|(device, island)| match device {
            Some(device) => GpuLinks { island, ..ends(*device, gpus, are_hidden, sysfs, warnings) },
            None => GpuLinks::default(),
        })
        .collect();
    ActiveLinks { gpus }
}

/// The group of connected switches of each GPU. GPUs of one fabric-manager clique reach each other; without
/// cliques all are in group 0. Switch addresses do not show this: the two boards of a DGX-2 share no switch,
/// but are connected.
fn islands(gpus: &[Gpu]) -> Vec<u8> {
    let mut cliques: Vec<&Fabric> = Vec::new();
    gpus.iter()
        .map(|gpu| {
            let Some(fabric) = &gpu.fabric else {
                return 0;
            };
            let known = cliques.iter().position(|clique| *clique == fabric);
            let position = known.unwrap_or_else(|| {
                cliques.push(fabric);
                cliques.len() - 1
            });
            // There are at most as many cliques as GPUs.
            position as u8
        })
        .collect()
}

fn ends(
    device: Device<'_>,
    gpus: &[Gpu],
    are_hidden: bool,
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) -> GpuLinks {
    let mut ends = GpuLinks::default();
    for link in 0..MAX_LINKS_PER_GPU {
        match device.nvlink_active(link) {
            Ok(active) => {
                ends.has_links = true;
                ends.states.push(active);
                if ends.version.is_none() {
                    ends.version = warnings.known(device.nvlink_version(link)).flatten();
                }
                if active {
                    add_link(&mut ends, device, link, (gpus, are_hidden), sysfs, warnings);
                }
            }
            // Past the last link of this GPU.
            Err(error) if error.code() == Some(Code::InvalidArgument) => break,
            // GPUs without NVLinks, or with unused ones, return "not supported" per link, which is no warning.
            Err(error) => {
                ends.known::<()>(Err(error), warnings);
            }
        }
    }
    ends
}

fn add_link(
    ends: &mut GpuLinks,
    device: Device<'_>,
    link: u8,
    (gpus, are_hidden): (&[Gpu], bool),
    sysfs: &Sysfs,
    warnings: &mut Warnings,
) {
    let kind = ends.known(device.nvlink_remote(link), warnings);
    let kind = kind.unwrap_or(Remote::Unknown);
    if kind == Remote::Switch {
        ends.to_switch += 1;
        return;
    }
    if kind == Remote::Processor {
        return;
    }
    let address = ends.known(device.nvlink_remote_bus_id(link), warnings).flatten();
    let peer = address.as_ref().and_then(|address| peer_at(gpus, address));
    match (peer, kind) {
        (Some(peer), _) => ends.to_gpus.push(peer),
        (None, Remote::Gpu) => {
            ends.is_partial |= are_hidden;
            warnings.add(format!(
                "NVLink {link} of GPU {} ends at a GPU that this node does not have ({}); the link is left out",
                device.index(),
                address.map_or_else(|| "unknown address".to_owned(), |address| address.to_string()),
            ));
        }
        // In a virtual machine the switches are invisible, and NVML returns no address.
        (None, _) => {
            if address.and_then(|address| sysfs.is_nvswitch(&address)).unwrap_or(true) {
                ends.to_switch += 1;
            }
        }
    }
}

impl GpuLinks {
    /// As [`Warnings::known`].
    fn known<T>(&mut self, answer: Result<T, NvmlError>, warnings: &mut Warnings) -> Option<T> {
        self.is_partial |= answer.as_ref().is_err_and(|error| !error.is_unsupported());
        warnings.known(answer)
    }
}

fn peer_at(gpus: &[Gpu], address: &PcieAddress) -> Option<usize> {
    gpus.iter().position(|gpu| gpu.bus_id.as_ref() == Some(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joints(peers: &[&[usize]]) -> ActiveLinks {
        let gpus = peers
            .iter()
            .map(|peers| GpuLinks {
                version: Some(2),
                has_links: true,
                to_switch: 0,
                island: 0,
                to_gpus: peers.to_vec(),
                states: Vec::new(),
                is_partial: false,
            })
            .collect();
        ActiveLinks { gpus }
    }

    fn bundles(peers: &[&[usize]]) -> Vec<([u8; 2], u8)> {
        let bundles = joints(peers).bundles();
        bundles.into_iter().map(|bundle| (bundle.gpus, bundle.links)).collect()
    }

    #[test]
    fn links_to_same_peer_form_one_bundle() {
        assert_eq!(bundles(&[&[1, 1, 2], &[0, 0], &[0]]), [([0, 1], 2), ([0, 2], 1)]);
    }

    #[test]
    fn cliques_give_separate_switch_groups() {
        let gpu = |clique: Option<u32>| Gpu {
            fabric: clique.map(|clique| Fabric { cluster_uuid: "domain".to_owned(), clique }),
            ..Gpu::default()
        };
        assert_eq!(islands(&[Some(7), Some(3), Some(7), Some(3)].map(gpu)), [0, 1, 0, 1]);
        assert_eq!(islands(&[Some(7), Some(7)].map(gpu)), [0, 0]);
        assert_eq!(islands(&[None, None].map(gpu)), [0, 0]);
    }

    #[test]
    fn link_reported_by_one_end_does_not_count() {
        assert_eq!(bundles(&[&[1, 1], &[0]]), [([0, 1], 1)]);
        assert_eq!(bundles(&[&[1, 1], &[]]), []);
    }

    #[test]
    fn unread_link_end_marks_peer_unread() {
        let mut joints = joints(&[&[1], &[0, 2], &[1], &[]]);
        joints.gpus[0].is_partial = true;
        assert_eq!(joints.unread().collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn absurd_link_counts_stay_readable() {
        assert_eq!(bundles(&[&[0, 0], &[]]), []);
        let many = vec![1; 200];
        let back = vec![0; 200];
        assert_eq!(bundles(&[&many, &back]), [([0, 1], MAX_LINKS_PER_GPU)]);
    }
}
