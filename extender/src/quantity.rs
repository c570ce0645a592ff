//! Kubernetes quantities as counts of devices: `2`, `2k`, `1Ki`, `2000m`, `2e0`. Exact arithmetic, no floating point.
//! Only whole, non-negative counts are devices; everything else is refused with what stood there.

use gantry_gang::quantity::Quantity;

/// Why a quantity is no count of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Not written as Kubernetes writes quantities.
    #[error("is no quantity; write a whole number such as 2")]
    Malformed,
    /// Below zero.
    #[error("is negative")]
    Negative,
    /// A part of a device.
    #[error("is no whole number of devices")]
    Fractional,
    /// More than any cluster has.
    #[error("is beyond any number of devices")]
    TooLarge,
}

/// Reads a quantity as a count of devices.
///
/// # Errors
/// See [`QuantityError`].
pub(crate) fn count(text: &str) -> Result<u32, QuantityError> {
    let quantity = Quantity::parse(text).map_err(|_| QuantityError::Malformed)?;
    let amount = quantity.amount(0);
    if amount.negative {
        return Err(QuantityError::Negative);
    }
    if !amount.exact {
        return Err(QuantityError::Fractional);
    }
    u32::try_from(amount.units).map_err(|_| QuantityError::TooLarge)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_way_to_write_a_whole_number_is_read() {
        for (text, expected) in [
            ("0", 0),
            ("2", 2),
            ("+2", 2),
            ("2.0", 2),
            ("2000m", 2),
            ("2000000000n", 2),
            ("2e0", 2),
            ("0.2e1", 2),
            ("2E0", 2),
            ("20e-1", 2),
            ("1k", 1000),
            ("1Ki", 1024),
            ("0.5Ki", 512),
            ("-0", 0),
            (".5k", 500),
            ("4.", 4),
        ] {
            assert_eq!(count(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_count_of_devices_is_refused_by_its_fault() {
        for (text, fault) in [
            ("", QuantityError::Malformed),
            ("two", QuantityError::Malformed),
            ("1.2.3", QuantityError::Malformed),
            (".", QuantityError::Malformed),
            ("2 ", QuantityError::Malformed),
            ("2K", QuantityError::Malformed),
            ("1e", QuantityError::Malformed),
            ("-1", QuantityError::Negative),
            ("0.5", QuantityError::Fractional),
            ("500m", QuantityError::Fractional),
            ("1n", QuantityError::Fractional),
            ("0.0000000000000000000000000001", QuantityError::Fractional),
            ("4294967296", QuantityError::TooLarge),
            ("1e999", QuantityError::TooLarge),
            (
                "99999999999999999999999999999999999999999999",
                QuantityError::TooLarge,
            ),
            ("9Ei", QuantityError::TooLarge),
        ] {
            assert_eq!(count(text), Err(fault), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_number_with_any_scale_keeps_its_value(n in 0u32..1_000_000, zeros in 0usize..6) {
            prop_assert_eq!(count(&format!("{n}.{}", "0".repeat(zeros))), Ok(n));
            prop_assert_eq!(count(&format!("{n}{}e-{zeros}", "0".repeat(zeros))), Ok(n));
            prop_assert_eq!(count(&format!("{}m", u64::from(n) * 1000)), Ok(n));
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "[-+0-9.eEkmMGKiu]{0,60}|.{0,30}") {
            let _ = count(&text);
        }
    }
}
