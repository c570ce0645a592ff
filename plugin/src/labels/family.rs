//! The architecture of a compute capability, as NVIDIA's gpu-feature-discovery names it.

/// The family of GPUs of compute capability `major.minor`; `undefined` for one not in the table.
///
/// Source: "CUDA GPU Compute Capability" on developer.nvidia.com and the appendix on compute capabilities of the CUDA programming
/// guide; 13, of which no board is out, as other discovery programs have it.
pub(super) const fn family(major: u32, minor: u32) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, 0..5) => "volta",
        (7, _) => "turing",
        (8, 0..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10..=12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}

/// Major and minor number of a compute capability as a machine file writes it.
pub(super) fn parts(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boards_have_their_architecture() {
        for (board, capability, name) in [
            ("Tesla K80", "3.7", "kepler"),
            ("Tesla M40", "5.2", "maxwell"),
            ("Tesla P100", "6.0", "pascal"),
            ("Tesla V100", "7.0", "volta"),
            ("Jetson AGX Xavier", "7.2", "volta"),
            ("Tesla T4", "7.5", "turing"),
            ("A100", "8.0", "ampere"),
            ("A40", "8.6", "ampere"),
            ("Jetson AGX Orin", "8.7", "ampere"),
            ("L4", "8.9", "ada-lovelace"),
            ("H100", "9.0", "hopper"),
            ("B200", "10.0", "blackwell"),
            ("B300", "10.3", "blackwell"),
            ("Jetson T5000", "11.0", "blackwell"),
            ("RTX PRO 6000", "12.0", "blackwell"),
            ("GB10", "12.1", "blackwell"),
            ("none", "4.0", "undefined"),
        ] {
            let (major, minor) = parts(capability).unwrap();
            assert_eq!(family(major, minor), name, "{board}");
        }
        assert_eq!(parts("9"), None);
    }
}
