//! The names of NVML's functions, as its header lists them. The position of a name is its slot in the call counters.

include!(concat!(env!("OUT_DIR"), "/names.rs"));

/// The slot of the function `name`, if NVML has it.
pub fn slot(name: &str) -> Option<usize> {
    NAMES.binary_search(&name).ok()
}

/// The slot of a name known when the library is built; a name that is not in the list does not compile.
pub(crate) const fn slot_of(name: &str) -> usize {
    let (mut low, mut high) = (0, NAMES.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match compare(NAMES[middle].as_bytes(), name.as_bytes()) {
            0 => return middle,
            1 => low = middle + 1,
            _ => high = middle,
        }
    }
    // Evaluated at compile time only: every caller is a `const`.
    #[expect(clippy::panic, reason = "a compile error, never a run-time one")]
    {
        panic!("no such NVML function")
    }
}

/// 0 if the texts are equal, 1 if `a` stands before `b`, 2 if after it.
const fn compare(a: &[u8], b: &[u8]) -> u8 {
    let mut at = 0;
    while at < a.len() && at < b.len() {
        if a[at] != b[at] {
            return if a[at] < b[at] { 1 } else { 2 };
        }
        at += 1;
    }
    if a.len() == b.len() {
        0
    } else if a.len() < b.len() {
        1
    } else {
        2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_its_own_slot() {
        for (position, name) in NAMES.iter().enumerate() {
            assert_eq!(slot(name), Some(position));
            assert_eq!(slot_of(name), position);
        }
        assert_eq!(slot("nvmlNoSuchThing"), None);
    }
}
