//! Kubernetes quantities (`2`, `500m`, `1.5Gi`, `2e3`) in exact arithmetic, without floating point: as whole units, as
//! thousandths, or as a count of devices.

/// A quantity as written, before it is converted to a unit.
#[derive(Debug)]
struct Quantity {
    negative: bool,
    /// Without zeros at either end; empty for zero. `2.000` and `1e3` then need no long arithmetic.
    digits: String,
    /// The digits are multiplied by 2 to this power
    two: u32,
    /// and by 10 to this one.
    ten: i32,
}

/// Why a text is not a quantity, or not a count of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Kubernetes does not write quantities in this form.
    #[error("is not a quantity; write a whole number such as 2")]
    Malformed,
    /// Below zero.
    #[error("is negative")]
    Negative,
    /// A part of a device.
    #[error("is not a whole number of devices")]
    Fractional,
    /// More than 32 bits hold.
    #[error("is more devices than any cluster has")]
    TooLarge,
}

/// A quantity in some unit.
#[derive(Debug)]
struct Amount {
    negative: bool,
    /// Rounded up as Kubernetes rounds; [`u128::MAX`] if it is more than that.
    units: u128,
    /// Nothing was rounded.
    exact: bool,
}

/// Significant digits that are read: so many, times 2 to the 60th, fit into 128 bits.
const DIGITS: usize = 20;

/// Reads a quantity in whole base units: bytes, pods. A part of a unit counts as one; what does not fit into 64 bits is
/// the largest number.
///
/// # Errors
/// [`QuantityError::Malformed`].
pub fn units(text: &str) -> Result<i64, QuantityError> {
    Ok(Quantity::parse(text)?.amount(0).clamped())
}

/// Reads a quantity in thousandths, the unit of CPU; rounded like [`units`].
///
/// # Errors
/// [`QuantityError::Malformed`].
pub fn thousandths(text: &str) -> Result<i64, QuantityError> {
    Ok(Quantity::parse(text)?.amount(3).clamped())
}

/// Reads a quantity as a count of devices: a whole number, not negative.
///
/// # Errors
/// See [`QuantityError`].
pub fn count(text: &str) -> Result<u32, QuantityError> {
    let amount = Quantity::parse(text)?.amount(0);
    if amount.negative {
        return Err(QuantityError::Negative);
    }
    if !amount.exact {
        return Err(QuantityError::Fractional);
    }
    u32::try_from(amount.units).map_err(|_| QuantityError::TooLarge)
}

impl Quantity {
    fn parse(text: &str) -> Result<Self, QuantityError> {
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(QuantityError::Malformed);
        }
        let (two, ten) = scale(suffix)?;
        let digits = [whole, fraction].concat();
        let significant = digits.trim_end_matches('0');
        let power = |digits: usize| i32::try_from(digits).map_err(|_| QuantityError::Malformed);
        Ok(Self {
            negative,
            two,
            ten: ten + power(digits.len() - significant.len())? - power(fraction.len())?,
            digits: significant.trim_start_matches('0').to_owned(),
        })
    }

    /// The quantity in units of 10 to the power of -`finer`.
    fn amount(&self, finer: i32) -> Amount {
        let kept = self.digits.len().min(DIGITS);
        let lost = self.digits.len() - kept;
        let power = (self.ten + finer).saturating_add(i32::try_from(lost).unwrap_or(i32::MAX));
        let value = self.digits[..kept].parse().unwrap_or(0u128) << self.two;
        let ten = 10u128.checked_pow(power.unsigned_abs());
        let (units, exact) = match (value, ten) {
            (0, _) => (0, true),
            (value, ten) if power >= 0 => {
                let scaled = ten.and_then(|ten| value.checked_mul(ten));
                // A whole number whose last digits were not read is larger than anything that is counted.
                (scaled.unwrap_or(u128::MAX), lost == 0 || self.ten + finer >= 0)
            }
            (value, Some(ten)) => (value / ten, value % ten == 0 && lost == 0),
            (_, None) => (0, false),
        };
        Amount {
            negative: self.negative && value > 0,
            units: if exact { units } else { units.saturating_add(1) },
            exact,
        }
    }
}

impl Amount {
    fn clamped(self) -> i64 {
        let units = i64::try_from(self.units).unwrap_or(i64::MAX);
        if self.negative { -units } else { units }
    }
}

/// The powers of 2 and of 10 that a suffix stands for.
fn scale(suffix: &str) -> Result<(u32, i32), QuantityError> {
    Ok(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        exponent => {
            let power = exponent
                .strip_prefix(['e', 'E'])
                .filter(|power| power.len() <= 4)
                .and_then(|power| power.parse().ok());
            (0, power.ok_or(QuantityError::Malformed)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_and_thousandths_are_rounded_up() {
        for (text, bytes) in [
            ("0", 0),
            ("128Mi", 128 << 20),
            ("1.5Gi", 3 << 29),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("128974848000m", 128_974_848),
            ("0.5", 1),
            ("1n", 1),
            ("-2", -2),
            ("-0", 0),
            ("8Ei", i64::MAX),
            ("1e999", i64::MAX),
        ] {
            assert_eq!(units(text), Ok(bytes), "{text}");
        }
        for (text, milli) in
            [("2", 2000), ("250m", 250), ("0.1", 100), ("1e-3", 1), ("1n", 1), ("1000001u", 1001)]
        {
            assert_eq!(thousandths(text), Ok(milli), "{text}");
        }
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in ["", "two", "1.2.3", ".", "2 ", "2K", "1e", "-", "1e12345"] {
            assert_eq!(units(text), Err(QuantityError::Malformed), "{text}");
        }
    }

    #[test]
    fn count_accepts_every_form_of_a_whole_number() {
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
    fn count_names_the_fault_of_other_quantities() {
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
            ("99999999999999999999999999999999999999999999", QuantityError::TooLarge),
            ("9Ei", QuantityError::TooLarge),
        ] {
            assert_eq!(count(text), Err(fault), "{text}");
        }
    }

    proptest! {
        /// Against arithmetic on whole nanos, where that does not overflow.
        #[test]
        fn rounding_equals_whole_nano_arithmetic(nanos in 0u64..1_000_000_000_000_000, ten in 0u32..4) {
            let text = format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000);
            prop_assert_eq!(units(&text), Ok(i64::try_from(nanos.div_ceil(1_000_000_000)).unwrap()));
            prop_assert_eq!(thousandths(&text), Ok(i64::try_from(nanos.div_ceil(1_000_000)).unwrap()));
            let scaled = nanos * 10u64.pow(ten);
            prop_assert_eq!(
                units(&format!("{nanos}e{}", i64::from(ten) - 9)),
                Ok(i64::try_from(scaled.div_ceil(1_000_000_000)).unwrap())
            );
        }

        #[test]
        fn count_is_independent_of_the_scale(n in 0u32..1_000_000, zeros in 0usize..6) {
            prop_assert_eq!(count(&format!("{n}.{}", "0".repeat(zeros))), Ok(n));
            prop_assert_eq!(count(&format!("{n}{}e-{zeros}", "0".repeat(zeros))), Ok(n));
            prop_assert_eq!(count(&format!("{}m", u64::from(n) * 1000)), Ok(n));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in "[-+0-9.eEkmMGKiu]{0,60}|.{0,30}") {
            let _ = (units(&text), thousandths(&text), count(&text));
        }
    }
}
