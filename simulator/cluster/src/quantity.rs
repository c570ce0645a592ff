//! Kubernetes quantities (`500m`, `64Gi`, `8`) as whole thousandths: enough for a scheduler that adds and compares.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Suffixes and what one of them is worth in thousandths, rounded up where less.
const SUFFIXES: [(&str, u128); 13] = [
    ("Ki", 1024 * 1000),
    ("Mi", (1 << 20) * 1000),
    ("Gi", (1 << 30) * 1000),
    ("Ti", (1 << 40) * 1000),
    ("Pi", (1 << 50) * 1000),
    ("Ei", (1 << 60) * 1000),
    ("m", 1),
    ("k", 1_000_000),
    ("M", 1_000_000_000),
    ("G", 1_000_000_000_000),
    ("T", 1_000_000_000_000_000),
    ("P", 1_000_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000_000),
];

/// Thousandths of `quantity`; a text that is none counts nothing.
pub(crate) fn thousandths(quantity: &Quantity) -> u128 {
    let text = quantity.0.trim();
    let (number, unit) = SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
        .unwrap_or((text, 1000));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let Ok(whole) = whole.parse::<u128>() else {
        return 0;
    };
    // Nine digits of a fraction are finer than any quantity Kubernetes keeps.
    let digits: String = fraction.chars().take(9).collect();
    let scale = 10_u128.pow(u32::try_from(digits.len()).unwrap_or(0));
    let part = digits.parse::<u128>().unwrap_or(0) * unit;
    whole.saturating_mul(unit).saturating_add(part.div_ceil(scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        let read = |text: &str| thousandths(&Quantity(text.into()));
        assert_eq!(read("8"), 8000);
        assert_eq!(read("500m"), 500);
        assert_eq!(read("1.5"), 1500);
        assert_eq!(read("2Ki"), 2_048_000);
        assert_eq!(read("1.5Gi"), 1_610_612_736_000);
        assert_eq!(read("3M"), 3_000_000_000);
        assert_eq!(read("nonsense"), 0);
    }
}
