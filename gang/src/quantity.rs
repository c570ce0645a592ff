//! Kubernetes quantities (`2`, `500m`, `1.5Gi`, `2e3`), exactly: no floating point. What a quantity counts, and which are refused, is
//! the caller's.

/// A quantity as written, not yet in any unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantity {
    negative: bool,
    /// Without zeros at either end; empty for zero. `2.000` and `1e3` need no long arithmetic then.
    digits: String,
    /// What the digits are to be multiplied by: 2 to this power
    two: u32,
    /// and 10 to this one.
    ten: i32,
}

/// Not written as Kubernetes writes quantities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is no quantity; write a number such as 2, 500m or 1.5Gi")]
pub struct Malformed;

/// A quantity in some unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount {
    /// Below zero.
    pub negative: bool,
    /// How much, rounded up as Kubernetes rounds; [`u128::MAX`] if it is more than that.
    pub units: u128,
    /// Nothing was rounded.
    pub exact: bool,
}

/// Digits that are looked at: so many, times 2 to the 60th, fit into 128 bits.
const DIGITS: usize = 20;

/// Reads a quantity in whole base units: bytes, pods, devices. A part of a unit counts as one; beyond 64 bits it is the largest number.
///
/// # Errors
/// If it is none.
pub fn units(text: &str) -> Result<i64, Malformed> {
    Ok(Quantity::parse(text)?.amount(0).clamped())
}

/// Reads a quantity in thousandths, as CPU is counted; rounded like [`units`].
///
/// # Errors
/// If it is none.
pub fn thousandths(text: &str) -> Result<i64, Malformed> {
    Ok(Quantity::parse(text)?.amount(3).clamped())
}

impl Quantity {
    /// Reads a quantity.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
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
            return Err(Malformed);
        }
        let (two, ten) = scale(suffix)?;
        let digits = [whole, fraction].concat();
        let significant = digits.trim_end_matches('0');
        let power = |digits: usize| i32::try_from(digits).map_err(|_| Malformed);
        Ok(Self {
            negative,
            two,
            ten: ten + power(digits.len() - significant.len())? - power(fraction.len())?,
            digits: significant.trim_start_matches('0').to_owned(),
        })
    }

    /// How much it is in units of which 10 to the `finer` make one.
    pub fn amount(&self, finer: i32) -> Amount {
        let kept = self.digits.len().min(DIGITS);
        let lost = self.digits.len() - kept;
        let power = (self.ten + finer).saturating_add(i32::try_from(lost).unwrap_or(i32::MAX));
        let value = self.digits[..kept].parse().unwrap_or(0u128) << self.two;
        let ten = 10u128.checked_pow(power.unsigned_abs());
        let (units, exact) = match (value, ten) {
            (0, _) => (0, true),
            (value, ten) if power >= 0 => {
                let scaled = ten.and_then(|ten| value.checked_mul(ten));
                // A whole number whose last digits were not looked at is beyond anything that is counted.
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

/// What a suffix multiplies by: powers of 2 and of 10.
fn scale(suffix: &str) -> Result<(u32, i32), Malformed> {
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
            (0, power.ok_or(Malformed)?)
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn memory_is_read_in_bytes_and_cpu_in_thousandths() {
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
        for (text, milli) in [
            ("2", 2000),
            ("250m", 250),
            ("0.1", 100),
            ("1e-3", 1),
            ("1n", 1),
            ("1000001u", 1001),
        ] {
            assert_eq!(thousandths(text), Ok(milli), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in ["", "two", "1.2.3", ".", "2 ", "2K", "1e", "-", "1e12345"] {
            assert_eq!(units(text), Err(Malformed), "{text}");
        }
    }

    proptest! {
        /// Against arithmetic on whole nanos, where that does not overflow.
        #[test]
        fn rounding_is_up_and_exact(nanos in 0u64..1_000_000_000_000_000, ten in 0u32..4) {
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
        fn no_text_makes_the_reader_panic(text in "[-+0-9.eEkmMGKiu]{0,60}|.{0,30}") {
            let _ = (units(&text), thousandths(&text));
        }
    }
}
