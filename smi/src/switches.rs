//! Distinguishes NVLinks through an NVSwitch from NVLinks that join GPUs directly, by the link counts of the `NV#`
//! cells alone.

/// The links of a GPU into NVSwitches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SwitchLinks {
    pub(crate) links: u8,
    /// The group of joined switches, counted from 0 by their lowest GPU.
    pub(crate) island: u8,
}

/// The links each GPU has into an NVSwitch, `None` where its links are direct or absent. `counts[a][b]` is the `#` of
/// `NV#`.
///
/// GPUs behind a switch all reach each other, each pair at the lesser of the two GPUs' counts, and a printed row shows
/// a GPU's links once per peer: more of them than the GPU can have. If `limit` (links one GPU can have) is enough for a
/// direct mesh, it is one: 4 to each of 3 peers on an A100, 6 to each of 3 on a GH200.
pub(crate) fn switch_links(counts: &[Vec<u8>], limit: u8) -> Vec<Option<SwitchLinks>> {
    let count = |a: usize, b: usize| counts.get(a).and_then(|row| row.get(b)).copied().unwrap_or(0);
    let mut switched = vec![None; counts.len()];
    let mut seen = vec![false; counts.len()];
    let mut islands = 0;
    for first in 0..counts.len() {
        if seen.get(first).copied().unwrap_or(true) {
            continue;
        }
        // Behind a switch every GPU reaches every other, so the peers of the first are the whole island.
        let island: Vec<usize> =
            (0..counts.len()).filter(|other| *other == first || count(first, *other) > 0).collect();
        let most = |a: usize| island.iter().map(|b| count(a, *b)).max().unwrap_or(0);
        let links: Vec<u8> = island.iter().map(|a| most(*a)).collect();
        let even = island.iter().zip(&links).all(|(a, links_a)| {
            let inside = island
                .iter()
                .zip(&links)
                .all(|(b, links_b)| a == b || count(*a, *b) == *links_a.min(links_b));
            let outside = (0..counts.len()).all(|b| island.contains(&b) || count(*a, b) == 0);
            inside && outside
        });
        let too_many_for_a_mesh = island.iter().any(|a| {
            let total: u32 = island.iter().map(|b| u32::from(count(*a, *b))).sum();
            total > u32::from(limit)
        });
        for (gpu, links) in island.iter().zip(&links) {
            if even && let Some(done) = seen.get_mut(*gpu) {
                *done = true;
            }
            if even
                && too_many_for_a_mesh
                && let Some(slot) = switched.get_mut(*gpu)
            {
                *slot = Some(SwitchLinks { links: *links, island: islands });
            }
        }
        islands += u8::from(even && too_many_for_a_mesh);
    }
    switched
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(gpus: usize, links: u8) -> Vec<Vec<u8>> {
        (0..gpus).map(|a| (0..gpus).map(|b| if a == b { 0 } else { links }).collect()).collect()
    }

    fn one(links: u8) -> Option<SwitchLinks> {
        Some(SwitchLinks { links, island: 0 })
    }

    #[test]
    fn unjoined_switches_are_separate_islands() {
        let mut counts = mesh(8, 18);
        for (a, b) in (0..4).flat_map(|a| (4..8).map(move |b| (a, b))) {
            counts[a][b] = 0;
            counts[b][a] = 0;
        }
        let island = |island| Some(SwitchLinks { links: 18, island });
        let expected: Vec<_> = [0, 0, 0, 0, 1, 1, 1, 1].map(island).into();
        assert_eq!(switch_links(&counts, 18), expected);
    }

    #[test]
    fn more_links_than_a_gpu_has_are_switched() {
        for (gpus, links) in [(8, 12), (8, 18), (16, 6), (8, 8), (4, 18)] {
            assert_eq!(switch_links(&mesh(gpus, links), 18), vec![one(links); gpus], "NV{links}");
        }
    }

    #[test]
    fn as_many_links_as_a_gpu_has_are_direct() {
        for (gpus, links) in [(4, 4), (4, 6), (2, 12), (2, 18), (2, 3)] {
            assert_eq!(switch_links(&mesh(gpus, links), 18), vec![None; gpus], "NV{links}");
        }
    }

    #[test]
    fn gpu_with_lost_links_keeps_remaining_count() {
        let mut counts = mesh(8, 18);
        for other in [0, 1, 3, 4, 5, 6, 7] {
            counts[2][other] = 17;
            counts[other][2] = 17;
        }
        let mut expected = vec![one(18); 8];
        expected[2] = one(17);
        assert_eq!(switch_links(&counts, 18), expected);
    }

    #[test]
    fn gpu_without_links_has_no_switch() {
        let mut counts = mesh(8, 18);
        counts[2].fill(0);
        for row in &mut counts {
            row[2] = 0;
        }
        let mut expected = vec![one(18); 8];
        expected[2] = None;
        assert_eq!(switch_links(&counts, 18), expected);
    }

    #[test]
    fn uneven_mesh_is_direct() {
        let mut counts = mesh(4, 12);
        counts[0][1] = 0;
        counts[1][0] = 0;
        assert_eq!(switch_links(&counts, 18), vec![None; 4]);
    }
}
