//! Compute instances: how the compute slices of one GPU instance may be shared out. The rule is the same on every product.

/// Slice counts a compute instance may have in a GPU instance of `gpu_slices`: those of the grid (1, 2, 3, 4, 7) up to its own.
/// An instance of 3 has 1, 2, 3; one of 4 has 1, 2, 4; one of 7 has 1, 2, 3, 4, 7.
pub fn legal_compute(gpu_slices: u8) -> impl Iterator<Item = u8> {
    [1, 2, 3, 4, 7]
        .into_iter()
        .filter(move |slices| *slices <= gpu_slices && !(gpu_slices == 4 && *slices == 3))
}

/// Compute slices that a compute instance of `slices` may start at within a GPU instance of `gpu_slices`, as
/// `nvidia-smi mig -lcipp` prints them: every `slices`-th, three taking the room of four.
pub fn compute_starts(gpu_slices: u8, slices: u8) -> Vec<u8> {
    let step = if slices == 3 { 4 } else { slices.max(1) };
    (0..gpu_slices)
        .step_by(usize::from(step))
        .filter(|start| start + slices <= gpu_slices)
        .collect()
}

/// Compute slices of a MIG device called `device` in a GPU instance of profile `instance` with `gpu_slices`: all of them where
/// it is called like its instance, fewer for `1c.3g.20gb`. `None` for any other name.
pub fn compute_slices_of(device: &str, instance: &str, gpu_slices: u8) -> Option<u8> {
    if device == instance {
        return Some(gpu_slices);
    }
    let (slices, rest) = device.split_once("c.")?;
    let slices = slices.parse().ok()?;
    let known = legal_compute(gpu_slices).any(|legal| legal == slices && slices < gpu_slices);
    (rest == instance && known).then_some(slices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_instances_lie_where_nvidia_smi_says() {
        assert_eq!(compute_starts(7, 1), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(compute_starts(7, 2), [0, 2, 4]);
        assert_eq!(compute_starts(7, 3), [0, 4]);
        assert_eq!(compute_starts(7, 4), [0]);
        assert_eq!(compute_starts(3, 2), [0]);
        assert_eq!(compute_starts(4, 2), [0, 2]);
        assert_eq!(legal_compute(4).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(legal_compute(3).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn the_name_of_a_device_says_how_much_of_its_instance_it_has() {
        assert_eq!(compute_slices_of("3g.20gb", "3g.20gb", 3), Some(3));
        assert_eq!(compute_slices_of("1c.3g.20gb", "3g.20gb", 3), Some(1));
        for wrong in [
            "3c.3g.20gb",
            "4c.3g.20gb",
            "1c.2g.10gb",
            "2g.10gb",
            "xc.3g.20gb",
            "",
        ] {
            assert_eq!(compute_slices_of(wrong, "3g.20gb", 3), None, "{wrong}");
        }
    }
}
