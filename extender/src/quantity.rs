//! Kubernetes quantities as counts of devices: `2`, `2k`, `1Ki`, `2000m`, `2e0`. Exact arithmetic, no floating point.
//! Only whole, non-negative counts are devices; everything else is refused with what stood there.

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
pub fn count(text: &str) -> Result<u32, QuantityError> {
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(QuantityError::Malformed);
    }
    let scale = Scale::of(suffix)?;
    let digits = [whole, fraction].concat();
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Ok(0);
    }
    if negative {
        return Err(QuantityError::Negative);
    }
    let decimals = i32::try_from(fraction.len()).map_err(|_| QuantityError::TooLarge)?;
    scale.apply(digits, decimals)
}

/// What a suffix multiplies by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// 10 to this power.
    Ten(i32),
    /// 2 to this power.
    Two(u32),
}

impl Scale {
    fn of(suffix: &str) -> Result<Self, QuantityError> {
        let scale = match suffix {
            "" => Self::Ten(0),
            "n" => Self::Ten(-9),
            "u" => Self::Ten(-6),
            "m" => Self::Ten(-3),
            "k" => Self::Ten(3),
            "M" => Self::Ten(6),
            "G" => Self::Ten(9),
            "T" => Self::Ten(12),
            "P" => Self::Ten(15),
            "E" => Self::Ten(18),
            "Ki" => Self::Two(10),
            "Mi" => Self::Two(20),
            "Gi" => Self::Two(30),
            "Ti" => Self::Two(40),
            "Pi" => Self::Two(50),
            "Ei" => Self::Two(60),
            exponent => {
                let power = exponent
                    .strip_prefix(['e', 'E'])
                    .filter(|power| power.len() <= 4)
                    .and_then(|power| power.parse::<i32>().ok())
                    .ok_or(QuantityError::Malformed)?;
                Self::Ten(power)
            }
        };
        Ok(scale)
    }

    /// `digits` (no leading zero, not empty) with `decimals` of them behind the point, times this scale.
    fn apply(self, digits: &str, decimals: i32) -> Result<u32, QuantityError> {
        let (power, factor) = match self {
            Self::Ten(power) => (power - decimals, 1),
            Self::Two(power) => (-decimals, 1u128 << power),
        };
        // Zeros at the end are powers of ten: without them neither `2.000` nor `1e3` needs long arithmetic.
        let significant = digits.trim_end_matches('0');
        let zeros = i32::try_from(digits.len() - significant.len()).map_err(|_| QuantityError::TooLarge)?;
        let power = power + zeros;
        // 20 digits times 2^60 fit into 128 bits. A longer number is either far too large or has a fraction.
        if significant.len() > 20 {
            return Err(match i64::try_from(significant.len()) {
                Ok(length) if i64::from(power) + length <= 0 => QuantityError::Fractional,
                _ if power < 0 => QuantityError::Fractional,
                _ => QuantityError::TooLarge,
            });
        }
        let value = significant
            .parse::<u128>()
            .map_err(|_| QuantityError::Malformed)?
            .checked_mul(factor)
            .ok_or(QuantityError::TooLarge)?;
        let ten = |power: i32| {
            u32::try_from(power)
                .ok()
                .and_then(|power| 10u128.checked_pow(power))
        };
        let value = if power >= 0 {
            ten(power)
                .and_then(|scale| value.checked_mul(scale))
                .ok_or(QuantityError::TooLarge)?
        } else {
            match ten(-power) {
                Some(scale) if value % scale == 0 => value / scale,
                _ => return Err(QuantityError::Fractional),
            }
        };
        u32::try_from(value).map_err(|_| QuantityError::TooLarge)
    }
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
