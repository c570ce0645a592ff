//! Outputs that are given in the place of `nvidia-smi topo -m`: matrices of other vendors' tools, and what else NVIDIA's print. Knows
//! them by a few words each, so that a refusal can say what was given; reads none.

use super::words::is_failure;

/// Links as other vendors' tools write them. ROCm has 0 where a device meets itself; MetaX, Ascend and Moore Threads have X there as
/// nvidia-smi has.
const LINKS: [(&str, &str); 3] = [
    ("XGMI", "AMD's rocm-smi"),
    ("MX", "MetaX's mx-smi"),
    ("HCCS", "Huawei's npu-smi"),
];

/// Whose tool writes a link this way.
pub(super) fn link(word: &str) -> Option<&'static str> {
    let counted = word
        .strip_prefix("MT")
        .is_some_and(|links| !links.is_empty() && links.chars().all(|ch| ch.is_ascii_digit()));
    if counted {
        return Some("Moore Threads' mthreads-gmi");
    }
    LINKS
        .iter()
        .find(|(link, _)| *link == word)
        .map(|(_, tool)| *tool)
}

/// How lines begin that other outputs have, marks and blanks left out, and what prints them.
const LINES: [(&str, &str); 7] = [
    ("ROCm System Management Interface", "AMD's rocm-smi"),
    ("ACCESS TABLE", "AMD's amd-smi"),
    ("NPU0", "Huawei's npu-smi"),
    ("MTHREADS-GMI", "Moore Threads' mthreads-gmi"),
    ("NVIDIA-SMI ", "nvidia-smi without `topo -m`"),
    ("GPU 0: ", "`nvidia-smi -L` or `nvidia-smi nvlink`"),
    ("system version=", "NCCL (its topology file)"),
];

/// What prints such a line, if it is known and not `nvidia-smi topo -m`.
pub(crate) fn printed_by(line: &str) -> Option<&'static str> {
    let line = line.trim_start_matches(|ch: char| ch.is_whitespace() || "=|<+-".contains(ch));
    let known = LINES.iter().find(|(words, _)| line.starts_with(words));
    known.filter(|_| !is_failure(line)).map(|(_, tool)| *tool)
}
