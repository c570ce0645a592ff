//! GPU models with the version and number of their NVLinks. Rates are in [`gantry_topology::bandwidth`].

/// A model: the words of its name, its short name, its NVLink version, and the most NVLinks of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Product {
    words: &'static [&'static str],
    pub(crate) name: &'static str,
    /// Version and links per GPU; `None` for a GPU without NVLinks.
    pub(crate) nvlink: Option<(u8, u8)>,
}

const fn product(words: &'static [&'static str], name: &'static str, nvlink: Option<(u8, u8)>) -> Product {
    Product { words, name, nvlink }
}

/// The more specific names first: a GB200 is no B200, an RTX PRO 6000 no RTX 6000.
const PRODUCTS: &[Product] = &[
    product(&["GB300"], "GB300", Some((5, 18))),
    product(&["GB200"], "GB200", Some((5, 18))),
    product(&["B300"], "B300", Some((5, 18))),
    product(&["B200"], "B200", Some((5, 18))),
    product(&["B100"], "B100", Some((5, 18))),
    product(&["GH200"], "GH200", Some((4, 18))),
    product(&["H200", "NVL"], "H200 NVL", Some((4, 18))),
    product(&["H200"], "H200", Some((4, 18))),
    product(&["H100"], "H100", Some((4, 18))),
    product(&["H800"], "H800", Some((4, 8))),
    product(&["H20"], "H20", Some((4, 18))),
    product(&["A100"], "A100", Some((3, 12))),
    product(&["A800"], "A800", Some((3, 8))),
    product(&["A30"], "A30", Some((3, 4))),
    product(&["A40"], "A40", Some((3, 4))),
    product(&["A6000"], "RTX A6000", Some((3, 4))),
    product(&["A5500"], "RTX A5500", Some((3, 4))),
    product(&["A5000"], "RTX A5000", Some((3, 4))),
    product(&["A4500"], "RTX A4500", Some((3, 4))),
    product(&["A4000"], "RTX A4000", None),
    product(&["A10"], "A10", None),
    product(&["A10G"], "A10G", None),
    product(&["A16"], "A16", None),
    product(&["A2"], "A2", None),
    product(&["3090"], "RTX 3090", Some((3, 4))),
    product(&["L40S"], "L40S", None),
    product(&["L40"], "L40", None),
    product(&["L4"], "L4", None),
    product(&["L20"], "L20", None),
    product(&["L2"], "L2", None),
    product(&["3080"], "RTX 3080", None),
    product(&["3070"], "RTX 3070", None),
    product(&["3060"], "RTX 3060", None),
    product(&["4090"], "RTX 4090", None),
    product(&["4080"], "RTX 4080", None),
    product(&["4070"], "RTX 4070", None),
    product(&["4060"], "RTX 4060", None),
    product(&["5090"], "RTX 5090", None),
    product(&["5080"], "RTX 5080", None),
    product(&["5070"], "RTX 5070", None),
    product(&["5060"], "RTX 5060", None),
    product(&["RTX", "PRO", "6000"], "RTX PRO 6000", None),
    product(&["6000", "ADA"], "RTX 6000 Ada", None),
    product(&["GB10"], "GB10", None),
    product(&["V100"], "V100", Some((2, 6))),
    product(&["V100S"], "V100S", None),
    product(&["GV100"], "GV100", Some((2, 4))),
    product(&["TITAN", "RTX"], "TITAN RTX", Some((2, 2))),
    product(&["TITAN", "V"], "TITAN V", None),
    product(&["2080"], "RTX 2080", Some((2, 2))),
    product(&["T4"], "T4", None),
    product(&["P100"], "P100", Some((1, 4))),
    product(&["P40"], "P40", None),
    product(&["P4"], "P4", None),
    product(&["P6000"], "Quadro P6000", None),
    product(&["M60"], "M60", None),
    product(&["M40"], "M40", None),
    product(&["K80"], "K80", None),
];

/// The product a model name such as `NVIDIA A100-SXM4-80GB` belongs to.
pub(crate) fn by_name(name: &str) -> Option<Product> {
    let words = words(name);
    PRODUCTS
        .iter()
        .copied()
        .find(|product| product.words.iter().all(|word| words.iter().any(|found| found == word)))
}

/// The product in the description of a machine with `gpus` GPUs; `None` if it names none, several, or another number of
/// GPUs (`2x 4090 and others`).
pub(crate) fn described(description: &str, gpus: usize) -> Option<Product> {
    let words = words(description);
    let product = by_name(description)?;
    let others = PRODUCTS.iter().any(|other| {
        other.name != product.name
            && other.words.iter().all(|word| words.contains(&(*word).to_owned()))
            && !other.words.iter().all(|word| product.words.contains(word))
    });
    // "8x Tesla V100": the count may stand one word further ahead.
    let counts = words.iter().enumerate().filter(|(_, word)| product.words.contains(&word.as_str()));
    let miscounted = counts
        .flat_map(|(index, _)| words.get(index.saturating_sub(2)..index).unwrap_or_default())
        .filter_map(|word| word.strip_suffix('X')?.parse::<usize>().ok())
        .any(|count| count != gpus);
    (!others && !miscounted).then_some(product)
}

/// Words in capitals; `8xA100` counts as `8X` and `A100`.
fn words(text: &str) -> Vec<String> {
    let upper = text.to_ascii_uppercase();
    let mut words = Vec::new();
    for word in upper.split(|ch: char| !ch.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
        match word.split_once('X') {
            Some((count, rest))
                if !rest.is_empty() && !count.is_empty() && count.chars().all(|ch| ch.is_ascii_digit()) =>
            {
                words.push(format!("{count}X"));
                words.push(rest.to_owned());
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(description: &str, gpus: usize) -> Option<&'static str> {
        described(description, gpus).map(|product| product.name)
    }

    #[test]
    fn description_with_one_model_names_it() {
        assert_eq!(name("NVIDIA DGX-1 with 8x Tesla P100, 4 HCAs", 8), Some("P100"));
        assert_eq!(name("AWS p4d instance, 8xA100 (NV12)", 8), Some("A100"));
        assert_eq!(name("GB200 compute tray: 4x GB200, 2 Grace CPUs", 4), Some("GB200"));
        assert_eq!(name("8x A40-class PCIe, four NV4 pairs", 8), Some("A40"));
        assert_eq!(name("2x RTX PRO 6000 Workstation on WRX90E", 2), Some("RTX PRO 6000"));
        assert_eq!(name("4x H200 NVL with a bridge", 4), Some("H200 NVL"));
    }

    #[test]
    fn description_of_several_models_names_none() {
        assert_eq!(name("5-GPU workstation (2x 4090 and others)", 5), None);
        assert_eq!(name("one A100, one V100", 2), None);
        assert_eq!(name("8x NV18 node with 76 NICs", 8), None);
    }
}
